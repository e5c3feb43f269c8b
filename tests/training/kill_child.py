"""Trains a tiny run to its end through many SIGKILLs, for `tests.forked`.

Each victim is a fork of a process that has imported torch already and has a single thread. The last one is left to finish, and
trains on as long as it takes.
"""

import os
import random
import signal
import time
from pathlib import Path

from rich.console import Console

from transformer_xl.checkpoint.store import CheckpointStore
from transformer_xl.training import record
from transformer_xl.training.display import Display
from transformer_xl.training.run import train

WARNINGS = "warnings.txt"


def train_through_kills(folder: str, n_steps: int, n_kills: int, seed: int, overrides: list[str]) -> list[int]:
    """Train a run whole and one through kills; return the step each kill found. The folder holds text.txt and tiny.toml."""
    record._tensorboard = lambda *_: None
    home = Path(folder)
    go_on(home, "whole", n_steps, overrides)
    generator = random.Random(seed)
    steps = []
    while len(steps) < n_kills:
        child = os.fork()
        if child == 0:
            try:
                go_on(home, "killed", n_steps, overrides)
            finally:
                os._exit(0)
        if len(steps) % 2:  # every other kill waits for a save, so that the run gets on even on a busy machine
            wait_for_another_step(home, steps[-1])
        time.sleep(generator.uniform(0.01, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps.append(newest_step(home))
        found = CheckpointStore(home / "killed" / "checkpoints")
        most = 4  # the two newest, the best, and one that could not be deleted any more
        assert len(found.steps()) <= most, f"steps {found.steps()} are kept"
    go_on(home, "killed", n_steps, overrides)
    return steps


def wait_for_another_step(home: Path, step: int) -> None:
    deadline = time.monotonic() + 20
    while newest_step(home) == step and time.monotonic() < deadline:
        time.sleep(0.002)


def newest_step(home: Path) -> int:
    return max(CheckpointStore(home / "killed" / "checkpoints").steps(), default=0)


def go_on(home: Path, out: str, n_steps: int, overrides: list[str]) -> None:
    """Start or resume a run; its warnings go to a file."""
    overrides = [f"train.max_steps={n_steps}", "train.checkpoint_interval=2", "train.eval_interval=12", *overrides]
    with (home / WARNINGS).open("a") as warnings:
        train(
            str(home / "tiny.toml"),
            corpus=str(home / "text.txt"),
            out=home / out,
            overrides=overrides,
            resume=True,
            display=Display(quiet=True, console=Console(file=warnings)),
        )
