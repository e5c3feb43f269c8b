"""Trains a tiny run to its end through many SIGKILLs; prints the number of kills and the step each found.

Usage: python -m tests.training.kill_child HOME N_STEPS N_KILLS SEED

HOME holds text.txt and tiny.toml. Each victim is a fork of this process, which has imported torch already and has a single
thread. The last one is left to finish, and trains on as long as it takes.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from transformer_xl.checkpoint.store import CheckpointStore
from transformer_xl.training import record
from transformer_xl.training.display import Display
from transformer_xl.training.loop import train


def main(home: Path, n_steps: int, n_kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    record._tensorboard = lambda *_: None
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
    print(json.dumps(steps))


def go_on(home: Path, out: str, n_steps: int) -> None:
    overrides = [f"train.max_steps={n_steps}", "train.checkpoint_interval=2", "train.eval_interval=12"]
    train(
        str(home / "tiny.toml"),
        corpus=str(home / "text.txt"),
        out=home / out,
        overrides=overrides,
        resume=True,
        display=Display(quiet=True),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
