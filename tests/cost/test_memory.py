"""Counted bytes are those of real tensors; the sum is the peak of a real training step, within a stated tolerance."""

import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.cost.cases import config, tokens, work
from tests.forked import run_forked
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.run import OptimConfig, RunConfig, TrainConfig
from transformer_xl.cost.hardware import measured
from transformer_xl.cost.memory import (
    activation_bytes,
    count_memory,
    layer_bytes,
    lowered_bytes,
    mems_bytes,
)
from transformer_xl.cost.plan import make_plan
from transformer_xl.cost.work import build
from transformer_xl.kernels.device import autocast
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.training.muon import Muon
from transformer_xl.training.optim import Optimizers, state_bytes

CPU = torch.device("cpu")
LARGER: dict[str, Any] = {"d_model": 32, "n_head": 2, "d_head": 24, "d_inner": 88, "mem_len": 12}


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "muon", "lamb"])
def test_moments_are_those_of_the_optimizer(optimizer: Any) -> None:
    model, optim = TransformerXL(config()), OptimConfig(optimizer=optimizer)
    optimizers = Optimizers(model, optim)
    model(*tokens()[:1]).logits.sum().backward()
    optimizers.step(1.0)
    kept = sum(tensor.nbytes for tensor in optimizers.state_tensors().values())
    assert kept == state_bytes(build(model.config), optim)


def test_no_step_takes_as_long_as_the_sizes_would(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[torch.Size] = []
    monkeypatch.setattr("transformer_xl.training.muon.choose_precision", lambda *_: ("fp32", ""))
    monkeypatch.setattr(Muon, "_update", lambda self, parameter, *_: stepped.append(parameter.shape))
    state_bytes(build(config()), OptimConfig(optimizer="muon"))
    assert set(stepped) == {torch.Size([1, 1])}


def test_momentum_that_is_not_used_takes_nothing() -> None:
    assert state_bytes(build(config()), OptimConfig(optimizer="sgd", momentum=0.0)) == 0


def test_weights_and_gradients_are_the_parameters() -> None:
    model = TransformerXL(config())
    model(*tokens()[:1]).logits.sum().backward()
    memory = count_memory(work(model.config), OptimConfig())
    assert memory.weights == sum(p.nbytes for p in model.parameters())
    assert memory.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("mem_len", [0, 3, 5, 6, 20])
def test_memory_occupies_the_tensor_that_it_is_the_end_of(mem_len: int) -> None:
    model = TransformerXL(config(mem_len=mem_len))
    mems = model(tokens()[0], mems=model.init_mems(4)).mems
    storages = {h.untyped_storage().data_ptr(): h.untyped_storage().nbytes() for h in mems.hidden}
    assert mems_bytes(work(model.config)) == sum(storages.values())


def kept_for_backward(settings: TransformerXLConfig, *, precision: Any, backend: str, rows: int, segments: int = 1) -> int:
    """Return the bytes that autograd keeps, besides parameters and the memory that was given."""
    model = TransformerXL(settings)
    ids, labels = tokens(rows, 16)
    n_kept = 16 if settings.mem_len <= 16 else settings.mem_len + 16
    longer = [torch.randn(rows, n_kept, settings.d_model) for _ in model.layers]
    first = Mems(tuple(h[:, n_kept - settings.mem_len :] for h in longer), torch.full((rows,), settings.mem_len))
    given = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *longer)}
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            found[storage.data_ptr()] = (storage.nbytes(), x)  # the tensor too, so that its place is not used again
        return x

    mems = first
    with saved_tensors_hooks(keep, lambda x: x):
        for _ in range(segments):
            with autocast(CPU, precision):
                mems = model(ids, mems=mems, labels=labels, execution=Execution(backend), keep_graph=segments > 1).mems
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pre_lnorm": True},
        {"dropout": 0.0},
        {"dropatt": 0.1},
        {"mem_len": 0},
        {"mem_len": 16},
        {"mem_len": 40},
        *({"activation": name, "dropout": p} for name in ("gelu", "relu2") for p in (0.0, 0.1)),
        {"attention": "shaw"},
        {"attention": "shaw", "dropatt": 0.1},
        {"attention": "vaswani"},
        {"attention": "rotary"},
        {"attention": "rotary", "mem_len": 40, "pre_lnorm": True},
        {"attention": "alibi"},
        {"attention": "alibi", "mem_len": 40, "pre_lnorm": True},
        {"attention": "al_rfou", "d_head": 16},
        *({"shift": "averages", "pre_lnorm": pre, "mem_len": m} for pre in (True, False) for m in (0, 12, 16, 40)),
        *({"gate": "gru", "pre_lnorm": True, "dropout": p} for p in (0.0, 0.1)),
    ],
    ids=str,
)
def test_a_layer_keeps_what_autograd_keeps(changes: dict[str, Any], precision: Any) -> None:
    compare_layer(changes, precision=precision, backend="matmul", rows=4 if precision == "fp32" else 1)


