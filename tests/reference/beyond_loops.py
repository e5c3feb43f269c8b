"""A second transcription of what becomes of positions that leave the memory, by loops over single positions.

It shares no function with the package, only the loops of `loops.py`. A row is a plain list of hidden states per layer, and what
was made of those that left: a matrix and a vector per head, or a list of compressed states.
"""

import math
from dataclasses import dataclass, field

import torch

from tests.reference.loops import embed, feed_forward, gated, layer_norm, log_probabilities, looked_back, ngram_vectors, score


@dataclass
class Kept:
    """What a layer remembers of a row."""

    held: list = field(default_factory=list)  # what keys are made of
    inputs: list = field(default_factory=list)  # of the layer, for its shift
    matrix: dict = field(default_factory=dict)  # per head: S and z
    slots: list = field(default_factory=list)
    n_left: int = 0
    tokens: list = field(default_factory=list)  # of the first layer: ids of its document, for n-grams


def phi(x):
    return torch.where(x > 0, x + 1, torch.exp(x))


def projections(x, w, layer, config):
    """The queries, keys and values of all heads for one state, (N, H) each."""
    prefix = f"layers.{layer}.attention"
    if config.pre_lnorm:
        x = layer_norm(x, w, f"{prefix}.layer_norm", config)
    return (w[f"{prefix}.qkv_net.weight"] @ x).view(3, config.n_head, config.d_head).unbind()


def retrieve(feature, kept, n):
    """What a matrix says: zeros if nothing was written."""
    if n not in kept.matrix:
        return torch.zeros(len(feature)), torch.zeros(())
    S, z = kept.matrix[n]
    return S.T @ feature, z @ feature


def news(k, v, kept, n, config):
    """What a position writes into a matrix."""
    if config.beyond == "linear":
        return v
    total, weight = retrieve(phi(k), kept, n)
    return v - (total / weight if weight > 0 else total)


def is_matrix(config):
    return config.beyond in ("linear", "delta")


def attend(h, own, first, document, goes_on, projected, kept, w, layer, config):
    """What one position h becomes: `projected` is its history, and `first` what attention may see first of it."""
    prefix = f"layers.{layer}.attention"
    slots = kept.slots if goes_on and not is_matrix(config) else []
    seen = [*(projections(x, w, layer, config) for x in slots), *projected[first : own + 1]]
    heads = []
    for n in range(config.n_head):
        q = projected[own][0][n]
        scores = [
            score(q, k[n], n, len(seen) - 1 - place, w, layer, config) / math.sqrt(config.d_head)
            for place, (_, k, _) in enumerate(seen)
        ]
        weights = torch.softmax(torch.stack(scores), dim=0)
        out = sum(a * v[n] for a, (_, _, v) in zip(weights, seen, strict=True))
        if is_matrix(config):
            total, weight = retrieve(phi(q), kept, n) if goes_on else (torch.zeros(config.d_head), torch.zeros(()))
            for _, k, v in projected[document:first]:
                likeness = phi(q) @ phi(k[n])
                total, weight = total + likeness * news(k[n], v[n], kept, n, config), weight + likeness
            mean = total / weight if weight > 0 else total
            size = torch.sqrt((mean * mean).sum() / config.d_head + 1e-6)
            out = out + mean / size * w[f"layers.{layer}.beyond.scale"][n * config.d_head : (n + 1) * config.d_head]
        heads.append(out)
    out = gated(h, w[f"{prefix}.o_net.weight"] @ torch.cat(heads), w, f"{prefix}.gate", config)
    return out if config.pre_lnorm else layer_norm(out, w, f"{prefix}.layer_norm", config)


def write(block, kept, w, layer, config):
    """Let a block leave: change what is kept."""
    w = {name: x.detach() for name, x in w.items()}
    if is_matrix(config):
        old = Kept(matrix=dict(kept.matrix))
        for x in block:
            _, keys, values = projections(x, w, layer, config)
            for n, (k, v) in enumerate(zip(keys, values, strict=True)):
                S, z = kept.matrix.get(n, (torch.zeros(config.d_head, config.d_head), torch.zeros(config.d_head)))
                kept.matrix[n] = (S + torch.outer(phi(k), news(k, v, old, n, config)), z + phi(k))
    else:
        kept.slots.append(compressed(block, w, layer, config))
        del kept.slots[: -(config.compressed_len or config.mem_len)]
    kept.n_left += 1


