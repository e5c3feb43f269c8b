"""Models that keep something of what leaves the memory against the loops of `beyond_loops.py`, and every gradient."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import TINY, assert_close, default_dtype, gradients, random_weights
from tests.reference.beyond_loops import Kept, read_row
from transformer_xl.model.beyond.memory import BeyondMems
from transformer_xl.model.beyond.model import BeyondTransformerXL
from transformer_xl.model.call import Execution, Rows
from transformer_xl.model_config import TransformerXLConfig

SIZES: dict[str, Any] = {"mem_len": 3, "compression": 2, "compressed_len": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"beyond": "linear"},
    "linear, pre_lnorm": {"beyond": "linear", "pre_lnorm": True, "final_norm": True, "activation": "relu2"},
    "linear, same_length": {"beyond": "linear", "same_length": True},
    "linear, same_length besides self": {"beyond": "linear", "same_length": True, "same_length_besides_self": True},
    "linear, one by one": {"beyond": "linear", "compression": 1},
    "linear, shaw": {"beyond": "linear", "attention": "shaw", "max_klen": 5},
    "linear, rotary": {"beyond": "linear", "attention": "rotary"},
    "delta, pre_lnorm": {"beyond": "delta", "pre_lnorm": True},
    "delta, one by one": {"beyond": "delta", "compression": 1},
    "mean, pre_lnorm, clamp_len": {"beyond": "mean", "pre_lnorm": True, "clamp_len": 2},
    "mean, shaw": {"beyond": "mean", "attention": "shaw", "max_klen": 7},
    "mean, alibi, gates": {"beyond": "mean", "attention": "alibi", "gate": "gru", "pre_lnorm": True},
    "mean of one": {"beyond": "mean", "compression": 1},
    "max": {"beyond": "max", "compression": 3, "untie_r": True},
    "linear, token shift": {"beyond": "linear", "shift": "token", "pre_lnorm": True},
    "delta, convolution": {"beyond": "delta", "shift": "conv", "conv_width": 3},
    "mean, pairs and triples": {"beyond": "mean", "ngram_rows": (30, 20)},
    "delta, averages, pairs": {"beyond": "delta", "shift": "averages", "d_model": 16, "ngram_rows": (30,), "pre_lnorm": True},
    "conv, averages": {"beyond": "conv", "shift": "averages", "d_model": 16, "gate": "gru", "pre_lnorm": True},
    "max, convolution of four": {"beyond": "max", "shift": "conv"},
    "conv, pre_lnorm": {"beyond": "conv", "pre_lnorm": True, "compression": 3, "compressed_len": 1},
}
AGES = [0, 4, 10]
SEGMENTS = [3, 6, 1, 3]
PADS: list[list[int] | None] = [None, [0, 6, 2], None, [3, 0, 0]]
STARTS: list[dict[int, tuple[int, ...]]] = [{}, {0: (0, 1), 2: (3,)}, {}, {1: (0,), 2: (2,)}]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}


@dataclass
class Expected:
    """What rows read before, what they read together, and the loops' results."""

    past: list[list[int]]
    segments: list[Tensor]
    log_probabilities: list[list[Tensor]]
    losses: list[Tensor]
    memories: list[list[Kept]]
    gradients: dict[str, Tensor]


def tiny(**changes: Any) -> BeyondTransformerXL:
    return random_weights(BeyondTransformerXL(TransformerXLConfig(**{**TINY, **SIZES, **changes})).train())


def read_by_loops(model: BeyondTransformerXL, *, ext_len: int = 0, pads: Any = PADS, starts: Any = STARTS) -> Expected:
    """Read random segments in fp64, row by row; row b has read AGES[b] tokens before."""
    with default_dtype(torch.float64):
        config = model.config
        w = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
        past = [torch.randint(13, (age,)).tolist() for age in AGES]
        memories = [[Kept() for _ in range(config.n_layer)] for _ in AGES]
        for ids, memory in zip(past, memories, strict=True):
            if ids:
                with torch.no_grad():
                    read_row(ids, memory, w, config)
        expected = Expected(past, [], [], [], memories, {})
        total = torch.zeros(())
        for T, pad, start in zip(SEGMENTS, pads, starts, strict=True):
            ids = torch.randint(13, (len(AGES), T))
            found, loss = [], torch.zeros(())
            for row, memory in enumerate(memories):
                n_pad = pad[row] if pad else 0
                own = ids[row, n_pad:].tolist()
                if not own:
                    found.append(torch.zeros(0, 13))
                    continue
                begun = [place - n_pad for place in start.get(row, ())]
                logs, own_loss = read_row(own, memory, w, config, starts=begun, ext_len=ext_len)
                found.append(logs)
                loss = loss + own_loss
                total = total + sum(-logs[t, (token + 1) % 13] for t, token in enumerate(own))
            expected.segments.append(ids)
            expected.log_probabilities.append(found)
            expected.losses.append(loss)
            total = total + loss
        total.backward()
        expected.gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in w.items()}
        return expected


