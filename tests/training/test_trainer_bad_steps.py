"""A loss or gradient that is not finite changes nothing but the place in the text, the random numbers and the counters."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.helpers import bits, differing, memories, saved, settled, tiny_trainer
from transformer_xl.errors import TrainingError
from transformer_xl.model.call import ModelOutput
from transformer_xl.training.trainer import Trainer

Injury = Callable[[Trainer, pytest.MonkeyPatch, float], None]


def spoil_loss(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    forward = trainer.model.forward

    def spoiled(*args: Any, **kwargs: Any) -> ModelOutput:
        out = forward(*args, **kwargs)
        assert out.nll is not None
        scale = torch.ones_like(out.nll)
        scale[0, 0] = value
        return ModelOutput(out.mems, nll=out.nll * scale)

    monkeypatch.setattr(trainer.model, "forward", spoiled)


def spoil_gradient(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """The loss stays finite."""

    def spoiled(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = value
        return grad

    trainer.model.get_parameter("r_w_bias").register_hook(spoiled)


def spoil_memory(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    memories(trainer)[-1].hidden[0][0, -1] = value


INJURIES: dict[str, Injury] = {"loss": spoil_loss, "gradient": spoil_gradient, "memory": spoil_memory}
EVERYTHING: dict[str, Any] = {
    "model": {"dropout": 0.2, "dropatt": 0.2},
    "optim": {"optimizer": "muon"},
    "train": {"accumulate": 2, "max_bad_steps": 3, "average": "ema"},
}
MOVES = [  # places in the text and among the random numbers, and counters
    "random.cpu",
    "state.skipped",
    "state.bad_in_a_row",
    "state.stream",
    "state.tokens",
    "step",
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("injury", INJURIES)
def test_a_bad_step_changes_only_places_and_counters(injury: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(**EVERYTHING)
    for _ in range(4):
        settled(trainer)
    INJURIES[injury](trainer, monkeypatch, value)
    before = bits(trainer)
    result = settled(trainer)
    assert result.skipped
    assert differing(before, bits(trainer)) == sorted(MOVES)
    assert (trainer.step, trainer.skipped, trainer.bad_in_a_row) == (5, 1, 1)
    assert (trainer.stream.epoch, trainer.stream.position) == (0, 5)


def test_the_run_goes_on_as_if_the_bad_segment_were_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    injured = tiny_trainer(**EVERYTHING)
    for _ in range(2):
        settled(injured)
    with monkeypatch.context() as patch:
        spoil_loss(injured, patch, math.nan)
        settled(injured)
    random_state = torch.get_rng_state()
    nats, after = settled(injured).nats, bits(injured)
    assert injured.bad_in_a_row == 0

    healthy = tiny_trainer(**EVERYTHING)
    for _ in range(2):
        settled(healthy)
    next(healthy.stream)
    healthy.step += 1  # the schedule counts skipped steps
    torch.set_rng_state(random_state)
    assert settled(healthy).nats == nats
    assert differing(after, bits(healthy)) == ["state.skipped", "state.tokens"]


def test_a_run_stopped_after_a_bad_step_has_the_bits_of_one_that_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(**EVERYTHING)
    settled(trainer)
    with monkeypatch.context() as patch:
        spoil_loss(trainer, patch, math.nan)
        settled(trainer)
    checkpoint = copy.deepcopy(saved(trainer))
    settled(trainer)
    expected = bits(trainer)
    resumed = tiny_trainer(seed=9, **EVERYTHING)
    resumed.restore(checkpoint)
    assert resumed.bad_in_a_row == 1
    settled(resumed)
    assert differing(bits(resumed), expected) == []


def test_too_many_in_a_row_end_the_run_and_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(**EVERYTHING)
    for _ in range(6):
        settled(trainer)
    spoil_loss(trainer, monkeypatch, math.nan)
    weights = {name: tensor for name, tensor in bits(trainer).items() if name.startswith("model.")}
    settled(trainer)
    settled(trainer)
    message = (
        r"no finite loss and gradient in 3 steps in a row \(up to step 9, epoch 1, segment 2\).*resume with a lower optim.lr"
    )
    with pytest.raises(TrainingError, match=message):
        settled(trainer)
    assert trainer.skipped == 3
    assert differing(weights, {name: value for name, value in bits(trainer).items() if name.startswith("model.")}) == []


def test_a_finite_step_starts_the_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(**EVERYTHING)
    for n_bad in (2, 2, 1):
        with monkeypatch.context() as patch:
            spoil_loss(trainer, patch, math.inf)
            for _ in range(n_bad):
                assert settled(trainer).skipped
        assert not settled(trainer).skipped
        assert trainer.bad_in_a_row == 0
    assert (trainer.skipped, trainer.step) == (5, 8)


# fp16: multiplied very slowly by CPUs, so everything here is as small as can be

FP16: dict[str, Any] = {
    "precision": "fp16",
    "model": {"n_layer": 1, "d_model": 2, "n_head": 1, "d_head": 2, "d_inner": 2, "mem_len": 2},
    "train": {"batch_size": 1, "tgt_len": 2, "max_bad_steps": 2},
}


def test_fp16_steps_and_keeps_its_scale() -> None:
    trainer = tiny_trainer(**FP16)
    before = bits(trainer)
    assert not settled(trainer).skipped
    assert "model.embedding.weight" in differing(before, bits(trainer))
    assert trainer.scaler.get_scale() == 65536.0
    assert memories(trainer)[0].hidden[0].dtype == torch.float32


def test_an_fp16_overflow_lowers_the_scale_and_is_not_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(**FP16)
    spoil_gradient(trainer, monkeypatch, math.inf)
    before = bits(trainer)
    for halvings in range(1, 5):  # more than max_bad_steps
        assert settled(trainer).skipped
        assert trainer.scaler.get_scale() == 65536.0 / 2**halvings
    assert (trainer.skipped, trainer.bad_in_a_row) == (4, 0)
    moved = ["state.scaler", "state.skipped", "state.stream", "state.tokens", "step"]
    assert differing(before, bits(trainer)) == moved


def test_an_fp16_loss_that_is_not_finite_is_bad_and_leaves_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(**FP16)
    spoil_loss(trainer, monkeypatch, math.nan)
    settled(trainer)
    assert (trainer.scaler.get_scale(), trainer.bad_in_a_row) == (65536.0, 1)
    with pytest.raises(TrainingError, match="in 2 steps in a row"):
        settled(trainer)


def test_an_overflow_at_scale_1_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(**FP16)
    settled(trainer)
    trainer.scaler.update(1.0)
    spoil_gradient(trainer, monkeypatch, math.nan)
    settled(trainer)
    assert (trainer.scaler.get_scale(), trainer.bad_in_a_row) == (1.0, 1)


def test_the_fp16_scale_survives_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(**FP16)
    settled(trainer)
    trainer.scaler.update(256.0)
    resumed = tiny_trainer(**FP16)
    resumed.restore(saved(trainer))
    for each in (trainer, resumed):
        settled(each)
    assert resumed.scaler.get_scale() == 256.0
    assert differing(bits(trainer), bits(resumed)) == []
