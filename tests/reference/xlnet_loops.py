"""A second transcription of XLNet's two streams (Yang et al. 2019, sec. 2.2 to 2.5), by loops over single positions.

It shares no function with the package: no shift, no ranks, no target rows, no batched product, no memory class. Who sees whom
is a mask of the whole segment, as the authors' `perm_mask`; both streams have a vector at every position. Each row is read by
itself.
"""

import math

import torch


def sinusoid(distance, d_model):
    angles = [distance / 10000 ** (2 * i / d_model) for i in range(d_model // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.get_default_dtype())


def layer_norm(x, w, prefix, config):
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / torch.sqrt(variance + config.layer_norm_epsilon) * w[f"{prefix}.weight"] + w[f"{prefix}.bias"]


def activate(x, config):
    if config.activation == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2))) if config.activation == "gelu" else x * (x > 0)


def feed_forward(x, w, prefix, config):
    inner = activate(w[f"{prefix}.inner.weight"] @ x + w[f"{prefix}.inner.bias"], config)
    return layer_norm(x + w[f"{prefix}.outer.weight"] @ inner + w[f"{prefix}.outer.bias"], w, f"{prefix}.layer_norm", config)


def score(q, k, n, distance, differs, w, layer, config):
    """One head's score of one key by one query: content, distance, segment."""
    owner = layer if config.untie_r else 0
    u, v, s = (w[name][owner, n] for name in ("r_w_bias", "r_r_bias", "r_s_bias"))
    if config.clamp_len is not None:
        distance = max(-config.clamp_len, min(distance, config.clamp_len))
    H = config.d_head
    r = w[f"layers.{layer}.attention.r_net.weight"][n * H : (n + 1) * H] @ sinusoid(distance, config.d_model)
    e = w["seg_embed"][layer, 1 if differs else 0, n]
    return ((q + u) @ k + (q + v) @ r + (q + s) @ e) / math.sqrt(H)


def attend(x, keys, w, layer, config):
    """One query against its list of (key vector, distance, whether it belongs to another segment)."""
    N, H = config.n_head, config.d_head
    prefix = f"layers.{layer}.attention"
    W = w[f"{prefix}.qkv_net.weight"]
    heads = []
    for n in range(N):
        W_q, W_k, W_v = (W[(i * N + n) * H : (i * N + n + 1) * H] for i in range(3))
        if not keys:  # nothing in sight gives nothing
            heads.append(torch.zeros(H) + 0 * (W_q @ x))
            continue
        scores = [score(W_q @ x, W_k @ key, n, distance, differs, w, layer, config) for key, distance, differs in keys]
        weights = torch.softmax(torch.stack(scores), dim=0)
        heads.append(sum(a * (W_v @ key) for a, (key, _, _) in zip(weights, keys, strict=True)))
    return layer_norm(x + w[f"{prefix}.o_net.weight"] @ torch.cat(heads), w, f"{prefix}.layer_norm", config)


def read_row(ids, sees, targets, segments, backward, memory, w, config):
    """Read one row; return its content, log-probabilities at the targets, and its new memory.

    Args:
        ids: list of token ids.
        sees: sees[i][j], whether query i of g sees key j. A query of h sees itself, too.
        targets: positions to predict.
        segments: of each token; memory belongs to 0.
        backward: whether the row is read backward.
        memory: list of vectors per layer, oldest first.
        w: weights by name.
        config: settings.
    """
    sign = -1 if backward else 1
    h = [w["embedding.weight"][token] for token in ids]
    g = [w["mask_emb"] for _ in ids]
    new_memory = []
    n_kept = len(ids) if config.reuse_len is None else config.reuse_len
    for layer in range(config.n_layer):
        past = memory[layer]
        states = [*past, *h[:n_kept]]
        new_memory.append(states[-config.mem_len :] if config.mem_len else [])
        old = [[(x, sign * (len(past) - j + i), segments[i] != 0) for j, x in enumerate(past)] for i in range(len(ids))]
        own = [[(x, sign * (i - j), segments[i] != segments[j]) for j, x in enumerate(h)] for i in range(len(ids))]
        seen = [[key for j, key in enumerate(own[i]) if sees[i][j]] for i in range(len(ids))]
        with_self = [[key for j, key in enumerate(own[i]) if sees[i][j] or j == i] for i in range(len(ids))]
        new_h = [attend(h[i], old[i] + with_self[i], w, layer, config) for i in range(len(ids))]
        g = [attend(g[i], old[i] + seen[i], w, layer, config) if i in targets else g[i] for i in range(len(ids))]
        prefix = f"layers.{layer}.feed_forward"
        h = [feed_forward(x, w, prefix, config) for x in new_h]
        g = [feed_forward(x, w, prefix, config) if i in targets else x for i, x in enumerate(g)]
    scores = [w["embedding.weight"] @ g[i] + w["softmax.bias"] for i in targets]
    return h, [x - torch.logsumexp(x, 0) for x in scores], new_memory
