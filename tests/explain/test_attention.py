"""Attention weights against what the model's own attention makes of them, and where they are kept."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.explain.models import ATTENTION, make
from tests.helpers import assert_close
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