def past_of(model: BeyondTransformerXL, past: list[list[int]]) -> BeyondMems:
    rows = []
    for ids in past:
        mems = model.init_mems(1)
        with torch.no_grad():
            rows.append(model.read(torch.tensor([ids]), mems=mems)[1] if ids else mems)
    return BeyondMems.concatenate(rows)


def compare(
    model: BeyondTransformerXL,
    expected: Expected,
    dtype: torch.dtype,
    *,
    ext_len: int = 0,
    pads: Any = PADS,
    starts: Any = STARTS,
    **execution: Any,
) -> None:
    model = model.to(dtype)
    model.zero_grad()
    view = model.with_context(ext_len=ext_len)
    mems, total = past_of(model, expected.past), torch.zeros((), dtype=dtype)
    tolerance = TOLERANCE[dtype]
    for i, ids in enumerate(expected.segments):
        begun = torch.zeros_like(ids, dtype=torch.bool)
        for row, places in starts[i].items():
            begun[row, list(places)] = True
        pad = torch.tensor(pads[i]) if pads[i] else None
        rows = Rows(n_pad=pad, document_starts=begun if starts[i] else None)
        labels = (ids + 1) % 13
        if pad is not None:
            labels = labels.masked_fill(torch.arange(ids.shape[1]) < pad[:, None], -100)
        out = view(ids, mems=mems, labels=labels, rows=rows, execution=Execution(**execution))
        with torch.no_grad():
            logits = view(ids, mems=mems, rows=rows, execution=Execution(**execution)).logits.log_softmax(-1)
        for row, wanted in enumerate(expected.log_probabilities[i]):
            if len(wanted):
                assert_close(f"segment {i}, row {row}", logits[row, -len(wanted) :], wanted.to(dtype), tolerance)
        auxiliary = torch.zeros((), dtype=dtype) if out.auxiliary is None else out.auxiliary
        assert_close(f"loss {i}", auxiliary.to(dtype), expected.losses[i].to(dtype), tolerance)
        total = total + out.nll.sum() + auxiliary
        mems = out.mems
    total.backward()
    for name, wanted in expected.gradients.items():
        assert_close(f"gradient of {name}", gradients(model)[name], wanted.to(dtype), 5 * tolerance)
    compare_memories(model, mems, expected, tolerance)


def compare_memories(model: BeyondTransformerXL, mems: BeyondMems, expected: Expected, tolerance: float) -> None:
    for row, memory in enumerate(expected.memories):
        for layer, kept in enumerate(memory):
            held = mems.hidden[layer][row]
            n = int(mems.n_valid[row])
            assert (n, int(mems.n_block[row])) == (len(kept.held), kept.n_left)
            if n:
                assert_close("held", held[-n:], torch.stack(kept.held).to(held.dtype), tolerance)
            before = mems.inputs[layer][row]
            inputs = kept.inputs[len(kept.inputs) - min(len(kept.inputs), len(before)) :]
            assert not before[: len(before) - len(inputs)].any()
            if inputs:
                assert_close("inputs", before[-len(inputs) :], torch.stack(inputs).to(before.dtype), tolerance)
            own = mems.beyond[layer][row]
            for head, (S, z) in kept.matrix.items():
                assert_close("matrix", own[head], torch.cat([S, z[:, None]], dim=1).to(own.dtype), tolerance)
            if kept.slots:
                assert_close("slots", own[-len(kept.slots) :], torch.stack(kept.slots).to(own.dtype), tolerance)
            if not kept.n_left:
                assert not own.any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_equals_loops(variant: str) -> None:
    model = tiny(**VARIANTS[variant])
    expected = read_by_loops(model)
    compare(model, expected, torch.float32, backend="equation")
    compare(model, expected, torch.float64, checkpoint_layers=True)


@pytest.mark.parametrize("variant", ["linear", "delta, convolution", "conv, averages"])
def test_the_end_of_a_segment_may_be_left_out_of_memory(variant: str) -> None:
    model = tiny(**VARIANTS[variant])
    how: dict[str, Any] = {"ext_len": 1, "pads": [None, [0, 5, 2], None, [2, 0, 0]]}
    compare(model, read_by_loops(model, **how), torch.float64, **how, backend="equation")
