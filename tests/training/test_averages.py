"""EMA and SWA: their definition, when they begin, that they are set aside and never change training, and exact resume."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.helpers import bits, differing, saved, tiny_trainer
from transformer_xl.config.run import TrainConfig
from transformer_xl.training.averages import Average
from transformer_xl.training.trainer import Trainer


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def history(trainer: Trainer, n_step: int) -> list[dict[str, Tensor]]:
    """The weights after each step."""
    seen = []
    for _ in range(n_step):
        trainer.train_step()
        seen.append(weights_of(trainer))
    return seen


def assert_average(trainer: Trainer, expected: dict[str, Tensor]) -> None:
    assert trainer.average.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert trainer.average.weights[name].dtype == torch.float32
        assert (trainer.average.weights[name] - tensor).abs().max() < 1e-6, name


def test_ema_is_the_mean_at_first_and_fades_then() -> None:
    trainer = tiny_trainer(train={"average": "ema", "average_decay": 0.75})
    seen = history(trainer, 4)
    expected = {name: torch.stack([step[name] for step in seen]).mean(0) for name in seen[0]}
    assert_average(trainer, expected)
    for after in history(trainer, 3):
        expected = {name: 0.75 * expected[name] + 0.25 * after[name] for name in expected}
    assert_average(trainer, expected)


def test_swa_is_the_mean_of_all_steps_since_its_share_of_the_budget() -> None:
    trainer = tiny_trainer(train={"average": "swa", "average_start": 0.5, "max_steps": 12})
    assert history(trainer, 6)
    assert (trainer.average.count, trainer.average.weights) == (0, {})
    seen = history(trainer, 6)
    assert trainer.average.count == 6
    assert_average(trainer, {name: torch.stack([step[name] for step in seen]).mean(0) for name in seen[0]})


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averaging_does_not_change_training(kind: str) -> None:
    states = []
    for average in ("none", kind):
        trainer = tiny_trainer(model={"dropout": 0.2}, train={"average": average, "average_start": 0.0})
        history(trainer, 5)
        states.append(bits(trainer))
    names = [f"average.{name}" for name, _ in trainer.model.named_parameters()]
    assert differing(*states) == sorted([*names, "state.average"])


def test_in_its_place_the_model_computes_with_the_average_and_has_its_own_weights_afterwards() -> None:
    trainer = tiny_trainer(train={"average": "ema"})
    history(trainer, 3)
    own, average = weights_of(trainer), trainer.average.weights
    with pytest.raises(KeyError), trainer.average.in_place_of(trainer.model):
        assert all(tensor.equal(average[name]) for name, tensor in trainer.model.state_dict().items())
        raise KeyError("whatever happens")
    assert all(tensor.equal(own[name]) for name, tensor in trainer.model.state_dict().items())
    assert not any(tensor.equal(own[name]) for name, tensor in average.items())


def test_another_kind_of_average_begins_when_a_run_is_resumed_with_it() -> None:
    trainer = tiny_trainer(train={"average": "ema"})
    history(trainer, 3)
    resumed = tiny_trainer(train={"average": "swa", "average_start": 0.0})
    resumed.restore(saved(trainer))
    assert resumed.average.count == 0
    seen = history(resumed, 2)
    assert_average(resumed, {name: (seen[0][name] + seen[1][name]) / 2 for name in seen[0]})


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_a_resumed_average_goes_on_and_leaves_the_checkpoint_alone(kind: str) -> None:
    settings: dict[str, Any] = {"train": {"average": kind, "average_decay": 0.9, "average_start": 0.0}}
    trainer, resumed = tiny_trainer(**settings), tiny_trainer(seed=3, **settings)
    history(trainer, 3)
    resumed.restore(saved(trainer))
    before = {name: tensor.clone() for name, tensor in trainer.average.weights.items()}
    history(resumed, 3)
    assert all(tensor.equal(before[name]) for name, tensor in trainer.average.weights.items())
    history(trainer, 3)
    assert differing(bits(resumed), bits(trainer)) == []


def test_weights_of_few_bits_are_averaged_in_more_and_used_in_as_few() -> None:
    model, average = nn.Linear(2, 1, dtype=torch.bfloat16), Average(TrainConfig(max_steps=9, average="swa", average_start=0.0))
    for value in (1.0, 1.0078125):  # neighbors
        nn.init.constant_(model.weight, value)
        average.update(model, progress=1.0)
    assert average.weights["weight"].tolist() == [[1.00390625] * 2]
    with average.in_place_of(model):
        assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_a_count_on_the_device_gives_the_same_average(kind: Any) -> None:
    """Also after numbers on the host, and before them; what the device forbids changes nothing."""
    config = TrainConfig(max_steps=9, average=kind, average_decay=0.75, average_start=0.0)
    plain, mixed, on_device = (Average(config) for _ in range(3))
    model, zero, one = nn.Linear(300, 3), torch.zeros(()), torch.ones(())
    on_device.update(model, progress=1.0, found_inf=one)
    assert (on_device.count, on_device.weights, on_device.state_dict()) == (0, {}, {"kind": kind, "count": 0})
    for step in range(7):
        nn.init.normal_(model.weight)
        plain.update(model, progress=1.0)
        mixed.update(model, progress=1.0, found_inf=zero if step in (3, 4) else None)
        on_device.update(model, progress=1.0, found_inf=zero)
        if step == 0:  # the first is the weights themselves
            assert torch.equal(on_device.weights["weight"], model.weight)
        before = {name: tensor.clone() for name, tensor in on_device.weights.items()}
        on_device.update(nn.Linear(300, 3).requires_grad_(False).apply(_spoil), progress=1.0, found_inf=one)
        assert all(torch.equal(on_device.weights[name], tensor) for name, tensor in before.items())
        for each in (mixed, on_device):
            assert each.state_dict() == {"kind": kind, "count": step + 1}
            for name, tensor in plain.weights.items():
                torch.testing.assert_close(each.weights[name], tensor, rtol=1e-6, atol=1e-6)


def _spoil(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.fill_(float("nan"))


def test_an_average_on_the_device_waits_for_its_share_of_the_budget_and_comes_back() -> None:
    """Whatever the order of its weights: a file has them by the alphabet, and the kernel for a GPU gets lists."""
    config, model = TrainConfig(max_steps=9, average="swa", average_start=0.5), nn.Linear(3, 3)
    average = Average(config)
    average.update(model, progress=0.4, found_inf=torch.zeros(()))
    assert (average.count, average.weights) == (0, {})
    average.update(model, progress=0.5, found_inf=torch.zeros(()))
    saved = {name: weight.clone() for name, weight in average.weights.items()}
    loaded = [Average(config), Average(config)]
    for again, is_reversed in zip(loaded, (False, True), strict=True):
        again.load_state_dict(average.state_dict(), dict(sorted(saved.items(), reverse=is_reversed)), model)
    nn.init.ones_(model.weight)
    nn.init.constant_(model.bias, 2.0)
    for each in (average, *loaded):
        each.update(model, progress=1.0, found_inf=torch.zeros(()))
        assert each.count == 2
        assert all(torch.equal(each.weights[name], weight) for name, weight in average.weights.items())
