"""Tiny trainers and runs, and what of their state must be equal, bit by bit, when one of them was interrupted."""

import copy
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.checkpoint.helpers import as_bytes, spelled
from transformer_xl.batch import Batch, Rows, TaskRows
from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore
from transformer_xl.config.model import KINDS, HeadConfig, ModelConfig, model_config
from transformer_xl.config.run import OptimConfig, TrainConfig
from transformer_xl.data.labelled import DocumentStream, LabelledStream
from transformer_xl.data.pairs import PairStream
from transformer_xl.data.streams import EndlessStream, SegmentStream
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.build import make_model
from transformer_xl.model.memory import Mems
from transformer_xl.tokenizers.kinds import ByteTokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.trainer import StepResult, Trainer
from transformer_xl.world import World

MODEL: dict[str, Any] = {
    "vocab_size": 11,
    "n_layer": 2,
    "d_model": 6,
    "n_head": 2,
    "d_head": 3,
    "d_inner": 9,
    "dropout": 0.0,
    "mem_len": 7,
}
OPTIM: dict[str, Any] = {"lr": 0.01, "warmup_steps": 3}
TRAIN: dict[str, Any] = {"batch_size": 4, "tgt_len": 5, "max_steps": 40}
TIMES = ("seconds", "tokens_per_second")  # of a log entry: no two runs take equally long

RECIPE = """
[model]
n_layer = 2
d_model = 8
n_head = 2
d_head = 4
d_inner = 12
dropout = 0.1
mem_len = 6

[optim]
optimizer = "muon"
lr = 0.01
warmup_steps = 5

[train]
batch_size = 4
tgt_len = 5
max_steps = 40
precision = "fp32"
log_interval = 4
eval_interval = 16
checkpoint_interval = 8
sample_tokens = 2

[eval]
batch_size = 2
max_tokens = 150
"""

