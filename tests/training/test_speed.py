"""Busy cores are named and fewer threads tried, at no other cost than theirs; steps that have become slow are named."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers import Lines, bits, differing, run_bits, stop_at, tiny_trainer
from transformer_xl import process
from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.training import loop, speed, starting
from transformer_xl.training.environment import last_threads
from transformer_xl.training.run import train
from transformer_xl.training.speed import Pace, choose_threads
from transformer_xl.training.trainer import StepResult, Trainer
from transformer_xl.world import World


def others(monkeypatch: pytest.MonkeyPatch, n: int, *, n_core: int = 4) -> None:
    monkeypatch.setattr(process, "running_beside", lambda own=0: n)
    monkeypatch.setattr(os, "cpu_count", lambda: n_core)


@pytest.fixture(autouse=True)
def nothing_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads on four cores, five others beside them, and nobody has said how many threads there should be.

    All of them are only counted: real ones wait for each other where the machine that tests has fewer cores.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    others(monkeypatch, 5)
    monkeypatch.setattr(starting, "cores", lambda: 4)
    asked = [4]
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked[-1])


class Machine:
    """A clock on which a step takes a given time for each number of threads; remembers what was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.now, self.tried, self._seconds = 0.0, [], seconds
        monkeypatch.setattr(Trainer, "rehearse", lambda _: self.step())

    def step(self) -> None:
        self.tried.append(torch.get_num_threads())
        self.now += self._seconds[self.tried[-1]]

    def __call__(self) -> float:
        return self.now


pytestmark = pytest.mark.usefixtures("no_picture")


# Choosing


def test_the_fastest_number_of_threads_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Machine(monkeypatch, {4: 2.0, 2: 0.75, 1: 0.4}), []
    assert choose_threads(tiny_trainer(), warn=said.append, clock=clock) == 1
    assert torch.get_num_threads() == 1
    assert clock.tried == [4, 4, 2, 2, 1, 1, 1]  # the first is not timed; a second each, and at least a step
    assert said == [
        "other programs keep all 4 cores of this machine busy, so this run computes with train.threads=1: a step takes 0.40 s "
        "instead of 2.00 s with 4; when the other programs have ended, resume it with --set train.threads=4"
    ]


def test_the_cores_that_are_left_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, 1)
    clock = Machine(monkeypatch, {4: 2.0, 3: 1.0, 2: 1.2, 1: 2.4})
    assert choose_threads(tiny_trainer(), warn=print, clock=clock) == 3


def test_what_takes_much_longer_is_the_last_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Machine(monkeypatch, {4: 2.0, 2: 3.1}), []
    assert choose_threads(tiny_trainer(), warn=said.append, clock=clock) is None
    assert clock.tried == [4, 4, 2]
    assert torch.get_num_threads() == 4
    assert said[0].endswith("so this run will be slow, and fewer threads are not faster; wait until they have ended")


def test_a_small_gain_is_no_reason_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_threads(tiny_trainer(), warn=print, clock=Machine(monkeypatch, {4: 2.0, 2: 1.9, 1: 1.81})) is None
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("decided", ["free", "one", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "threads", "deterministic", "two"])
def test_nothing_is_tried_where_cores_are_free_or_somebody_has_decided(decided: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"threads": {"threads": 4}, "deterministic": {"deterministic": True}}.get(decided, {})
    trainer, said = tiny_trainer(train=changes), []
    if decided == "free":
        others(monkeypatch, 0)
    elif decided == "one":
        torch.set_num_threads(1)
    elif decided == "two":
        trainer.world = World(size=2)
    elif decided.isupper():
        monkeypatch.setenv(decided, "4")
    monkeypatch.setattr(Trainer, "rehearse", lambda _: pytest.fail("tried"))
    before = torch.get_num_threads()
    assert choose_threads(trainer, warn=said.append) is None
    assert torch.get_num_threads() == before
    problem = "other programs keep all 4 cores of this machine busy, so this run will be slow; wait until they have "
    remedy = "ended" if decided == "one" else "ended, or compute with --set train.threads=1"
    assert said == ([] if decided == "free" else [problem + remedy])


