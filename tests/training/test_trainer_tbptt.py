"""Back-propagation through several segments: the gradient of every parameter is that of the loops, unrolled over the window."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_close
from tests.reference.loops import read_row
from tests.training.helpers import memories, random_ids, tiny_trainer
from transformer_xl.training.trainer import Trainer

MODELS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre_lnorm, same_length": {"pre_lnorm": True, "same_length": True, "final_norm": True},
    "memory longer than the window": {"mem_len": 13},
    "memory shorter than a segment": {"mem_len": 3},
    "shaw": {"attention": "shaw", "max_klen": 9},
    "al_rfou": {"attention": "al_rfou", "max_klen": 12},
    "vaswani": {"attention": "vaswani"},
    "cutoffs": {"cutoffs": (4, 7), "div_val": 2},
}
LANES = (0, 64)
TOGETHER = "cutoffs"  # has two lanes, each a group of its own, so that all clusters are met; other models read one

pytestmark = pytest.mark.usefixtures("double_precision")


def trainer_of(n_segment: int, model: dict[str, Any], **train: Any) -> Trainer:
    """4 lanes, 5 tokens a segment, 6 segments an epoch."""
    return tiny_trainer(model=model, optim={"clip": None}, train={"tbptt_segments": n_segment, **train})


def remembered(trainer: Trainer) -> list[list[list[Tensor]]]:
    """Per lane and layer, the states that are remembered."""
    rows = []
    for mems in memories(trainer):
        for row, n_valid in enumerate(mems.n_valid.tolist()):
            rows.append([list(h[row, h.shape[1] - n_valid :].detach()) for h in mems.hidden])
    return rows


def unrolled_loss(trainer: Trainer, memory: list[list[list[Tensor]]], weights: dict[str, Tensor], at: int, n: int) -> Tensor:
    """The mean loss of `n` segments from token `at` of each lane on, by the loops; nothing is detached between them."""
    ids = random_ids().tolist()
    nats = []
    for lane, row_memory in zip(LANES, memory, strict=False):
        for begin in range(lane + at, lane + at + n * 5, 5):
            log_probabilities, row_memory = read_row(ids[begin : begin + 5], row_memory, weights, trainer.model.config)
            nats += [-log_probabilities[i, ids[begin + i + 1]] for i in range(5)]
    return torch.stack(nats).mean()


@pytest.mark.parametrize(("model", "n_segment"), [(model, 3 if model == "paper" else 2) for model in MODELS])
def test_gradients_equal_the_unrolled_loops(model: str, n_segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n_lane = 2 if model == TOGETHER else 1
    trainer = trainer_of(n_segment, MODELS[model], batch_size=n_lane, accumulate=n_lane)
    trainer.train_step()  # so that the window measured begins with a memory, which is detached
    memory = remembered(trainer)
    weights = {name: tensor.clone().requires_grad_() for name, tensor in trainer.model.state_dict().items()}
    result = trainer.train_step()
    monkeypatch.setattr(Tensor, "detach", lambda self: self)  # the loops, too, stop gradients at every segment
    loss = unrolled_loss(trainer, memory, weights, 5 * n_segment, n_segment)
    monkeypatch.undo()
    loss.backward()
    assert result.tokens == n_lane * 5 * n_segment
    assert result.nats / result.tokens == pytest.approx(loss.item(), abs=1e-12)
    for name, parameter in trainer.model.named_parameters():
        expected = weights[name].grad
        assert parameter.grad is not None and expected is not None, name
        assert_close(name, parameter.grad, expected, 1e-10)


@pytest.mark.parametrize("keep_graph", [False, True])
def test_the_memory_of_a_call_has_gradients_only_if_they_are_kept(keep_graph: bool) -> None:
    """In this kind, the memory that enters a layer has gradients, too: those of the table of positions."""
    model = trainer_of(1, {"attention": "al_rfou", "max_klen": 12}).model
    out = model(torch.zeros(4, 2, dtype=torch.int64), mems=model.init_mems(4), keep_graph=keep_graph)
    assert [h.requires_grad for h in out.mems.hidden] == [keep_graph] * 2
