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


def train_through_kills(folder: str, n_steps: int, n_kills: int, seed: int) -> list[int]:
    """Train a run whole and one through kills; return the step each kill found. The folder holds text.txt and tiny.toml."""
    record._tensorboard = lambda *_: None
    home = Path(folder)
    go_on(home, "whole", n_steps)
    generator = random.Random(seed)
    steps = []
    while len(steps) < n_kills:
        child = os.fork()
        if child == 0:
            try:
                go_on(home, "killed", n_steps)
            finally:
                os._exit(0)
        time.sleep(generator.uniform(0.01, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        newest = CheckpointStore(home / "killed" / "checkpoints").steps()[-1:]
        steps.append(newest[0] if newest else 0)
    go_on(home, "killed", n_steps)
    return steps


def go_on(home: Path, out: str, n_steps: int) -> None:
    """Start or resume a run; its warnings go to a file."""
    overrides = [f"train.max_steps={n_steps}", "train.checkpoint_interval=2", "train.eval_interval=12"]
    with (home / WARNINGS).open("a") as warnings:
        train(
            str(home / "tiny.toml"),
            corpus=str(home / "text.txt"),
            out=home / out,
            overrides=overrides,
            resume=True,
            display=Display(quiet=True, console=Console(file=warnings)),
        )
