"""Second transcriptions of dynamic evaluation and the neural cache, by loops over segments, places and tokens.

They share no function with the package; a segment is read by `loops.read_row`.
"""

import math

import torch

from tests.reference.loops import read_row


def pieces(ids, tgt_len):
    """What each segment reads, and the tokens that follow."""
    for at in range(0, len(ids) - 1, tgt_len):
        end = min(at + tgt_len, len(ids) - 1)
        yield ids[at:end], ids[at + 1 : end + 1]


def segment_gradient(read, following, memory, w, config):
    """Nats of one segment's tokens, the gradient of their mean by name, and the new memory."""
    leaves = {name: x.clone().requires_grad_(True) for name, x in w.items()}
    log_p, memory = read_row(read, memory, leaves, config)
    nats = -log_p[torch.arange(len(following)), following]
    (nats.sum() / len(nats)).backward()
    zero = {name: torch.zeros_like(x) for name, x in leaves.items()}
    gradient = {name: zero[name] if x.grad is None else x.grad for name, x in leaves.items()}
    return nats.tolist(), gradient, memory


def mean_of_squares(ids, w, config, *, tgt_len):
    """MS of each weight over the segments of a text."""
    memory, n = [[] for _ in range(config.n_layer)], 0
    total = {name: torch.zeros_like(x) for name, x in w.items()}
    for read, following in pieces(ids, tgt_len):
        _, gradient, memory = segment_gradient(read, following, memory, w, config)
        total = {name: total[name] + gradient[name] ** 2 for name in w}
        n += 1
    return {name: x / n for name, x in total.items()}


def dynamic_nats(ids, trained, config, *, tgt_len, lr, decay=0.0, epsilon=0.0, squares=None):
    """Nats of ids[1:], and the weights at the end; the SGD rule without mean squares."""
    memory, nats, w = [[] for _ in range(config.n_layer)], [], dict(trained)
    roots = [math.sqrt(value) for x in (squares or {}).values() for value in x.flatten().tolist()]
    mean = sum(roots) / max(len(roots), 1)
    floor = epsilon * math.sqrt(sum(root**2 for root in roots) / max(len(roots), 1))
    for read, following in pieces(ids, tgt_len):
        own, gradient, memory = segment_gradient(read, following, memory, w, config)
        nats += own
        for name, x in w.items():
            back = trained[name] - x
            if squares is None:
                w[name] = x - lr * gradient[name] + decay * back
            else:
                rms = torch.sqrt(squares[name])
                share = torch.minimum(decay * rms / mean, torch.ones_like(rms))
                w[name] = x - lr * gradient[name] / (rms + floor) + share * back
    return nats, w


def cache_nats(states, model_log_p, following, *, size, weight, theta):
    """Nats of the tokens that follow each state, from whole distributions over the vocabulary."""
    nats = []
    for t, h in enumerate(states):
        p = [math.exp(x) for x in model_log_p[t].tolist()]
        past = range(max(t - size, 0), t)
        if len(past):
            products = [sum(a * b for a, b in zip(h.tolist(), states[i].tolist(), strict=True)) for i in past]
            strengths = [math.exp(theta * product) for product in products]
            p = [(1 - weight) * x for x in p]
            for i, strength in zip(past, strengths, strict=True):
                p[following[i]] += weight * strength / sum(strengths)
        assert math.isclose(sum(p), 1, rel_tol=1e-6)
        nats.append(-math.log(p[following[t]]))
    return nats