def compressed(block, w, layer, config):
    if config.beyond == "mean":
        return sum(block) / len(block)
    if config.beyond == "max":
        return torch.stack([max(x[i] for x in block) for i in range(len(block[0]))])
    D, weight, out = config.d_model, w[f"layers.{layer}.beyond.conv.weight"], w[f"layers.{layer}.beyond.conv.bias"]
    for place, x in enumerate(block):
        out = out + weight[:, place * D : (place + 1) * D] @ x
    return out


def reconstruction_loss(queries, blocks, w, layer, config):
    """How far attention to compressed blocks is from attention to the blocks; only the convolution learns."""
    fixed = {name: x if ".beyond." in name else x.detach() for name, x in w.items()}
    left = [x for block in blocks for x in block]
    made = [compressed(block, fixed, layer, config) for block in blocks]
    projected = [[projections(x, fixed, layer, config) for x in states] for states in (left, made)]
    total = torch.zeros(())
    for h in queries:
        query = projections(h.detach(), fixed, layer, config)[0]
        for n in range(config.n_head):
            found = []
            for seen in projected:
                weights = torch.softmax(torch.stack([query[n] @ k[n] / math.sqrt(config.d_head) for _, k, _ in seen]), dim=0)
                found.append(sum(a * v[n] for a, (_, _, v) in zip(weights, seen, strict=True)))
            total = total + ((found[0] - found[1]) ** 2).sum() / (config.n_head * config.d_head)
    return total


def read_row(ids, memory, w, config, *, starts=(), ext_len=0):
    """Read one segment of one row.

    Args:
        ids: list of token ids.
        memory: what each layer remembers, a list of `Kept`; changed in place.
        w: the model's state dict (with gradients).
        config: its TransformerXLConfig.
        starts: places of the segment where documents begin.
        ext_len: tokens at its end that are not remembered.

    Returns:
        (T, V) log-probabilities, and the sum of the layers' reconstruction losses.
    """
    tokens, n_before, hidden = memory[0].tokens + ids, len(memory[0].tokens), []
    for t, token in enumerate(ids):
        begin = max([0, *(n_before + start for start in starts if start <= t)])
        hidden.append(embed(token, w, config) + ngram_vectors(tokens[begin : n_before + t + 1], w, config))
    window = config.mem_len + config.same_length_besides_self
    total = torch.zeros(())
    for layer, kept in enumerate(memory):
        n_held, n_input = len(kept.held), len(kept.inputs)
        inputs, reads = kept.inputs + hidden, []
        for t, h in enumerate(hidden):  # of the document that it is in
            text = inputs[max([0, *(n_input + start for start in starts if start <= t)]) : n_input + t + 1]
            reads.append(looked_back(h, text, len(text) - 1, w, f"layers.{layer}.attention_shift", config))
        history = kept.held + reads
        projected = [projections(x, w, layer, config) for x in history]
        outputs = []
        for own in range(n_held, len(history)):
            begun = [n_held + start for start in starts if n_held + start <= own]
            document = max(begun, default=0)
            first = max(document, n_held - config.mem_len) if is_matrix(config) else document
            if config.same_length:
                first = max(first, own - window + 1)
            h = hidden[own - n_held]
            out = attend(h, own, first, document, not begun, projected, kept, w, layer, config)
            text = inputs[n_input + max(begun) - n_held if begun else 0 : n_input + own - n_held + 1]
            source = looked_back(out, text, len(text) - 1, w, f"layers.{layer}.feed_forward_shift", config)
            outputs.append(feed_forward(out, source, w, f"layers.{layer}.feed_forward", config))
        if starts:
            memory[layer] = kept = Kept()
        begin = max([0, *(n_held + start for start in starts)])
        own_states = [h.detach() for h in history[begin : max(len(history) - ext_len, begin)]]
        blocks, C = [], config.compression
        while len(own_states) >= config.mem_len + C + is_matrix(config):
            blocks.append(own_states[:C])
            own_states = own_states[C:]
        if config.beyond == "conv" and blocks:
            queries = history[max(begin, n_held) :]
            total = total + reconstruction_loss(queries, blocks, w, layer, config)
        for block in blocks:
            write(block, kept, w, layer, config)
        kept.held = own_states
        begin = max([0, *(n_input + start for start in starts)])
        kept.inputs = [h.detach() for h in inputs[begin : max(len(inputs) - ext_len, begin)]]
        hidden = outputs
    begin = max([0, *(n_before + start for start in starts)])
    memory[0].tokens = tokens[begin : max(len(tokens) - ext_len, begin)]
    if config.final_norm:
        hidden = [layer_norm(h, w, "final_norm", config) for h in hidden]
    return torch.stack([log_probabilities(h, w, config) for h in hidden]), total
