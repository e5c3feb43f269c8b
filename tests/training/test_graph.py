"""Steps whose work is launched as a graph: the same bits as without, and places that stay.

A CPU has no CUDA graphs. Here the work is done at once, but on inputs in fixed places; test_gpu.py captures it.
"""

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import AtOnce
from tests.training.helpers import bits, differing, saved, settled, tiny_trainer
from tests.training.test_trainer_bad_steps import INJURIES, MOVES
from transformer_xl.config.model import LstmConfig, ModelConfig, VanillaConfig
from transformer_xl.errors import ConfigError, TrainingError
from transformer_xl.kernels.graphs import Compute
from transformer_xl.model import softmax
from transformer_xl.model.build import make_model
from transformer_xl.model.call import ModelOutput
from transformer_xl.training import trainer as trainer_module
from transformer_xl.training.trainer import StepResult, Trainer
from transformer_xl.world import World


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers launch graphs, on a CPU."""
    monkeypatch.setattr(trainer_module, "why_no_graph", lambda *_, train, **__: None if train.graph == "auto" else "it is off")
    monkeypatch.setattr(trainer_module, "Graphs", AtOnce)
    monkeypatch.setattr(trainer_module, "must_wait", lambda *_: False)  # as on a GPU, where both take the same kernels


def both(**changes: Any) -> tuple[Trainer, Trainer]:
    """A trainer that launches graphs, and one that does not."""
    train = changes.pop("train", {})
    return tiny_trainer(train=train, **changes), tiny_trainer(train=train | {"graph": "off"}, **changes)


def seeded(trainer: Trainer, seed: int) -> StepResult:
    """Take a step; all trainers share a generator."""
    torch.manual_seed(seed)
    return settled(trainer)


CASES: dict[str, dict[str, Any]] = {
    "adam": {"optim": {"optimizer": "adam"}, "model": {"dropout": 0.2, "dropatt": 0.2}},
    "adamw": {"optim": {"optimizer": "adamw", "weight_decay": 0.1}},
    "sgd": {"optim": {"optimizer": "sgd", "momentum": 0.5}},
    "lamb": {"optim": {"optimizer": "lamb"}},
    "muon": {"optim": {"optimizer": "muon", "weight_decay": 0.1}},
    "groups": {"train": {"accumulate": 2}},
    "several segments": {"train": {"tbptt_segments": 3}},
    "ema": {"train": {"average": "ema", "average_decay": 0.9}},
    "swa": {"train": {"average": "swa", "average_start": 0.3, "max_steps": 12}},
    "documents": {"train": {"reset_at_documents": True}},
    "half": {"train": {"loss": "half"}},
    "lengths": {"train": {"varlen": True}, "model": {"same_length": True, "clamp_len": 3}},
    "penalties": {
        "train": {"varlen": True, "activation_penalty": 0.2, "temporal_penalty": 0.1},
        "optim": {"lr_by_length": True},
    },
    "words": {"model": {"dropemb": 0.3, "locked_dropout": True, "dropout": 0.1}},
    "shift": {"model": {"shift": "averages", "ngram_rows": [31], "d_model": 8}},
    "rates of layers": {"optim": {"optimizer": "adam", "layer_lr_decay": 0.7}},
}


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("case", CASES)
def test_a_graph_gives_the_bits_of_single_kernels(case: str) -> None:
    launched, plain = both(**CASES[case])
    for step in range(7):  # an epoch has six segments
        one, other = seeded(launched, step), seeded(plain, step)
        assert (one.nats, one.grad_norm, one.skipped) == (other.nats, other.grad_norm, other.skipped)
    assert differing(bits(launched), bits(plain)) == []


@pytest.mark.usefixtures("graphs")
def test_places_of_memory_and_weights_stay() -> None:
    trainer = tiny_trainer(train={"average": "ema"})
    trainer.train_step()
    before = [tensor.data_ptr() for tensor in tensors_of(trainer)]
    for _ in range(8):
        trainer.train_step()
    assert [tensor.data_ptr() for tensor in tensors_of(trainer)] == before
    assert len(set(before)) == len(before)


def tensors_of(trainer: Trainer) -> list[Tensor]:
    mems = [tensor for group in trainer.mems for tensor in group.state_dict().values()]
    return [*trainer.model.parameters(), *mems, *trainer.average.weights.values(), *trainer.optimizers.state_tensors().values()]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lamb", "muon"])
@pytest.mark.parametrize("injury", INJURIES)
def test_a_bad_step_changes_only_places_and_counters(injury: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, plain = both(optim={"optimizer": optimizer}, train={"average": "ema", "accumulate": 2}, model={"dropout": 0.2})
    for trainer in (launched, plain):
        for step in range(2):
            seeded(trainer, step)
        with monkeypatch.context() as patch:
            INJURIES[injury](trainer, patch, float("nan"))
            before = copy.deepcopy(bits(trainer))
            assert seeded(trainer, 2).skipped
        assert differing(before, bits(trainer)) == sorted(MOVES)
    assert differing(bits(launched), bits(plain)) == []
    assert launched.skipped == 1


@pytest.mark.usefixtures("graphs")
def test_a_loss_that_is_infinite_is_bad_even_if_its_gradients_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer()
    forward = trainer.model.forward

    def spoiled(*args: Any, **kwargs: Any) -> ModelOutput:
        out = forward(*args, **kwargs)
        assert out.nll is not None
        return ModelOutput(out.mems, nll=out.nll + float("inf"))

    monkeypatch.setattr(trainer.model, "forward", spoiled)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    result = trainer.train_step()
    assert result.skipped
    assert result.grad_norm < float("inf")
    assert all(map(torch.equal, before, trainer.model.parameters()))


@pytest.mark.usefixtures("graphs")
def test_steps_that_are_settled_late_are_counted_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(train={"max_bad_steps": 2})
    first = trainer.train_step()
    INJURIES["loss"](trainer, monkeypatch, float("inf"))
    second, third = trainer.train_step(), trainer.train_step()
    trainer.settle(first)
    assert (trainer.skipped, trainer.step, first.step) == (0, 3, 1)
    trainer.settle(second)
    assert (trainer.skipped, trainer.bad_in_a_row) == (1, 1)
    trainer.train_step()
    message = r"diverged at step 2: .* in 2 steps in a row \(up to step 3, epoch 0, segment 2\)"
    with pytest.raises(TrainingError, match=message):
        trainer.settle(third)


@pytest.mark.usefixtures("graphs")
def test_a_resumed_run_has_the_bits_of_one_that_went_on() -> None:
    changes: dict[str, Any] = {"train": {"average": "ema"}, "optim": {"optimizer": "muon"}, "model": {"dropout": 0.2}}
    trainer, resumed = tiny_trainer(**changes), tiny_trainer(seed=1, **changes)
    for _ in range(4):
        trainer.train_step()
    checkpoint = copy.deepcopy(saved(trainer))
    for _ in range(4):
        trainer.train_step()
    expected = bits(trainer)
    resumed.train_step()  # its places are those of another run
    resumed.restore(checkpoint)
    assert isinstance(resumed._graphs, AtOnce)
    assert not resumed._graphs.places
    for _ in range(4):
        resumed.train_step()
    assert differing(bits(resumed), expected) == []


@pytest.mark.usefixtures("graphs")
def test_tails_have_few_sizes() -> None:
    """Numbers of tokens in the tails differ from step to step, and shapes hardly do; what is left over counts for nothing."""
    launched, plain = both(model={"cutoffs": [3, 7], "div_val": 2}, train={"tgt_len": 10})
    for step in range(9):
        one, other = seeded(launched, step), seeded(plain, step)
        assert one.nats == pytest.approx(other.nats, rel=1e-6)
    assert isinstance(launched._graphs, AtOnce)
    assert 1 < len(launched._graphs.places) <= 3


class NeverWaits(TorchDispatchMode):
    """Refuses what a GPU would have to finish before the host goes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"), f"{name} waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("case", [*(case for case in CASES if case != "shift"), "tails"])
