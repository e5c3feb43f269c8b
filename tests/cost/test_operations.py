"""Counted operations are those that PyTorch's own counter sees in a real forward and backward pass."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.cost.cases import config, tokens, work
from tests.helpers import tiny_model
from transformer_xl.cost.operations import Flops, count_flops, flops_per_token
from transformer_xl.kernels.device import autocast
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL

CPU = torch.device("cpu")


def seen(changes: dict[str, Any], backend: Any, precision: Any, *, checkpointing: bool = False) -> tuple[int, int, Flops]:
    """What the counter sees forward and backward, and what is counted."""
    model = TransformerXL(config(**changes))
    ids, labels = tokens()
    # attention of PyTorch's own is counted only where it is written out
    with FlopCounterMode(display=False) as forward, autocast(CPU, precision), sdpa_kernel(SDPBackend.MATH):
        out = model(ids, mems=model.init_mems(len(ids)), labels=labels, execution=Execution(backend, checkpointing))
        assert out.nll is not None
    with FlopCounterMode(display=False) as backward, sdpa_kernel(SDPBackend.MATH):
        out.nll.sum().backward()
    counted = work(model.config, precision=precision, backend=backend, checkpointing=checkpointing, labels=labels)
    return forward.get_total_flops(), backward.get_total_flops(), count_flops(counted)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["equation", "matmul"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_layer": 1},
        {"mem_len": 0},
        {"mem_len": 9},
        {"pre_lnorm": True, "final_norm": True},
        {"d_embed": 6},
        {"d_embed": 6, "cutoffs": (7, 15), "tie_weight": False},
        {"cutoffs": (7, 15), "div_val": 2},
        {"cutoffs": (7, 15), "div_val": 2, "proj_same_dim": False, "proj_share_all_but_first": True},
    ],
    ids=str,
)
def test_the_same_as_the_counter(changes: dict[str, Any], backend: str, precision: str) -> None:
    forward, backward, counted = seen(changes, backend, precision)
    assert (forward, backward) == (counted.forward, counted.backward + counted.repeated)
    assert (counted.repeated > 0) == (backend == "matmul" and precision == "fp32")


@pytest.mark.parametrize("attention", ["shaw", "vaswani", "al_rfou", "rotary", "alibi"])
@pytest.mark.parametrize("pre_lnorm", [False, True])
def test_other_kinds_of_attention(attention: str, pre_lnorm: bool) -> None:
    forward, backward, counted = seen({"attention": attention, "pre_lnorm": pre_lnorm}, "matmul", "fp32")
    assert (forward, backward) == (counted.forward, counted.backward + counted.repeated)


def test_layers_that_are_computed_again() -> None:
    forward, backward, counted = seen({}, "equation", "bf16", checkpointing=True)
    assert (forward, backward) == (counted.forward, counted.backward + counted.repeated)
    assert 0.9 * counted.forward < counted.repeated < counted.forward  # all but the vocabulary


def test_scores_in_chunks_are_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model.softmax", "cost.work"):
        monkeypatch.setattr(f"transformer_xl.{module}.CHUNK_ELEMENTS", 29 * 3)
    forward, backward, counted = seen({}, "equation", "bf16")
    assert (forward, backward) == (counted.forward, counted.backward + counted.repeated)
    assert counted.repeated == 2 * 20 * 12 * 29


def test_what_is_there_for_attention_and_memory() -> None:
    whole, without = (count_flops(work(config(mem_len=length))) for length in (6, 0))
    distances = 2 * 2 * 6 * 12 * 12 * 2  # in 2 layers the keys of 6 more distances, and their gradient: for memory, too
    assert whole.memory == whole.needed - without.needed - distances
    assert whole.attention == 3 * 3 * 2 * 20 * 11 * 12 * 2


def test_of_a_token() -> None:
    counted = count_flops(work(config()))
    assert (counted / 20).needed == counted.needed / 20


@pytest.mark.parametrize("changes", [{}, {"mem_len": 3}, {"pre_lnorm": True}, {"attention": "al_rfou"}], ids=str)
def test_segments_that_gradients_reach_through(changes: dict[str, Any]) -> None:
    model = TransformerXL(config(**changes))
    losses, mems, (ids, labels) = [], model.init_mems(4), tokens()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            out = model(ids, mems=mems, labels=labels, keep_graph=True)
            mems = out.mems
            losses.append(out.nll.sum())
        torch.stack(losses).sum().backward()
    counted = count_flops(dataclasses.replace(work(model.config), segments=3))
    assert counter.get_total_flops() == pytest.approx(counted.needed + counted.repeated, rel=1e-12)


def test_what_fused_kernels_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a segment of one tile no tile of keys is skipped, and the last one, half hidden, is computed whole."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("products are counted in Triton's interpreter, and kernels are compiled where there is a GPU")
    from triton.runtime.interpreter import InterpreterBuilder

    flops: list[int] = []
    create_dot = InterpreterBuilder.create_dot

    def counted(self: Any, a: Any, b: Any, *more: Any) -> Any:
        flops.append(2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1])
        return create_dot(self, a, b, *more)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    settings = config(n_layer=1, d_model=32, n_head=2, d_head=16, mem_len=96)
    model = TransformerXL(settings)
    ids, labels = tokens(3, 32)
    mems = Mems(tuple(torch.randn(3, 96, 32) for _ in model.layers), torch.full((3,), 96))
    with FlopCounterMode(display=False) as counter:
        out = model(ids, mems=mems, labels=labels, execution=Execution("triton"))
        assert out.nll is not None
        out.nll.sum().backward()
    product = 2 * 3 * 32 * 128 * 32
    assert sum(flops) == 7 * product
    planned = count_flops(work(settings, rows=3, tgt_len=32, backend="triton"))
    assert counter.get_total_flops() + sum(flops) == planned.needed + planned.repeated
    assert planned.repeated == product
    assert count_flops(work(settings, rows=600, tgt_len=32, backend="triton")).repeated == 2 * 200 * product, (
        "too large to keep"
    )


# of a tiny model: 13 tokens, 2 layers, d_model 10, 3 heads of 4, d_inner 14, 5 positions of memory
MATRICES = 36 * 10 + 10 * 12 + 14 * 10 + 10 * 14  # of a layer
ADAPTIVE = {"cutoffs": (4, 8), "div_val": 2}


def test_operations_of_a_token() -> None:
    text = np.arange(13)
    seen = 5 + (1 + 2 + 3 + 4) / 4  # all of the memory, and on average half of the segment
    assert flops_per_token(tiny_model(), text, tgt_len=4) == 2 * (2 * (MATRICES + 3 * seen * 12) + 130)
    assert flops_per_token(tiny_model(same_length=True), text, tgt_len=4) == 2 * (2 * (MATRICES + 3 * 5 * 12) + 130)
    absolute = tiny_model(attention="vaswani")
    assert flops_per_token(absolute, text, tgt_len=4) == 2 * (2 * (MATRICES + 2 * seen * 12) + 130)


def test_operations_are_those_that_torch_counts() -> None:
    """Of a single token without memory there is nothing to save, but that the key of its distance is projected anew."""
    for changes in ({}, {"d_embed": 6}):
        model = tiny_model(mem_len=0, **changes)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.tensor([[3]]))
        assert flops_per_token(model, np.array([3]), tgt_len=1) == counter.get_total_flops() - 2 * 2 * 10 * 12


def test_tails_take_operations_of_their_own_tokens() -> None:
    model = tiny_model(**ADAPTIVE)
    base = 2 * (MATRICES + 3 * (5 + 2.5) * 12) + 2 * 10 + 4 * 10 + 100  # layers, tails as classes, the head
    frequent, rare, rarest = 100, 4 * 5 + 50 + 50, 5 * 2 + 20 + 20  # projected into the model, and scored
    for ids, own in (([0, 3], frequent), ([4, 7], rare), ([8, 12], rarest), ([0, 4, 8, 8], (frequent + rare + 2 * rarest) / 4)):
        assert flops_per_token(model, np.array(ids), tgt_len=4) == pytest.approx(2 * (base + own))
