"""Weights that are bf16 for a step: the numbers of autocast, and weights that stay what they were."""

from typing import Any

import pytest
import torch

from tests.training.helpers import bits, differing, tiny_trainer
from transformer_xl.training.narrow import NarrowWeights


@pytest.mark.parametrize("changes", [{}, {"model": {"pre_lnorm": True}}, {"train": {"accumulate": 2, "tbptt_segments": 2}}])
def test_copies_give_the_numbers_of_autocast(changes: dict[str, Any]) -> None:
    narrow, usual = (tiny_trainer(precision="bf16", **changes) for _ in range(2))
    narrow._narrow = NarrowWeights(narrow.model, torch.bfloat16)
    own = dict(narrow.model.named_parameters())
    for _ in range(5):
        one, other = narrow.train_step(), usual.train_step()
        assert one.nats == pytest.approx(other.nats, rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-2)
    assert all(parameter is own[name] for name, parameter in narrow.model.named_parameters())
    assert {parameter.dtype for parameter in own.values()} == {torch.float32}


def test_a_first_step_has_the_bits_of_autocast() -> None:
    """Where each weight is used once, nothing is added in another order."""
    changes: dict[str, Any] = {"model": {"mem_len": 0}}
    narrow, usual = (tiny_trainer(precision="bf16", **changes) for _ in range(2))
    narrow._narrow = NarrowWeights(narrow.model, torch.bfloat16)
    for _ in range(3):
        narrow.train_step()
        usual.train_step()
    assert differing(bits(narrow), bits(usual)) == []


def test_a_failing_step_leaves_the_weights_in_their_places() -> None:
    trainer = tiny_trainer()
    narrow = NarrowWeights(trainer.model, torch.bfloat16)
    own = dict(trainer.model.named_parameters())
    with pytest.raises(KeyboardInterrupt), narrow.in_place():
        raise KeyboardInterrupt
    assert all(parameter is own[name] for name, parameter in trainer.model.named_parameters())
