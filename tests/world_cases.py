"""Cases for `tests.forked`: processes that exchange data, and `txl` called in processes."""

import io
import os
import resource
import signal
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest.mock import patch

import torch

from transformer_xl.cli import main
from transformer_xl.errors import ConfigError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.training import record
from transformer_xl.training.display import Display
from transformer_xl.training.trainer import Trainer
from transformer_xl.world import World, joined


def talk() -> dict[str, Any]:
    """Use every kind of message once."""
    with joined() as world:
        rows = world.rows(torch.full((2, 3), float(world.rank)))
        added = torch.tensor([1.0, world.rank])
        world.add_(added)
        return {
            "sum": world.sum(0.1, world.rank),
            "any": [world.any(world.rank == 1), world.any(False)],
            "exchange": world.exchange({"rank": world.rank, "text": "é" * world.rank}),
            "from_first": world.from_first(world.rank + 10),
            "rows": None if rows is None else rows.tolist(),
            "added": added.tolist(),
        }


def fail_in(rank: int, kind: str) -> list[Any]:
    """Only one process has an error; afterwards all can still exchange data."""
    with joined() as world:
        told = None
        try:
            with world.agreed():
                if world.rank == rank:
                    raise ConfigError("this is wrong here") if kind == "ConfigError" else FileNotFoundError(2, "gone", "x/y")
        except Exception as error:
            told = [type(error).__name__, str(error)]
        return [told, world.sum(1)[0]]


def disagree() -> None:
    """One process has another setting."""
    with joined() as world:
        world.check_same(train={"lr": 0.5, "tgt_len": 4 + (world.rank == 1)}, text="abc")


def die(rank: int) -> None:
    """One process ends silently while the others wait for it."""
    with joined() as world:
        world.sum(1)
        if world.rank == rank:
            os._exit(7)
        world.sum(1)


def silent(rank: int) -> None:
    """One process does not answer until another one has given up waiting and ends it."""
    with joined() as world:
        processes = world.exchange(os.getpid())
        if world.rank == rank:
            signal.pause()
        try:
            world.sum(1)
        finally:
            os.kill(processes[rank], signal.SIGKILL)


def alone() -> World:
    """Join without other processes."""
    with joined() as world:
        return world


def txl_with_bad_losses(*arguments: str) -> dict[str, Any]:
    """Call `txl` where every loss is NaN."""
    forward_backward = Trainer._forward_backward

    def bad(trainer: Trainer, *arguments: Any) -> Any:
        total, mems = forward_backward(trainer, *arguments)
        return total * float("nan"), mems

    with patch.object(Trainer, "_forward_backward", bad):
        return txl(*arguments)


def txl_that_is_stopped(rank: int, step: int, *arguments: str) -> dict[str, Any]:
    """Call `txl train`; before a step, one process is sent SIGTERM."""
    train_step = Trainer.train_step

    def train_step_when_stopped(trainer: Trainer) -> Any:
        if int(os.environ["RANK"]) == rank and trainer.step == step:
            signal.raise_signal(signal.SIGTERM)
        return train_step(trainer)

    with patch.object(Trainer, "train_step", train_step_when_stopped):
        return txl(*arguments)


def txl_of_its_own(directory: str, *arguments: str) -> dict[str, Any]:
    """Call `txl` in a directory as a process that works alone, so that several can be started at once."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.chdir(directory)
    return txl(*arguments)


def small_files(size: int) -> None:
    """Limit the size of files of this process from now on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def txl_with_small_files(size: int, directory: str, *arguments: str) -> dict[str, Any]:
    """Call `txl` in a directory with a limit on the size of files."""
    small_files(size)
    warnings.simplefilter("error")
    record._tensorboard = lambda *_: None  # writes files of its own
    return txl_of_its_own(directory, *arguments)


def program(*arguments: str) -> None:
    """Run as `txl` with every warning an error, and without TensorBoard, which takes seconds to import."""
    warnings.simplefilter("error")
    record._tensorboard = lambda *_: None
    main(list(arguments))


def slow_program(*arguments: str) -> None:
    """Run as `txl`, but slowly, so that signals come while it generates."""
    step = Decoder.step

    def slowly(decoder: Decoder, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.002)
        return step(decoder, *arguments, **options)

    with patch.object(Decoder, "step", slowly):
        program(*arguments)


def program_that_scores_slowly(*arguments: str) -> None:
    """Run as `txl`, but slowly while it scores, so that signals come then."""

    def scoring(display: Display, what: str, n_token: int) -> Any:
        return lambda n: time.sleep(0.05)

    with patch.object(Display, "scoring", scoring):
        program(*arguments)


def txl(*arguments: str) -> dict[str, Any]:
    """Call `txl`, and return its status and what it printed."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main(list(arguments))
            status: Any = 0
        except SystemExit as exit:
            status = exit.code
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}