def test_the_host_waits_for_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU can tell: it looks at values where a GPU does not, for masks and for labels that are not scored."""
    for module in ("softmax", "adaptive"):
        monkeypatch.setattr(f"transformer_xl.model.{module}.linear_nll", softmax._nll)
    changes = CASES.get(case, {"model": {"cutoffs": [3, 7]}})
    trainer = tiny_trainer(**{**changes, "train": {"attention": "equation", **changes.get("train", {})}})
    launch = AtOnce.launch
    trainer.train_step()  # allots moments

    def watched(self: AtOnce, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> Tensor:
        with NeverWaits():
            return launch(self, key, compute, inputs)

    monkeypatch.setattr(AtOnce, "launch", watched)
    for _ in range(3):
        trainer.train_step()


VANILLA: dict[str, Any] = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16, "max_len": 5}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (VanillaConfig(vocab_size=11, **VANILLA), None),
        (VanillaConfig(vocab_size=11, n_target=2, **VANILLA), "losses besides that of the next token are not captured"),
        (LstmConfig(vocab_size=11, n_layer=1, d_model=8), "a model of kind 'lstm' is not captured"),
    ],
)
def test_what_a_graph_cannot_hold_is_said(config: ModelConfig, reason: str | None) -> None:
    trainer = tiny_trainer()
    facts: dict[str, Any] = {"train": trainer.config, "precision": "fp32", "world": World(), "device": torch.device("cuda")}
    assert trainer_module.why_no_graph(make_model(config), trainer.stream, **facts) == reason


def test_a_cpu_has_no_graphs() -> None:
    assert tiny_trainer().why_no_graph == "cpu has no CUDA graphs"
    assert tiny_trainer(train={"graph": "off"}).why_no_graph == "train.graph is off"
    with pytest.raises(ConfigError, match=r"train.graph \(on\) cannot be: cpu has no CUDA graphs; use auto"):
        tiny_trainer(train={"graph": "on"})
