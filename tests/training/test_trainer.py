"""A run that was stopped and resumed is the uninterrupted run, bit by bit."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.helpers import never
from tests.training.helpers import MODEL, OPTIM, bits, differing, memories, saved, tiny_trainer
from transformer_xl.checkpoint.store import CheckpointStore
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import OptimConfig
from transformer_xl.training.trainer import Trainer, checkpoint_bytes

N_STEPS = 7  # an epoch has six
ROWS = {"kind": "classification", "labels": ["a", "b"], "tgt_len": 5, "in_documents": True}


def of_recipe(name: str, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    """The regularization and the optimizer of a recipe, at reduced size."""
    recipe = load_recipe(name)
    sizes = {key: MODEL[key] for key in MODEL if key != "dropout"}
    return {"model": recipe.model.model_dump() | sizes | model, "optim": recipe.optim.model_dump() | OPTIM, "train": train}


CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optim": {"optimizer": "adamw", "weight_decay": 0.1}},
    "adam": {"optim": {"optimizer": "adam"}},
    "sgd": {"optim": {"optimizer": "sgd"}},
    "sgd-without-momentum": {"optim": {"optimizer": "sgd", "momentum": 0.0}},
    "muon": {"optim": {"optimizer": "muon", "weight_decay": 0.1}},
    "lamb": {"optim": {"optimizer": "lamb", "weight_decay": 0.1, "warmup_steps": 4, "decay_after_warmup": True}},
    "bf16": {"precision": "bf16"},
    "dropout": {"model": {"dropout": 0.2, "dropatt": 0.2}},
    "plateau": {"optim": {"schedule": "plateau"}},
    "documents": {"train": {"reset_at_documents": True}},
    "tokens-budget": {"train": {"max_steps": None, "max_tokens": 400}, "optim": {"schedule": "linear"}},
    "tbptt": {"train": {"tbptt_segments": 4, "max_steps": 20}, "model": {"dropout": 0.2}},
    "varlen-rates": {
        "train": {"varlen": True, "activation_penalty": 0.2, "temporal_penalty": 0.1},
        "optim": {"lr_by_length": True},
    },
    "varlen-epochs-budget": {"train": {"varlen": True, "max_steps": None, "max_epochs": 9.0}},
    "ema": {"train": {"average": "ema", "average_decay": 0.8}},
    "swa": {"train": {"average": "swa", "average_start": 0.3, "max_steps": 15}},
    "answers": {
        "train": {"loss": "answer", "label_smoothing": 0.1, "reset_at_documents": True, "varlen": True, "average": "swa"}
        | {"average_start": 0.1}
    },
    "half-losses": {"train": {"loss": "half", "accumulate": 2}},
    "vanilla": {"model": {"kind": "vanilla", "dropout": 0.2}, "train": {"reset_at_documents": True}},
    "vanilla-auxiliary": {"model": {"kind": "vanilla", "dropout": 0.2, "intermediate_losses": True, "n_target": 2}},
    "lstm": {"model": {"kind": "lstm", "dropout": 0.2, "dropweight": 0.3, "dropemb": 0.1}},
    "lstm-documents": {"model": {"kind": "lstm", "d_hidden": 9}, "train": {"reset_at_documents": True, "accumulate": 2}},
    "lstm-unrolled": {"model": {"kind": "lstm"}, "train": {"tbptt_segments": 3, "checkpoint_layers": True}},
    "xlnet": {
        "model": {"kind": "xlnet", "dropout": 0.2, "dropatt": 0.1, "reuse_len": 6},
        "train": {"tgt_len": 12, "accumulate": 2},
    },
    "rows-of-documents": {
        "model": {"dropout": 0.2, "head": ROWS},
        "train": {"accumulate": 2, "average": "ema", "max_steps": None, "max_epochs": 3.0},
    },
    "rows-of-documents-xlnet": {"model": {"kind": "xlnet", "dropatt": 0.1, "head": {**ROWS, "summary": "mean"}}},
    "all-at-once": {
        "model": {"dropout": 0.2, "dropatt": 0.1},
        "train": {
            "accumulate": 2,
            "tbptt_segments": 2,
            "varlen": True,
            "max_steps": 15,
            "average": "ema",
            "checkpoint_layers": True,
            "reset_at_documents": True,
            "attention": "equation",
        },
    },
    "rates-by-layer": {"model": {"untie_r": True}, "optim": {"layer_lr_decay": 0.7}},
    "gradients-by-layer": {
        "model": {"kind": "xlnet", "untie_r": True},
        "optim": {"layer_lr_decay": 0.7, "layer_lr_decay_on": "gradient"},
        "train": {"tgt_len": 12},
    },
    "recipe-wt2": of_recipe("wt2", {"dropweight": 0.1, "cutoffs": [4]}),
    "recipe-ptb": of_recipe("ptb", {"dropweight": 0.1, "cutoffs": []}, accumulate=2),
    "everything": {
        "precision": "bf16",
        "model": {"dropout": 0.2, "dropatt": 0.1, "d_embed": 4, "untie_r": True, "pre_lnorm": True, "same_length": True},
        "optim": {"optimizer": "muon", "schedule": "inv_sqrt"},
        "train": {"accumulate": 4, "reset_at_documents": True},
    },
}


def read_on(trainer: Trainer, until: int) -> list[float]:
    losses = []
    while trainer.step < until:
        losses.append(trainer.train_step().nats)
        if trainer.step % 2 == 0:
            trainer.schedule.validated(5.0 + trainer.step % 3)
    return losses


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_run(case: str, tmp_path: Path) -> None:
    whole = tiny_trainer(**CASES[case])
    expected = read_on(whole, N_STEPS)

    store = CheckpointStore(tmp_path / "checkpoints")
    stopped = tiny_trainer(**CASES[case])
    losses = read_on(stopped, random.Random(case).randrange(1, N_STEPS))
    store.save(saved(stopped))
    resumed = tiny_trainer(seed=100, **CASES[case])  # as a new process begins: other weights, other random state
    read_on(resumed, 1)
    resumed.restore(store.load_newest(on_damaged=never))
    assert resumed.seconds == stopped.seconds > 0
    losses += read_on(resumed, N_STEPS)

    assert losses == expected
    assert differing(bits(resumed), bits(whole)) == []

    optim = OptimConfig(**(OPTIM | CASES[case].get("optim", {})))
    assert whole.average.count or whole.config.average == "none"
    stored = saved(whole).model | saved(whole).training
    n_byte = sum(tensor.nbytes for name, tensor in stored.items() if not name.startswith("random."))
    assert checkpoint_bytes(whole.model, train=whole.config, optim=optim) == n_byte, "what is known before the first step"


@pytest.mark.parametrize("case", ["everything", "all-at-once", "rows-of-documents"])
def test_every_step_can_be_the_last_before_a_stop(case: str) -> None:
    """Epoch borders among them: the memory is emptied once, not twice or never."""
    whole = tiny_trainer(**CASES[case])
    states, expected = [], []
    for _ in range(8):
        whole.train_step()
        states.append(copy.deepcopy(saved(whole)))
        expected.append(bits(whole))
    for checkpoint, after in zip(states, expected[1:], strict=False):
        resumed = tiny_trainer(seed=9, **CASES[case])
        resumed.restore(checkpoint)
        resumed.train_step()
        assert differing(bits(resumed), after) == [], checkpoint.step


@pytest.mark.parametrize("model", [{}, {"head": {**ROWS, "dropout": 0.0}}])
def test_groups_of_lanes_give_the_loss_of_all_lanes_at_once(model: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"model": model, "train": {"reset_at_documents": True}, "optim": {"clip": 0.1}}
    at_once, *in_groups = (
        tiny_trainer(**{**changes, "train": {**changes["train"], "accumulate": accumulate}}) for accumulate in (1, 2, 4)
    )
    for _ in range(7):  # one of the second epoch
        one = at_once.train_step()
        for trainer in in_groups:
            other = trainer.train_step()
            assert other.nats / other.tokens == pytest.approx(one.nats / one.tokens, abs=1e-6)
            assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
            assert (other.tokens, other.rate) == (one.tokens, one.rate)


def test_a_rate_by_length_is_in_proportion_to_what_a_step_reads() -> None:
    """Of 32 tokens of each lane, a step reads five; the last of an epoch reads what is left."""
    trainer = tiny_trainer(optim={"lr_by_length": True, "warmup_steps": 0, "schedule": "constant"}, train={"tbptt_segments": 2})
    results = [trainer.train_step() for _ in range(4)]
    assert [result.rate for result in results] == [result.tokens / 4 / 10 for result in results]
    assert [result.rate for result in results[:3]] == [1.0, 1.0, 1.0]
    random = tiny_trainer(optim={"lr_by_length": True, "warmup_steps": 0, "schedule": "constant"}, train={"varlen": True})
    rates = [random.train_step().rate for _ in range(8)]
    assert len(set(rates)) > 2 and max(rates) > 1


@pytest.mark.parametrize(
    ("resets", "ages"),
    [
        (False, [[5] * 4, *[[7] * 4] * 5, [5] * 4, [7] * 4]),  # 6 segments an epoch, mem_len 7
        # documents begin at tokens 0, 13, 50 and 97, lanes at 0, 32, 64 and 96; so at lane offsets 0 and 13, 18, none, 1
        (True, [[5, 5, 5, 4], [7, 7, 7, 7], [2, 7, 7, 7], [7, 2, 7, 7]]),
    ],
)
def test_memory_continues_the_lane_and_is_emptied_where_an_epoch_or_a_document_begins(resets: bool, ages: list[Any]) -> None:
    trainer, found = tiny_trainer(train={"reset_at_documents": resets}), []
    for _ in ages:
        trainer.train_step()
        found.append(memories(trainer)[0].n_valid.tolist())
    assert found == ages


def test_memory_goes_on_from_row_to_row_and_is_emptied_where_a_document_begins() -> None:
    """Rows have 1 to 14 tokens, and the last 7 of a document stay."""
    trainer = tiny_trainer(model={"head": ROWS})
    stream, ages, n_old = copy.deepcopy(trainer.stream), torch.zeros(4, dtype=torch.int64), 0
    for _ in range(30):
        starts_epoch, batch = stream.starts_epoch, next(stream)
        assert batch.rows.document_starts is not None and batch.rows.n_pad is not None
        begins = batch.rows.document_starts.any(dim=1) | starts_epoch
        ages = torch.where(begins, 0, ages) + batch.ids.shape[1] - batch.rows.n_pad
        n_old += int((~begins).sum())
        trainer.train_step()
        assert memories(trainer)[0].n_valid.tolist() == ages.clamp(max=7).tolist()
    assert n_old > 40


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_steps": 10}, 0.3),
        ({"max_steps": None, "max_tokens": 120}, 0.5),
        ({"max_steps": None, "max_epochs": 0.75}, 2 / 3),
        ({"max_steps": None, "max_minutes": 2.0}, 0.25),
        ({"max_steps": 10, "max_tokens": 120, "max_epochs": 2.0}, 0.5),
    ],
)
def test_progress_is_that_of_the_nearest_budget(limits: dict[str, Any], expected: float) -> None:
    trainer = tiny_trainer(train=limits)
    for _ in range(3):
        trainer.train_step()
    trainer.seconds = 30.0
    assert trainer.progress == pytest.approx(expected)


def test_the_step_reads_what_the_stream_gives() -> None:
    """The loss of the first step is that of the model on the first segments, from an empty memory."""
    trainer = tiny_trainer()
    stream = tiny_trainer().stream
    segment = next(stream)
    with torch.no_grad():
        expected = trainer.model(segment.ids, labels=segment.labels).nll.double().sum().item()
    result = trainer.train_step()
    assert result.nats == pytest.approx(expected, abs=1e-4)
    assert (result.tokens, result.skipped, trainer.tokens) == (20, False, 20)