TASK = """
[task]
kind = "classification"

[optim]
lr = 1e-2
clip = 1.0
schedule = "linear"
warmup_share = 0.1

[train]
batch_size = 16
tgt_len = 32
max_epochs = 8
precision = "fp32"
checkpoint_interval = 5
"""
TUNED_SIZES: dict[str, Any] = {"vocab_size": 256, "n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 32}


def random_ids() -> np.ndarray:
    """The text of `tiny_trainer`."""
    return np.random.default_rng(0).integers(0, 11, 130).astype(np.uint16)


def tiny_model(*, kind: str = "transformer_xl", **changes: Any) -> SequenceModel:
    """A model of any kind; of the common sizes it takes those that it has."""
    common = {name: value for name, value in MODEL.items() if name in KINDS[kind].model_fields}
    if kind in ("vanilla", "lstm"):
        del common["mem_len"]
    return make_model(
        model_config({"kind": kind, **common, **changes}).completed(vocab_size=11, tgt_len=12 if kind == "xlnet" else 5)
    )


def tiny_stream(
    ids: np.ndarray, train: TrainConfig, documents: list[int], model: ModelConfig, world: World | None = None
) -> EndlessStream:
    """The segments of a text, or the rows that an XLNet is trained on, in which 9 stands for <sep> and 10 for <cls>.

    With a head, labelled texts.
    """
    world, kind, head = world or World(), model.kind, model.head
    process = {"rank": world.rank, "world_size": world.size}
    lanes: dict[str, Any] = {"document_starts": np.array(documents), **process}
    sizes = {"batch_size": train.batch_size, "tgt_len": train.tgt_len}
    if head is not None and head.in_documents:
        return DocumentStream(RandomTexts(head), DOCUMENTS, batch_size=train.batch_size, seed=0, **process)
    if head is not None:
        return LabelledStream(RandomTexts(head), batch_size=train.batch_size, seed=0, **process)
    if kind != "xlnet":
        half, separator = train.loss == "half", 7 if train.loss == "answer" else None
        return SegmentStream(ids, **sizes, **lanes, later_half=half, separator=separator, resets=train.reset_at_documents)
    targets = {"reuse_len": 6, "num_predict": 3, "word_starts": np.ones(11, bool), "sep": 9, "cls": 10}
    return PairStream(ids, **sizes, **lanes, **targets, seed=train.seed)


DOCUMENTS = np.array([0, 3, 4, 9, 10, 14, 16, 22, 23, 26, 29, 30])
"""Where documents begin among the texts of `RandomTexts`."""


class RandomTexts:
    """30 texts of 1 to 14 random tokens, with labels for a head; of a span, the first half may answer, or there is none."""

    checksum = 0

    def __init__(self, head: HeadConfig) -> None:
        draws = np.random.default_rng(0)
        self.lengths = draws.integers(1, 15, 30)
        self._ids = [torch.from_numpy(draws.integers(0, 11, n)) for n in self.lengths]
        self._is_span = head.kind == "span"
        self._labels = torch.from_numpy(draws.integers(0, max(len(head.labels), 2), 30))

    def batch(self, chosen: np.ndarray, is_scored: np.ndarray, length: int) -> Batch:
        ids = torch.stack([F.pad(self._ids[i], (length - len(self._ids[i]), 0)) for i in chosen])
        n_pad = torch.from_numpy(length - self.lengths[chosen])
        labels = self._labels[chosen]
        may_answer = torch.arange(length) < (n_pad + length)[:, None] // 2
        if self._is_span:
            place = torch.where(labels == 1, length - 1, n_pad)
            labels = torch.stack([place, place, labels], dim=1)
        labels = labels.clone()
        labels[~torch.from_numpy(is_scored)] = -100
        return Batch(ids, labels, Rows(n_pad=n_pad), TaskRows(ids % 3, may_answer), per_row=True)


def tiny_trainer(*, seed: int = 0, precision: str = "fp32", device: str = "cpu", **changes: dict[str, Any]) -> Trainer:
    """A trainer on 130 random tokens: 6 segments an epoch; `model`, `optim` and `train` change its settings."""
    torch.manual_seed(seed)
    model = tiny_model(**changes.get("model", {}))
    train = TrainConfig(**(TRAIN | changes.get("train", {})))
    stream = tiny_stream(random_ids(), train, [0, 13, 50, 97], model.config)
    optim = OptimConfig(**(OPTIM | changes.get("optim", {})))
    facts: dict[str, Any] = {"precision": precision, "device": torch.device(device)}
    return Trainer(model, stream, train=train, optim=optim, **facts)


def settled(trainer: Trainer) -> StepResult:
    """Take a step, and count how it ended."""
    result = trainer.train_step()
    trainer.settle(result)
    return result


def memories(trainer: Trainer) -> list[Mems]:
    """The memory of each group of lanes of a trainer of a Transformer-XL."""
    found = [mems for mems in trainer.mems if isinstance(mems, Mems)]
    assert len(found) == len(trainer.mems)
    return found


def saved(trainer: Trainer) -> Checkpoint:
    """The whole state of a trainer, which is alone."""
    checkpoint = trainer.checkpoint({})
    assert checkpoint is not None
    return checkpoint


def bits(trainer: Trainer) -> dict[str, Any]:
    """Everything of the state that does not depend on the clock."""
    checkpoint = saved(trainer)
    tensors = {f"model.{name}": as_bytes(tensor) for name, tensor in checkpoint.model.items()}
    tensors |= {name: as_bytes(tensor) for name, tensor in checkpoint.training.items()}
    state = {name: value for name, value in checkpoint.state.items() if name != "seconds"}
    return {"step": checkpoint.step, **tensors, **{f"state.{name}": spelled(value) for name, value in state.items()}}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not equal."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def resumed_losses(n_before: int, n_after: int, **changes: Any) -> list[float]:
    """Return the losses of a training that is the same to the last bit if it stops on the way.

    A trainer of other weights and random numbers takes over.
    """
    whole = tiny_trainer(**changes)
    losses = [whole.train_step().nats for _ in range(n_before + n_after)]
    stopped = tiny_trainer(**changes)
    again = [stopped.train_step().nats for _ in range(n_before)]
    checkpoint = copy.deepcopy(saved(stopped))
    resumed = tiny_trainer(seed=7, **changes)
    resumed.restore(checkpoint)
    again += [resumed.train_step().nats for _ in range(n_after)]
    assert again == losses
    assert differing(bits(resumed), bits(whole)) == []
    return losses


def write_text(path: Path, n_words: int = 500) -> Path:
    """A text of a few words, some of them not ASCII."""
    words = random.Random(0).choices(["the", "cat", "sat", "on", "naïve", "mats", "—", "ж\n"], k=n_words)
    path.write_text(" ".join(words), encoding="utf-8")
    return path


def write_recipe(path: Path) -> Path:
    path.write_text(RECIPE, encoding="utf-8")
    return path


def write_bench(home: Path, **model: Any) -> Path:
    """A model of bytes with random weights as `base`, a task as `quick.toml`, and an empty directory `data`."""
    torch.manual_seed(0)
    make_model(model_config({**TUNED_SIZES, **model})).save_pretrained(home / "base", tokenizer=ByteTokenizer())
    (home / "quick.toml").write_text(TASK)
    (home / "data").mkdir()
    return home


def fail(why: str) -> Callable[..., Any]:
    """What fails instead of doing anything, as a power cut."""

    def act(*_: object, **__: object) -> None:
        raise RuntimeError(why)

    return act


def entries(directory: Path) -> list[dict[str, Any]]:
    """The log of a run, without times."""
    lines = (directory / "metrics.jsonl").read_text(encoding="ascii").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]


def run_bits(directory: Path) -> dict[str, Any]:
    """Everything that a finished run left on the disk, without times and the picture."""
    store = CheckpointStore(directory / "checkpoints")
    checkpoint = store.load_newest(on_damaged=print)
    state = json.loads(json.dumps(checkpoint.state))
    del state["seconds"], state["record"]["interval"]["seconds"]
    return {
        "config": (directory / "config.json").read_text(),
        "tokenizer": (directory / "tokenizer.json").read_text(),
        "copies": {name: data.decode() for name, data in checkpoint.copies.items()}
        == {name: (directory / name).read_text() for name in ("config.json", "tokenizer.json")},
        "steps": store.steps(),
        "best": store.best_step,
        "log": entries(directory),
        "state": spelled(state),
        **{f"model.{name}": as_bytes(tensor) for name, tensor in checkpoint.model.items()},
        **{f"training.{name}": as_bytes(tensor) for name, tensor in checkpoint.training.items()},
    }


class Lines(Display):
    """Remembers what was said, and calls `at[step]` when a step is shown, as a signal may arrive then; each must be shown."""

    def __init__(self, at: dict[int, Callable[[], object]] | None = None) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []
        self.warned: list[str] = []
        self.at = at or {}

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def advance(self, *, step: int, **_: Any) -> None:
        self.at.pop(step, lambda: None)()

    def __exit__(self, error: object = None, *_: object) -> None:
        assert error or not self.at, f"{list(self.at)} were never shown"


def stop_at(step: int, number: signal.Signals = signal.SIGINT) -> Lines:
    return Lines({step: lambda: signal.raise_signal(number)})