def test_compiled_layers_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer()
    trainer.config = trainer.config.model_copy(update={"compile": True})  # a compiler is not needed
    monkeypatch.setattr(Trainer, "rehearse", lambda _: pytest.fail("tried"))
    assert choose_threads(trainer, warn=print) is None


def test_a_gpu_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "running_beside", lambda own=0: pytest.fail("asked"))
    trainer = tiny_trainer()
    trainer.device = torch.device("cuda")
    assert choose_threads(trainer, warn=lambda _: pytest.fail("said")) is None
    speed.check_threads(trainer, 1, say=lambda _: pytest.fail("said"), warn=lambda _: pytest.fail("said"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dropout": 0.3}, "train": {"accumulate": 2, "tbptt_segments": 2}},
        {"precision": "fp16", "train": {"varlen": True, "loss": "half"}},
        {"model": {"kind": "lstm"}, "train": {"reset_at_documents": True}},
        {"model": {"kind": "vanilla", "intermediate_losses": True}, "train": {"average": "ema"}},
    ],
)
def test_a_rehearsal_leaves_everything_as_it_was(changes: dict[str, Any]) -> None:
    trainer, other = tiny_trainer(**changes), tiny_trainer(**changes)
    for step in range(4):
        before = bits(trainer)
        trainer.rehearse()
        assert differing(bits(trainer), before) == []
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        torch.manual_seed(step)  # the two share a generator
        one = trainer.train_step()
        torch.manual_seed(step)
        assert one.told.numbers == other.train_step().told.numbers
    assert differing(bits(trainer), bits(other)) == []


# In a run

SHORT = ("train.max_steps=8", "train.checkpoint_interval=2", "train.sample_tokens=0", "eval.max_tokens=20")


@pytest.fixture
def start(recipe: str, text: Path, tmp_path: Path) -> Callable[..., Lines]:
    def start(name: str, *overrides: str, resume: bool = False, display: Lines | None = None) -> Lines:
        display = display or Lines()
        before = torch.get_num_threads()
        train(recipe, out=tmp_path / name, corpus=str(text), overrides=overrides, display=display, resume=resume)
        assert torch.get_num_threads() == before
        return display

    return start


