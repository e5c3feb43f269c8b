"""What a step learns from: the mean of scored tokens, smoothed or not, with penalties, in any number of groups of lanes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import assert_close
from tests.training.helpers import tiny_trainer
from transformer_xl.errors import ConfigError
from transformer_xl.model.call import Regularizers
from transformer_xl.training.trainer import Trainer


def trainer_of(loss: str, **train: Any) -> Trainer:
    """A trainer without clipping, which hardly moves; of `answer`, it learns what follows a 7 in a document."""
    optim = {"clip": None, "lr": 1e-9, "optimizer": "sgd"}
    return tiny_trainer(train={"loss": loss, "reset_at_documents": loss == "answer", **train}, optim=optim)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("loss", "more"),
    [
        ("full", {}),
        ("half", {}),
        ("half", {"activation_penalty": 0.2, "temporal_penalty": 0.1}),
        ("answer", {}),
        ("answer", {"label_smoothing": 0.2}),
    ],
)
def test_gradients_are_those_of_the_mean_scored_token(loss: str, more: dict[str, float], accumulate: int) -> None:
    """Of the second step, whose memory is warm; the nats that are reported are neither smoothed nor of penalties."""
    reference, other = trainer_of(loss), trainer_of(loss, accumulate=accumulate, **more)
    for trainer in (reference, other):
        trainer.train_step()
    model, (mems,), segment = reference.model, reference.mems, next(reference.stream)
    assert segment.ids.shape == (4, 5)
    if loss == "half":
        assert ((segment.labels >= 0) == (torch.arange(5) >= 2)).all()
    n = int((segment.labels >= 0).sum())
    assert (n == 20) == (loss == "full") and n > 0
    model.zero_grad()
    logits = model(segment.ids, mems=mems, rows=segment.rows).logits.flatten(0, 1)
    labels = segment.labels.flatten()
    nats = F.cross_entropy(logits, labels, reduction="sum")
    expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=more.get("label_smoothing", 0.0)) / n
    if "temporal_penalty" in more:
        (*_, states), _ = model.hidden_states(segment.ids, mems=mems)  # pyright: ignore[reportCallIssue]
        expected = expected + 0.2 * states.square().mean() + 0.1 * states.diff(dim=1).square().mean()
    expected.backward()
    result = other.train_step()
    assert (result.scored, result.tokens) == (n, 20)  # all are read, whatever they teach
    assert result.nats == pytest.approx(nats.item(), abs=1e-4)
    theirs = dict(model.named_parameters())
    for name, parameter in other.model.named_parameters():
        gradient = theirs[name].grad
        assert parameter.grad is not None and gradient is not None
        assert_close(name, parameter.grad, gradient, 1e-5 if more or loss == "answer" else 1e-6)


def test_a_segment_of_questions_teaches_nothing_and_fails_nowhere() -> None:
    trainer = trainer_of("answer")
    trainer.stream._separator = 99  # pyright: ignore[reportAttributeAccessIssue]
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    result = trainer.train_step()
    assert (result.nats, result.scored, result.skipped) == (0.0, 1, False)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])


AUXILIARY = "needs a model without losses besides that of the next token"
SMOOTHED = r"train.label_smoothing \(0.1\) needs a model with a plain softmax \(no model.cutoffs\)"


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ({"cutoffs": [4]}, "label_smoothing", SMOOTHED),
        ({"kind": "vanilla", "intermediate_losses": True}, "label_smoothing", SMOOTHED),
        ({"kind": "vanilla", "intermediate_losses": True}, "activation_penalty", AUXILIARY),
        ({"kind": "xlnet"}, "temporal_penalty", AUXILIARY),
    ],
)
def test_a_model_that_learns_from_other_losses_is_refused_more(model: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        tiny_trainer(model=model, train={name: 0.1, "tgt_len": 12})
    assert f"train.{name} (0.1)" in str(caught.value)


@pytest.mark.parametrize("kind", ["lstm", "vanilla"])
def test_other_kinds_smooth_their_labels_too(kind: str) -> None:
    ids = torch.zeros(1, 3, dtype=torch.int64)
    trainer = tiny_trainer(model={"kind": kind}, train={"label_smoothing": 0.1})
    out = trainer.model(ids, labels=ids, regularizers=Regularizers(label_smoothing=0.1))
    assert out.auxiliary is not None and out.auxiliary.item() != 0


def test_a_kind_that_adds_losses_hears_how_far_the_training_is() -> None:
    """So its first layers stop predicting."""
    trainer = tiny_trainer(model={"kind": "vanilla", "intermediate_losses": True}, train={"max_steps": 4})
    seen: list[float] = []
    hook = lambda _, args, named: seen.append(named["regularizers"].progress)  # noqa: E731
    trainer.model.register_forward_pre_hook(hook, with_kwargs=True)
    for _ in range(2):
        trainer.train_step()
    assert sorted(set(seen)) == [0.0, 0.25]
