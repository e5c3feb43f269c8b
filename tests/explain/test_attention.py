"""Attention weights: against the loops of the reference, and against what the model's own attention makes of them."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.explain.models import ATTENTION, make
from tests.helpers import assert_close
from tests.reference.loops import attend, embed, feed_forward, keys_and_values, layer_norm, score, sinusoid
from transformer_xl.explain.attention import DetailStore, DistanceSums, SegmentDetails
from transformer_xl.kernels.equation import hidden_keys

KINDS = [*ATTENTION, "vanilla", "vanilla, pre_lnorm"]

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_times_values_are_what_the_block_computed(kind):
    """Probabilities that are looked at are those that the model used: with its values they give its output."""
    model = make(kind)
    seen, hooks = [], []
    for layer in model.layers:
        hook = lambda block, args, options, out: seen.append((block, args[0], options, out))  # noqa: E731
        hooks.append(layer.attention.register_forward_hook(hook, with_kwargs=True))
    mems = None
    with torch.no_grad():
        for T in (3, 7, 1, 4):
            _, mems = model.read(torch.randint(13, (2, T)), mems=mems)
        for block, h, options, out in seen:
            weight = block.weights(h, **options)
            assert_close("sums", weight.sum(-1), torch.ones(weight.shape[:-1]), 1e-12)
            mask = options["mask"]
            first_BT = torch.zeros(1, h.shape[1], dtype=torch.int64) if mask is None else mask.first
            hidden = hidden_keys(first_BT, weight.shape[-1])
            assert (weight.masked_fill(~hidden.unsqueeze(1), 0) == 0).all()
            assert_close("output", block.add(h, torch.einsum("bnts,bsnh->btnh", weight, values(block, h, options))), out, 1e-10)
    assert len(seen) == 8


def values(block, h, options):
    if "mem_BMD" not in options:
        h = block.layer_norm(h) if block.pre_lnorm else h
        return F.linear(h, block.qkv_net.weight).unflatten(-1, (3, block.n_head, block.d_head))[:, :, 2]
    return block.project(h, options["mem_BMD"], None)[2]


@pytest.mark.parametrize("kind", ["paper", "pre_lnorm, untie_r", "same_length, clamp_len", "shaw", "vaswani"])
def test_weights_equal_the_loops(kind):
    """Every weight, with memory filling up, is the softmax of the paper's four terms (or of the kind's) taken one by one."""
    model = make(kind)
    w, config = dict(model.named_parameters()), model.config
    memory, mems = [[] for _ in range(config.n_layer)], model.init_mems(1)
    for T in (3, 4, 5):
        ids = torch.randint(13, (1, T))
        seen, _ = model.attention_weights(ids, mems=mems)
        expected, memory = read_weights(ids[0].tolist(), memory, w, config)
        with torch.no_grad():
            mems = model.read(ids, mems=mems)[1]
        for layer in range(config.n_layer):
            assert seen[layer].dtype == torch.float32
            n_key = expected[layer].shape[-1]
            assert_close(f"layer {layer}", seen[layer][0, :, :, -n_key:].double(), expected[layer], 1e-6)
            assert seen[layer][0, :, :, :-n_key].count_nonzero() == 0  # places of a memory that is not full yet


def read_weights(ids, memory, w, config):
    """Weights (N, T, S) of each layer, by loops over positions as in `reference/loops.py`, and the new memory."""
    hidden, weights, new_memory = [embed(token, w, config) for token in ids], [], []
    window = config.mem_len if config.same_length else math.inf
    H = config.d_head
    for layer in range(config.n_layer):
        history, first = list(memory[layer]) + hidden, len(memory[layer])
        if config.attention == "vaswani" and layer == 0:
            history = [h + sinusoid(len(history) - 1 - s, config.d_model) for s, h in enumerate(history)]
        prefix = f"layers.{layer}.attention"
        W_q, W_k, _ = w[f"{prefix}.qkv_net.weight"].split(config.n_head * H)
        norm = (
            (lambda x, prefix=prefix: layer_norm(x, w, f"{prefix}.layer_norm", config)) if config.pre_lnorm else (lambda x: x)
        )
        own_norm = (lambda x: x) if config.attention == "vaswani" else norm
        table = torch.zeros(config.n_head, len(hidden), len(history))
        outputs = []
        for own in range(first, len(history)):
            visible = [s for s in range(own + 1) if own - s < window]
            for n in range(config.n_head):
                part = slice(n * H, (n + 1) * H)
                q = W_q[part] @ own_norm(history[own])
                scores = [score(q, W_k[part] @ norm(history[s]), n, own - s, w, layer, config) / H**0.5 for s in visible]
                table[n, own - first, visible] = torch.stack(scores).softmax(0).detach()
            seen = [keys_and_values(history[s], w, layer, config) for s in visible]
            out = attend(history[own], history[own], seen, [own - s for s in visible], w, layer, config)
            outputs.append(feed_forward(out, out, w, f"layers.{layer}.feed_forward", config))
        weights.append(table)
        new_memory.append([h.detach() for h in history][len(history) - min(config.mem_len, len(history)) :])
        hidden = outputs
    return weights, new_memory


def test_looking_leaves_the_model_as_it_was():
    model = make("paper")
    model.attention_weights(torch.zeros(1, 3, dtype=torch.int64))
    assert not any(layer.attention._forward_pre_hooks for layer in model.layers)


def test_a_wide_bin_is_not_looked_at_more():
    """Attention that is the same at all distances is shown so."""
    distances = DistanceSums(1, 1, 40)
    distances.add(0, torch.full((1, 1, 40), 1 / 40), n_memory=0)
    binned = distances.binned()
    assert len(set(np.diff(binned.edges))) > 1
    np.testing.assert_allclose(binned.per_distance, 1 / 40)


def test_a_store_holds_no_more_than_its_room():
    room = 1 << 18
    store = DetailStore(n_segment=10_000, tgt_len=64, n_head=12, n_bytes=room)
    n = 0
    for index in range(200):
        if store.wants(index, score := float(torch.rand(()))):
            segment = SegmentDetails(64)
            segment.add(torch.rand(12, 64, 70), n_memory=10)
            store.put(index, index * 64, score, segment)
            n += 1
    found = store.joined()
    assert found is not None
    assert room * 0.9 < found.distances.size * 3 + found.memory.size <= room and n < 200
