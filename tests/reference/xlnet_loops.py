"""A second transcription of XLNet's two streams (Yang et al. 2019, sec. 2.2 to 2.5), by loops over single positions.

It shares no function with the package: no shift, no ranks, no target rows, no batched product, no memory class. Who sees whom
is a mask of the whole segment, as the authors' `perm_mask`; both streams have a vector at every position. Each row is read by
itself.
"""

import math

import torch

from tests.reference.loops import layer_norm, sinusoid


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
    r = (w[f"layers.{layer}.attention.r_net.weight"] @ sinusoid(distance, config.d_model)).view(config.n_head, -1)[n]
    e = w["seg_embed"][layer, 1 if differs else 0, n]
    return ((q + u) @ k + (q + v) @ r + (q + s) @ e) / math.sqrt(config.d_head)


def projections(x, w, layer, config):
    """The queries, keys and values of all heads for one vector, (N, H) each."""
    return (w[f"layers.{layer}.attention.qkv_net.weight"] @ x).view(3, config.n_head, config.d_head).unbind()


def attend(x, seen, w, layer, config):
    """One query against its list of (projections of a vector, distance, whether it belongs to another segment)."""
    prefix = f"layers.{layer}.attention"
    query, heads = projections(x, w, layer, config)[0], []
    for n in range(config.n_head):
        if not seen:  # nothing in sight gives nothing
            heads.append(0 * query[n])
            continue
        scores = [score(query[n], k[n], n, distance, differs, w, layer, config) for (_, k, _), distance, differs in seen]
        weights = torch.softmax(torch.stack(scores), dim=0)
        heads.append(sum(a * v[n] for a, ((_, _, v), _, _) in zip(weights, seen, strict=True)))
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
        past_keys, own_keys = ([projections(x, w, layer, config) for x in vectors] for vectors in (past, h))
        old = [[(x, sign * (len(past) - j + i), segments[i] != 0) for j, x in enumerate(past_keys)] for i in range(len(ids))]
        own = [[(x, sign * (i - j), segments[i] != segments[j]) for j, x in enumerate(own_keys)] for i in range(len(ids))]
        seen = [[key for j, key in enumerate(own[i]) if sees[i][j]] for i in range(len(ids))]
        with_self = [[key for j, key in enumerate(own[i]) if sees[i][j] or j == i] for i in range(len(ids))]
        new_h = [attend(h[i], old[i] + with_self[i], w, layer, config) for i in range(len(ids))]
        g = [attend(g[i], old[i] + seen[i], w, layer, config) if i in targets else g[i] for i in range(len(ids))]
        prefix = f"layers.{layer}.feed_forward"
        h = [feed_forward(x, w, prefix, config) for x in new_h]
        g = [feed_forward(x, w, prefix, config) if i in targets else x for i, x in enumerate(g)]
    scores = [w["embedding.weight"] @ g[i] + w["softmax.bias"] for i in targets]
    return h, [x - torch.logsumexp(x, 0) for x in scores], new_memory