def test_a_chosen_number_is_kept_for_good(start: Callable[..., Lines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that chose it, was stopped and resumed computes as one that was told the number."""
    used: list[int] = []
    train_step = Trainer.train_step

    def watched(self: Trainer) -> StepResult:
        used.append(torch.get_num_threads())
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", watched)
    with monkeypatch.context() as patch:
        others(patch, 0)
        start("told", "train.threads=2", *SHORT)
    with monkeypatch.context() as patch:
        rehearse = Trainer.rehearse
        clock = Machine(patch, {4: 2.0, 2: 0.5, 1: 0.6})
        patch.setattr(Trainer, "rehearse", lambda self: (clock.step(), rehearse(self)))
        choose = speed.choose_threads
        patch.setattr(loop, "choose_threads", lambda trainer, warn: choose(trainer, warn=warn, clock=clock))
        shown = start("run", *SHORT, display=stop_at(4))
        (line,) = shown.warned
        assert "train.threads=2: a step takes 0.50 s instead of 2.00 s with 4;" in line
        assert shown.said[-1].startswith("SIGINT: saved step 4;")
    others(monkeypatch, 0)
    start("run", resume=True)
    assert set(used) == {2}
    assert RunDirectory(tmp_path / "run").config().train.threads == last_threads(tmp_path / "run") == 2
    assert differing(run_bits(tmp_path / "run"), run_bits(tmp_path / "told")) == []


def resumed_with(threads: int | None, *, before: int | None, step: int = 1) -> tuple[list[str], list[str]]:
    """What is said and warned of where a run goes on; `before`: threads of its last start."""
    trainer, shown = tiny_trainer(train={"threads": threads}), Lines()
    trainer.step = step
    torch.set_num_threads(threads or 4)
    speed.check_threads(trainer, before, say=shown.say, warn=shown.warn)
    return shown.said, shown.warned


def test_where_a_run_goes_on_it_is_said_whose_threads_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, 0)
    monkeypatch.setattr(speed, "cores", lambda: 4)
    fewer = (
        "this run computes with train.threads=2, and 4 cores are free; --set train.threads=none uses what PyTorch finds best, "
        "and rounds differently"
    )
    assert resumed_with(2, before=2) == ([fewer], [])
    assert resumed_with(None, before=4) == resumed_with(None, before=None) == ([], [])
    others(monkeypatch, 3)
    assert resumed_with(2, before=2)[0] == []
    others(monkeypatch, 5)
    assert resumed_with(2, before=4, step=40) == ([], [])  # there is nothing left to do


def test_a_resumed_run_tries_nothing(start: Callable[..., Lines], monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, 0)
    start("run", "train.threads=2", "train.max_steps=1")
    others(monkeypatch, 5)
    monkeypatch.setattr(Trainer, "rehearse", lambda _: pytest.fail("tried"))
    shown = start("run", "train.threads=none", "train.max_steps=2", resume=True)
    assert "threads: 2 until here, 4 from now on; --set train.threads=2 rounds as before" in shown.said
    (line,) = shown.warned
    assert line.endswith("so this run will be slow; wait until they have ended, or compute with --set train.threads=1")


@pytest.mark.parametrize("content", ["[]", "[{}]", '[{"machine": 3}]', '[{"machine": {"threads": "2"}}]', "{"])
def test_unknown_threads_of_the_last_start(content: str, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(content)
    assert last_threads(tmp_path) is None


# While it trains


def said(pace: Pace, *steps: tuple[int, float], tokens: int = 100, length: int = 5) -> list[str]:
    """What is said in so many steps of so many seconds each."""
    return [line for n, seconds in steps for line in [pace.add(tokens, seconds, length=length) for _ in range(n)] if line]


def test_a_speed_of_less_than_a_third_is_named_again_and_its_end() -> None:
    others_gone = "training has recovered: 80 tokens/s"
    slow = (
        "training is 5.0 times slower than before: 20 tokens/s instead of 100; other programs keep all 4 cores of "
        "this machine busy; wait until they have ended, or compute with --resume --set train.threads=1"
    )
    pace = Pace()
    assert said(pace, (1, 500.0), (40, 1.0), (7, 2.9)) == []  # nothing was slow before the first, which compiles
    assert said(pace, (4, 5.0)) == [slow]
    assert said(pace, (4 * 14, 5.0)) == []
    assert said(pace, (4, 5.0)) == [slow]  # after five more minutes
    assert said(pace, (8, 2.5)) == []  # 40 tokens/s: neither slow nor recovered
    assert said(pace, (16, 1.25)) == [others_gone]
    assert said(pace, (40, 1.0)) == []
    assert said(pace, (4, 5.0)) == [slow]


def test_without_busy_cores_another_reason_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    others(monkeypatch, 0)
    (line,) = said(Pace(), (20, 1.0), (4, 5.0))
    assert line.endswith(
        "no other program seems to be the reason, so see whether the machine is hot, saves power or lacks memory (swapping)"
    )


def test_segments_of_other_lengths_and_more_lanes_are_no_reason() -> None:
    pace = Pace()
    assert said(pace, (20, 1.0), length=5) == []
    assert said(pace, (20, 5.0), length=6) == []
    assert len(said(pace, (1, 25.0), length=6)) == 1  # and slower than that
    pace = Pace()
    assert said(pace, (20, 1.0)) == said(pace, (20, 5.0), tokens=500) == []


def test_training_counts_its_steps_and_warns(start: Callable[..., Lines], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def add(self: Pace, tokens: int, seconds: float, *, length: int) -> str | None:
        assert seconds > 0
        seen.append((tokens, length))
        return "slow" if len(seen) == 3 else None

    others(monkeypatch, 0)
    monkeypatch.setattr(Pace, "add", add)
    growing = ("train.tgt_len_start=3", "train.tgt_len_increment=2", "train.tgt_len_warmup=0.5")
    display = start("run", "train.max_steps=4", *growing)
    assert display.warned == ["slow"]
    assert seen == [(12, 3), (12, 3), (20, 5), (20, 5)]
