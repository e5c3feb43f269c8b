"""Losses on the later half of each segment: what is learned from, counted and logged."""

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_close
from tests.training.helpers import random_ids, tiny_trainer


def gradients(loss: str, *, accumulate: int = 1) -> tuple[dict[str, Tensor], float, int]:
    """Gradients of the second step, whose memory is warm, its nats and the tokens that they are of."""
    trainer = tiny_trainer(optim={"clip": None, "lr": 1e-9, "optimizer": "sgd"}, train={"loss": loss, "accumulate": accumulate})
    trainer.train_step()
    result = trainer.train_step()
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return found, result.nats, result.scored


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_later_half_is_learned_from(accumulate: int) -> None:
    """The mean over positions 2 to 4 of each segment of 5, after all of it was read."""
    trainer = tiny_trainer(optim={"lr": 1e-9, "optimizer": "sgd"})
    trainer.train_step()
    ids = torch.stack([torch.from_numpy(random_ids()[lane + 5 : lane + 11].astype("int64")) for lane in (0, 32, 64, 96)])
    labels = ids[:, 1:].clone()
    labels[:, :2] = -100
    trainer.model.zero_grad()
    (mems,) = trainer.mems
    nll = trainer.model(ids[:, :-1], mems=mems, labels=labels).nll
    (nll.sum() / 12).backward()
    found, nats, scored = gradients("half", accumulate=accumulate)
    assert scored == 12
    assert nats == pytest.approx(nll.sum().item(), abs=1e-4)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        assert_close(name, found[name], parameter.grad, 1e-6)


def test_full_losses_are_of_all_tokens() -> None:
    assert gradients("full")[2] == 20
    assert tiny_trainer(train={"loss": "half"}).train_step().tokens == 20  # all are read, whatever they teach
