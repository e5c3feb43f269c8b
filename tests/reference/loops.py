"""A second transcription of the paper's section 3.3, by loops over single positions.

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


def layer_norm(x, weight, bias):
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias


def feed_forward(h, w, prefix, config):
    x = layer_norm(h, w[f"{prefix}.layer_norm.weight"], w[f"{prefix}.layer_norm.bias"]) if config.pre_lnorm else h
    x = w[f"{prefix}.inner.weight"] @ x + w[f"{prefix}.inner.bias"]
    x = {
        "relu": lambda x: x * (x > 0),
        "relu2": lambda x: (x * (x > 0)) ** 2,
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    }[config.activation](x)
    out = h + w[f"{prefix}.outer.weight"] @ x + w[f"{prefix}.outer.bias"]
    return out if config.pre_lnorm else layer_norm(out, w[f"{prefix}.layer_norm.weight"], w[f"{prefix}.layer_norm.bias"])


def attend(h, keys, distances, w, prefix, u, v, config):
    """One query vector against its list of key vectors."""
    N, H = config.n_head, config.d_head
    normalize = lambda x: layer_norm(x, w[f"{prefix}.layer_norm.weight"], w[f"{prefix}.layer_norm.bias"])  # noqa: E731
    source = normalize(h) if config.pre_lnorm else h
    sources = [normalize(k) for k in keys] if config.pre_lnorm else keys
    W = w[f"{prefix}.qkv_net.weight"]
    W_q, W_kE, W_v = W[: N * H], W[N * H : 2 * N * H], W[2 * N * H :]
    W_kR = w[f"{prefix}.r_net.weight"]
    heads = []
    for n in range(N):
        part = slice(n * H, (n + 1) * H)
        q = W_q[part] @ source
        scores = []
        for key, distance in zip(sources, distances, strict=True):
            k = W_kE[part] @ key
            if config.clamp_len is not None:
                distance = min(distance, config.clamp_len)
            r = W_kR[part] @ sinusoid(distance, config.d_model)
            scores.append((q @ k + q @ r + u[n] @ k + v[n] @ r) / math.sqrt(H))  # (a) + (b) + (c) + (d)
        weights = torch.softmax(torch.stack(scores), dim=0)
        heads.append(sum(a * (W_v[part] @ key) for a, key in zip(weights, sources, strict=True)))
    out = h + w[f"{prefix}.o_net.weight"] @ torch.cat(heads)
    return out if config.pre_lnorm else normalize(out)


def read_row(ids, memory, w, config):
    """Read one segment of one row.

    Args:
        ids: list of token ids.
        memory: per layer, the list of hidden states remembered (any number up to mem_len).
        w: the model's state dict (with gradients).
        config: its TransformerXLConfig.

    Returns:
        (T, V) logits and the new memory.
    """
    embedding = w["embedding.weight"]
    hidden = []
    for token in ids:
        e = embedding[token]
        if "embedding.projection.weight" in w:
            e = w["embedding.projection.weight"] @ e
        hidden.append(e * math.sqrt(config.d_model))
    new_memory = []
    for layer in range(config.n_layer):
        owner = layer if config.untie_r else 0
        history = list(memory[layer]) + hidden
        first = len(memory[layer])
        outputs = []
        for t, h in enumerate(hidden):
            own = first + t
            visible = [s for s in range(own + 1) if not config.same_length or own - s < config.mem_len]
            h = attend(
                h,
                [history[s] for s in visible],
                [own - s for s in visible],
                w,
                f"layers.{layer}.attention",
                w["r_w_bias"][owner],
                w["r_r_bias"][owner],
                config,
            )
            outputs.append(feed_forward(h, w, f"layers.{layer}.feed_forward", config))
        new_memory.append([h.detach() for h in history][len(history) - min(config.mem_len, len(history)) :])
        hidden = outputs
    logits = []
    for h in hidden:
        if config.final_norm:
            h = layer_norm(h, w["final_norm.weight"], w["final_norm.bias"])
        if "softmax.projection.weight" in w:
            h = w["softmax.projection.weight"] @ h
        logits.append((w["embedding.weight"] if config.tie_weight else w["softmax.weight"]) @ h + w["softmax.bias"])
    return torch.stack(logits), new_memory
