"""A second transcription of the paper's section 3.3 and of the kinds it is compared with, by loops over single positions.

It shares no function with the package: no shift, no mask, no batched product, no memory class. Each row is read by itself, each
query gathers its own keys from the row's whole history of hidden states, every score is the sum of the four terms (a) to (d).
A row's history is a plain Python list, cut to what a memory of `mem_len` would hold.
"""

import math

import torch


def sinusoid(distance, d_model):
    """R_i of the paper: sines, then cosines."""
    angles = [distance / 10000 ** (2 * i / d_model) for i in range(d_model // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.get_default_dtype())


def layer_norm(x, w, prefix, config):
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / torch.sqrt(variance + config.layer_norm_epsilon) * w[f"{prefix}.weight"] + w[f"{prefix}.bias"]


def looked_back(x, history, own, config):
    """What a block reads of `x`, the state at position `own`, and of the layer's inputs before it."""
    if config.shift == "none":
        return x
    before = [history[own - k] for k in range(1, min(32, own) + 1)]
    last = before[0] if before else 0 * x
    # eighths of the channels: two of the token before, one for each decay, four of its own
    fast = sum((0.5**k * h for k, h in enumerate(before, start=1)), 0 * x)
    slow = sum((0.2 * 0.8 ** (k - 1) * h for k, h in enumerate(before, start=1)), 0 * x)
    parts = [last, last, fast, slow, x, x, x, x]
    n = len(x) // 8
    return torch.cat([part[i * n : (i + 1) * n] for i, part in enumerate(parts)])


def feed_forward(h, read, w, prefix, config):
    x = layer_norm(read, w, f"{prefix}.layer_norm", config) if config.pre_lnorm else read
    x = w[f"{prefix}.inner.weight"] @ x + w[f"{prefix}.inner.bias"]
    x = {
        "relu": lambda x: x * (x > 0),
        "relu2": lambda x: (x * (x > 0)) ** 2,
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    }[config.activation](x)
    out = gated(h, w[f"{prefix}.outer.weight"] @ x + w[f"{prefix}.outer.bias"], w, f"{prefix}.gate", config)
    return out if config.pre_lnorm else layer_norm(out, w, f"{prefix}.layer_norm", config)


def gated(x, y, w, prefix, config):
    """The sum, or a gate of GTrXL; matrices are stacked as r, z, c."""
    if config.gate == "sum":
        return x + y
    y, b, U = y * (y > 0), w[f"{prefix}.bias"], w[f"{prefix}.x_net.weight"]
    if config.gate == "output":
        return x + y / (1 + torch.exp(-(U @ x - b)))
    D = config.d_model
    W, U_c = w[f"{prefix}.y_net.weight"], w[f"{prefix}.candidate_net.weight"]
    r = 1 / (1 + torch.exp(-(W[:D] @ y + U[:D] @ x)))
    z = 1 / (1 + torch.exp(-(W[D : 2 * D] @ y + U[D:] @ x - b)))
    c = torch.tanh(W[2 * D :] @ y + U_c @ (r * x))
    return (1 - z) * x + z * c


def score(q, k, n, distance, w, layer, config):
    """One head's score of one key; with W_kR R, learned distances, or positions that were added to the states."""
    kind = config.attention
    if kind == "transformer_xl":
        owner = layer if config.untie_r else 0
        u, v = w["r_w_bias"][owner, n], w["r_r_bias"][owner, n]
        distance = distance if config.clamp_len is None else min(distance, config.clamp_len)
        r = (w[f"layers.{layer}.attention.r_net.weight"] @ sinusoid(distance, config.d_model)).view(config.n_head, -1)[n]
        return q @ k + q @ r + u @ k + v @ r  # (a) + (b) + (c) + (d)
    if kind == "shaw":
        n_known = min(config.max_klen, config.clamp_len or config.max_klen)
        row = config.max_klen - 1 - min(distance, n_known - 1)
        return q @ k + q @ w["r_emb"][layer, row, n] + w["r_w_bias"][layer, n] @ k + w["r_bias"][layer, row, n]
    if (
        kind == "rotary"
    ):  # pairs as complex numbers: the conjugate of one position's turn times the other's leaves the distance's
        pairs_q, pairs_k = (torch.complex(*x.tensor_split(2)) for x in (q, k))
        turns = [complex(math.cos(a), math.sin(a)) for a in (distance / 10000 ** (2 * f / len(q)) for f in range(len(q) // 2))]
        return torch.stack([(a * b.conj() * turn).real for a, b, turn in zip(pairs_q, pairs_k, turns, strict=True)]).sum()
    if kind == "alibi":
        distance = distance if config.clamp_len is None else min(distance, config.clamp_len)
        return q @ k - slope(n, config.n_head) * distance * math.sqrt(len(q))
    return q @ k


def slope(n, n_head):
    """The slope of a head of ALiBi: a geometric sequence, with those between its members for heads beyond a power of two."""
    if n_head & (n_head - 1) == 0:
        return 2 ** (-8 * (n + 1) / n_head)
    lower = 2 ** int(math.log2(n_head))
    return slope(n, lower) if n < lower else slope(2 * (n - lower), 2 * lower)


def keys_and_values(state, w, layer, config):
    """The keys and the values of all heads for one state, (2, N, H)."""
    prefix = f"layers.{layer}.attention"
    x = layer_norm(state, w, f"{prefix}.layer_norm", config) if config.pre_lnorm else state
    return (w[f"{prefix}.qkv_net.weight"] @ x).view(3, config.n_head, config.d_head)[1:]


def attend(h, read, seen, distances, w, layer, config):
    """The query of one vector, which stands for the state `h`, against a list of keys and values."""
    N, H = config.n_head, config.d_head
    prefix = f"layers.{layer}.attention"
    normalize = lambda x: layer_norm(x, w, f"{prefix}.layer_norm", config)  # noqa: E731
    normalizes_queries = config.attention not in ("vaswani", "al_rfou")
    source = normalize(read) if config.pre_lnorm and normalizes_queries else read
    queries, pairs = (w[f"{prefix}.qkv_net.weight"][: N * H] @ source).view(N, H), [each.unbind() for each in seen]
    heads = []
    for n in range(N):
        scores = [
            score(queries[n], keys[n], n, distance, w, layer, config) / math.sqrt(H)
            for (keys, _), distance in zip(pairs, distances, strict=True)
        ]
        weights = torch.softmax(torch.stack(scores), dim=0)
        heads.append(sum(a * values[n] for a, (_, values) in zip(weights, pairs, strict=True)))
    out = gated(h, w[f"{prefix}.o_net.weight"] @ torch.cat(heads), w, f"{prefix}.gate", config)
    return out if config.pre_lnorm else normalize(out)


def cluster_of(token, config):
    """The cluster of a token and its place there."""
    cluster = sum(token >= cutoff for cutoff in config.cutoffs)
    return cluster, token - (0, *config.cutoffs)[cluster]


def embed(token, w, config):
    if config.div_val == 1:
        e = w["embedding.weight"][token]
        projection = w.get("embedding.projection.weight")
    else:
        cluster, place = cluster_of(token, config)
        e = w[f"embedding.tables.{cluster}"][place]
        projection = w.get(f"embedding.projections.{cluster}")
    return (e if projection is None else projection @ e) * math.sqrt(config.d_model)


def log_probabilities(h, w, config):
    """Log-probability of every token by the chain rule: of its cluster, then of the token in it."""
    head, *tails = [cluster_scores(i, h, w, config) for i in range(len(config.cutoffs) + 1)]
    if config.cutoffs:
        projected = project(0, h, w, config)
        of_tails = [w["softmax.cluster_weight"][i] @ projected + w["softmax.cluster_bias"][i] for i in range(len(tails))]
        head = head + of_tails
    normalizer = torch.logsumexp(torch.stack(head), 0)
    n_own = len(head) - len(tails)
    result = [value - normalizer for value in head[:n_own]]
    for i, tail in enumerate(tails):
        within = torch.logsumexp(torch.stack(tail), 0)
        result += [head[n_own + i] - normalizer + value - within for value in tail]
    return torch.stack(result)


def project(cluster, h, w, config):
    """The hidden state in the width of a cluster's vectors."""
    plain = not config.cutoffs and config.div_val == 1
    if config.tied_projections[cluster]:
        name = "embedding.projection.weight" if config.div_val == 1 else f"embedding.projections.{cluster}"
        return h if name not in w else w[name].T @ h
    if plain:
        return w["softmax.projection.weight"] @ h if "softmax.projection.weight" in w else h
    name = f"softmax.projections.{cluster}"
    return w[name].T @ h if name in w else h


def cluster_scores(cluster, h, w, config):
    borders = (0, *config.cutoffs, config.vocab_size)
    projected = project(cluster, h, w, config)
    scores = []
    for place in range(borders[cluster + 1] - borders[cluster]):
        token = borders[cluster] + place
        if config.tie_weight:
            vector = w["embedding.weight"][token] if config.div_val == 1 else w[f"embedding.tables.{cluster}"][place]
        elif config.div_val == 1:
            vector = w["softmax.weight"][token]
        else:
            vector = w[f"softmax.weights.{cluster}"][place]
        bias = w["softmax.bias"][token] if "softmax.bias" in w else w[f"softmax.biases.{cluster}"][place]
        scores.append(vector @ projected + bias)
    return scores


def ngram_vectors(tokens, w, config):
    """The sum of the vectors of the n-grams that end with `tokens`; before the text stands a token of its own, number 0."""
    total = 0
    for n, n_row in enumerate(config.ngram_rows, start=2):
        numbers = [token + 1 for token in tokens[-n:]]
        numbers = [0] * (n - len(numbers)) + numbers
        factor = config.vocab_size + 1
        if factor**n > n_row:
            factor = next(c for c in range(max(round(0.6180339887498949 * n_row), 1), 2 * n_row) if math.gcd(c, n_row) == 1)
        row = sum(number * factor**k for k, number in enumerate(reversed(numbers))) % n_row
        total = total + w[f"ngrams.tables.{n - 2}"][row] * math.sqrt(config.d_model)
    return total


def read_row(ids, memory, w, config, before=()):
    """Read one segment of one row.

    Args:
        ids: list of token ids.
        memory: per layer, the list of hidden states remembered (any number up to mem_len).
        w: the model's state dict (with gradients).
        config: its TransformerXLConfig.
        before: ids read before.

    Returns:
        (T, V) log-probabilities and the new memory.
    """
    known = [*(before if config.mem_len else ()), *ids]
    hidden = [
        embed(token, w, config) + ngram_vectors(known[: len(known) - len(ids) + t + 1], w, config)
        for t, token in enumerate(ids)
    ]
    window = config.mem_len + config.same_length_besides_self
    new_memory = []
    for layer in range(config.n_layer):
        history = list(memory[layer]) + hidden
        first = len(memory[layer])
        back = [len(history) - 1 - s for s in range(len(history))]  # absolute positions count from the end of the segment
        if config.attention == "al_rfou":  # what has been remembered once gets positions again
            rows = [max(config.max_klen - 1 - distance, 0) for distance in back]
            history = [h + w["r_emb"][layer, row].flatten() for h, row in zip(history, rows, strict=True)]
        if config.attention == "vaswani" and layer == 0:
            limited = [min(distance, config.clamp_len or distance) for distance in back]
            history = [h + sinusoid(distance, config.d_model) for h, distance in zip(history, limited, strict=True)]
        prefix = f"layers.{layer}"
        read = [looked_back(h, history, s, config) for s, h in enumerate(history)]
        only_before = max(len(memory[layer]) - config.mem_len, 0)  # remembered for the oldest key's sake
        pairs = [keys_and_values(state, w, layer, config) for state in read]
        outputs = []
        for own in range(first, len(history)):
            visible = [s for s in range(only_before, own + 1) if not config.same_length or own - s < window]
            distances = [own - s for s in visible]
            out = attend(history[own], read[own], [pairs[s] for s in visible], distances, w, layer, config)
            source = looked_back(out, history, own, config)
            outputs.append(feed_forward(out, source, w, f"{prefix}.feed_forward", config))
        n_kept = config.mem_len and min(config.mem_len + config.shift_reach, len(history))
        new_memory.append([h.detach() for h in history][len(history) - n_kept :])
        hidden = outputs
    if config.final_norm:
        hidden = [layer_norm(h, w, "final_norm", config) for h in hidden]
    return torch.stack([log_probabilities(h, w, config) for h in hidden]), new_memory
