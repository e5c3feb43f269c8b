"""Ways to compute a step: recomputed layers, a backend by name, a compiler. The numbers stay."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.training.helpers import bits, differing, tiny_trainer
from transformer_xl.errors import ConfigError
from transformer_xl.model.layers import DecoderLayer
from transformer_xl.training import trainer as training_trainer

DROPOUTS = {"dropout": 0.2, "dropatt": 0.2}


def after(n_step: int, **changes: Any) -> dict[str, Any]:
    """The losses of a new trainer's first steps, and its state."""
    trainer = tiny_trainer(**changes)
    losses = {f"step {step}": trainer.train_step().nats for step in range(n_step)}
    return losses | bits(trainer)


CHECKPOINTED: dict[str, dict[str, Any]] = {
    "dropout": {"model": DROPOUTS},
    "relu2, pre_lnorm": {"model": {**DROPOUTS, "activation": "relu2", "pre_lnorm": True}},
    "bf16": {"precision": "bf16", "model": DROPOUTS},
    "several segments": {"model": DROPOUTS, "train": {"tbptt_segments": 3, "accumulate": 2}},
    "documents": {"model": DROPOUTS, "train": {"reset_at_documents": True}},
    "equation": {"model": DROPOUTS, "train": {"attention": "equation"}},
    "shaw": {"model": {**DROPOUTS, "attention": "shaw", "max_klen": 9}},
    "al_rfou": {"model": {**DROPOUTS, "attention": "al_rfou", "max_klen": 12}, "train": {"tbptt_segments": 2}},
}


@pytest.mark.parametrize("case", CHECKPOINTED)
def test_recomputed_layers_change_no_bit(case: str) -> None:
    changes = CHECKPOINTED[case]
    recomputing = {**changes, "train": {**changes.get("train", {}), "checkpoint_layers": True}}
    assert differing(after(4, **changes), after(4, **recomputing)) == []


@pytest.mark.parametrize(("checkpoint_layers", "expected"), [(False, 2), (True, 4)])
def test_layers_are_run_again_in_the_backward_pass(
    checkpoint_layers: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    forward = DecoderLayer.forward

    def counted(self: DecoderLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(DecoderLayer, "forward", counted)
    tiny_trainer(train={"checkpoint_layers": checkpoint_layers}).train_step()
    assert len(calls) == expected


def test_attention_is_computed_by_the_backend_named() -> None:
    plain, named = tiny_trainer(), tiny_trainer(train={"attention": "equation"})
    assert (plain.execution.backend, named.execution.backend) == ("auto", "equation")
    one, other = plain.train_step(), named.train_step()
    assert other.nats == pytest.approx(one.nats, rel=1e-6)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown attention backend 'mathmul'; did you mean 'matmul'"):
        tiny_trainer(train={"attention": "mathmul"})


@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own code
def test_a_compiled_step_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler's front end alone; to generate code takes a minute."""
    graphs: list[object] = []

    def interpreted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=interpreted))
    changes: dict[str, Any] = {"model": {**DROPOUTS, "n_layer": 1}, "train": {"tbptt_segments": 2, "reset_at_documents": True}}
    expected = after(1, **changes)
    assert not graphs
    assert differing(after(1, **{**changes, "train": {**changes["train"], "compile": True}}), expected) == []
    assert graphs


def test_without_a_compiler_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_trainer, "cannot_compile", lambda device: "no C++ compiler is found")
    message = r"train.compile \(True\) cannot work here: no C\+\+ compiler is found; install it, or use train.compile=false"
    with pytest.raises(ConfigError, match=message):
        tiny_trainer(train={"compile": True})