@pytest.mark.parametrize(("changes", "precision"), [({"pre_lnorm": True}, "fp32"), ({"dropatt": 0.1}, "bf16")], ids=str)
def test_a_layer_with_fused_attention(changes: dict[str, Any], precision: Any) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    compare_layer(changes, precision=precision, backend="triton", rows=2, besides=8 if "dropatt" in changes else 0)  # a seed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, {"pre_lnorm": True}, {"mem_len": 40}, {"mem_len": 40, "pre_lnorm": True}], ids=str)
def test_a_layer_of_several_segments(changes: dict[str, Any], precision: Any) -> None:
    compare_layer(changes, precision=precision, backend="matmul", rows=2, segments=3)


def compare_layer(
    changes: dict[str, Any], *, precision: Any, backend: Any, rows: int, besides: int = 0, segments: int = 1
) -> None:
    """Compare the difference between models of three layers and of two."""
    settings = [config(**(LARGER | changes | {"n_layer": n})) for n in (2, 3)]
    kept = [kept_for_backward(s, precision=precision, backend=backend, rows=rows, segments=segments) for s in settings]
    counted = [
        dataclasses.replace(work(s, rows=rows, tgt_len=16, precision=precision, backend=backend), segments=segments)
        for s in settings
    ]
    few, more = (activation_bytes(c) + lowered_bytes(c) for c in counted)
    assert kept[1] - kept[0] == more - few + besides


def test_a_share_of_it() -> None:
    counted = work(config())
    alone, shared = (count_memory(counted, OptimConfig(), n_share=n) for n in (1, 3))
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(shared, name) == -(-getattr(alone, name) // 3)
    assert (alone.gathered, alone.activations) == (0, shared.activations)
    rest = sum(p.numel() for name, p in counted.model.named_parameters() if not name.startswith("layers."))
    layer = sum(p.numel() for p in counted.model.layers[0].parameters())
    assert shared.gathered == 4 * 4 * max(layer, rest)


def test_checkpointing_keeps_one_layer() -> None:
    plain, again = (count_memory(work(config(n_layer=8), checkpointing=c), OptimConfig()) for c in (False, True))
    layer, entering = layer_bytes(work(config())), 20 * 12 * 4
    assert plain.activations - again.activations == 8 * layer - (layer + 8 * entering)


PEAK = {"vocab_size": 2000, "n_layer": 4, "d_model": 256, "n_head": 4, "d_head": 64, "d_inner": 1024, "mem_len": 128}


PEAKS: dict[str, list[dict[str, Any]]] = {
    precision: [
        {"precision": precision, "model": PEAK | model, "train": {"batch_size": 8, "tgt_len": 128, "max_steps": 9} | train}
        for model, train in cases
    ]
    for precision, cases in {
        "fp32": [
            ({"n_layer": 2}, {"batch_size": 4, "accumulate": 2}),
            ({"n_layer": 1, "vocab_size": 20_000}, {"batch_size": 2, "accumulate": 2}),
            ({}, {"tbptt_segments": 3, "tgt_len": 64}),
        ],
        "bf16": [({"dropatt": 0.1}, {"accumulate": 1}), ({}, {"tbptt_segments": 3, "tgt_len": 64})],
    }.items()
}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc, which only Linux has")
@pytest.mark.parametrize(
    ("precision", "number"),
    [
        *(pytest.param("fp32", number, marks=[pytest.mark.slow] if number else []) for number in range(len(PEAKS["fp32"]))),
        # a processor that does not multiply bf16 takes 20 seconds for each
        *(pytest.param("bf16", number, marks=pytest.mark.slow) for number in range(len(PEAKS["bf16"]))),
    ],
)
def test_the_peak_of_a_step_is_within_15_percent_of_the_plan(precision: Any, number: int) -> None:
    settings = PEAKS[precision][number]
    hardware = measured("cpu", flops=1e9, bandwidth=1e9, memory=1e12, precision=precision, on_cpu=True)
    run = RunConfig(model=TransformerXLConfig(**settings["model"]), train=TrainConfig(**settings["train"]))
    planned = make_plan(run, hardware).memory.total
    # bytes, not times: other load on the machine makes no difference
    (peak,) = run_forked("tests.cost.peak_child:peak", 1, settings, timeout=600)
    assert 0.85 * planned <= peak <= 1.15 * planned
