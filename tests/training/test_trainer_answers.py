"""Answers: what is learned from, with smoothed labels too, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import assert_close
from tests.training.helpers import OPTIM, TRAIN, random_ids, tiny_model, tiny_stream
from transformer_xl.config.run import OptimConfig, TrainConfig
from transformer_xl.data.streams import SegmentStream
from transformer_xl.errors import ConfigError
from transformer_xl.model.call import Regularizers
from transformer_xl.training.trainer import Trainer

STARTS = list(range(0, 130, 13))


def answering(accumulate: int = 1, **train: Any) -> Trainer:
    """A trainer that learns what follows the first 7 of each document of 13 tokens; without gradients' clipping."""
    optim = OptimConfig(**{**OPTIM, "clip": None, "lr": 1e-9, "optimizer": "sgd"})
    config = TrainConfig(**{**TRAIN, "loss": "answer", "reset_at_documents": True, "accumulate": accumulate, **train})
    torch.manual_seed(0)
    layout: dict[str, Any] = {"batch_size": config.batch_size, "tgt_len": config.tgt_len}
    stream = SegmentStream(random_ids(), **layout, document_starts=torch.tensor(STARTS).numpy(), separator=7, resets=True)
    return Trainer(tiny_model(), stream, train=config, optim=optim, precision="fp32")


@pytest.mark.parametrize(("accumulate", "smoothing"), [(1, 0.0), (2, 0.0), (1, 0.2), (2, 0.2)])
def test_gradients_are_those_of_the_mean_answer_token(accumulate: int, smoothing: float) -> None:
    """Learned from are the labels that the stream gives; the nats that are reported are not smoothed."""
    trainer, other = answering(), answering(accumulate, label_smoothing=smoothing)
    segment = next(trainer.stream)
    n = int((segment.labels >= 0).sum())
    assert 0 < n < segment.labels.numel()
    trainer.model.train()
    logits = trainer.model(segment.ids, mems=trainer.model.init_mems(4), rows=segment.rows).logits.flatten(0, 1)
    labels = segment.labels.flatten()
    (F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing) / n).backward()
    result = other.train_step()
    assert (result.scored, result.tokens) == (n, segment.labels.numel())
    assert result.nats == pytest.approx(F.cross_entropy(logits, labels, reduction="sum").item(), abs=1e-4)
    theirs = dict(trainer.model.named_parameters())
    for name, parameter in other.model.named_parameters():
        expected = theirs[name].grad
        assert parameter.grad is not None and expected is not None
        assert_close(name, parameter.grad, expected, 1e-5)


def test_a_segment_of_questions_teaches_nothing_and_fails_nowhere() -> None:
    trainer = answering()
    trainer.stream._separator = 99  # pyright: ignore[reportAttributeAccessIssue]
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    result = trainer.train_step()
    assert (result.nats, result.scored, result.skipped) == (0.0, 1, False)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("transformer_xl", {"cutoffs": [4]}), ("vanilla", {"intermediate_losses": True})],
)
def test_what_cannot_be_smoothed_is_refused(kind: str, changes: dict[str, Any]) -> None:
    config = TrainConfig(**{**TRAIN, "label_smoothing": 0.1})
    model = tiny_model(kind=kind, **changes)
    stream = tiny_stream(random_ids(), config, [0], model.config)
    with pytest.raises(
        ConfigError, match=r"train.label_smoothing \(0.1\) needs a model with a plain softmax \(no model.cutoffs\)"
    ):
        Trainer(model, stream, train=config, optim=OptimConfig(**OPTIM), precision="fp32")


@pytest.mark.parametrize("kind", ["lstm", "vanilla"])
def test_other_kinds_smooth_their_labels_too(kind: str) -> None:
    config = TrainConfig(**{**TRAIN, "label_smoothing": 0.1})
    model = tiny_model(kind=kind)
    trainer = Trainer(
        model, tiny_stream(random_ids(), config, [0], model.config), train=config, optim=OptimConfig(**OPTIM), precision="fp32"
    )
    ids = torch.zeros(1, 3, dtype=torch.int64)
    out = trainer.model(ids, labels=ids, regularizers=Regularizers(label_smoothing=0.1))
    assert out.auxiliary is not None and out.auxiliary.item() != 0
