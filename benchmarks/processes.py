"""How fast several processes train together, against one process with as many threads: a whole step of the trainer.

Both read the same lanes. The processes add up their gradients over this machine's loopback (gloo), holding the model whole
(DDP) or in parts (FSDP). They take turns, in an order that alternates. Before that, losses are compared: without dropout, they
must be those of one process, or nothing is timed.
"""

import argparse
import contextlib
import gc
import socket
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common.harness import at_least, command, facts, parse, ratios, run, seconds_of, spread, take_turns
from common.machine import n_cores, peak_mb, reset_peak
from common.shapes import TRAINING_SHAPES, shapes_of
from common.wire import Remote, WorkerError, serve

from transformer_xl.config.run import OptimConfig, Parallelism, TrainConfig
from transformer_xl.console import say, table
from transformer_xl.data.streams import SegmentStream
from transformer_xl.kernels.device import Precision, choose_precision
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.process import keep_freed_memory
from transformer_xl.training.trainer import Trainer
from transformer_xl.world import joined

ALONE = "one process"
PARALLEL = ("ddp", "fsdp")
TARGET = 0.95
N_WARM_UP = 2
N_COMPARED = 3
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Nats per token after updates; in bf16, gradients of parts are rounded otherwise than those of the whole."""


class Process:
    """A trainer, alone or together with others, as the variables that `torchrun` sets say."""

    def __init__(self) -> None:
        keep_freed_memory()  # as `txl train` does
        self._held = contextlib.ExitStack()  # the others are met once, and left when the process ends

    def build(self, shape: str, precision: Precision, how: Parallelism, n_threads: int, dropout: float) -> None:
        """Make a trainer, the same weights and text in every process; a former one is forgotten."""
        torch.set_num_threads(n_threads)
        if not hasattr(self, "_world"):
            self._world = self._held.enter_context(joined())
        self.__dict__.pop("_trainer", None)
        gc.collect()  # a trainer refers to itself, and would count in the peak of the next
        own = TRAINING_SHAPES[shape]
        rows, tgt_len, n_vocab = own.batch_size, own.tgt_len, own.sizes.vocab_size
        torch.manual_seed(0)
        model = TransformerXL(own.sizes.config(dropout=dropout))
        ids = np.random.default_rng(0).integers(0, n_vocab, rows * tgt_len * 16 + 1).astype(np.uint16)
        self._trainer = Trainer(
            model,
            SegmentStream(ids, batch_size=rows, tgt_len=tgt_len, rank=self._world.rank, world_size=self._world.size),
            train=TrainConfig(batch_size=rows, tgt_len=tgt_len, max_steps=1_000_000, precision=precision, parallel=how),
            optim=OptimConfig(optimizer="adam", schedule="constant"),
            precision=precision,
            world=self._world,
        )

    def losses(self, n: int) -> list[float]:
        """Take steps, and return the nats per token of each."""
        results = [self._trainer.train_step() for _ in range(n)]
        return [result.nats / result.tokens for result in results]

    def steps(self, n: int) -> float:
        """Take steps, and return the mean seconds."""
        return seconds_of(self._trainer.train_step, n)

    def forget_peak(self) -> None:
        """Let `memory` count from here."""
        reset_peak()

    def memory(self) -> float:
        """Return the most memory (MB) that this process held."""
        return peak_mb()


class Team:
    """Processes that train together; they end with the block of `stack`.

    Args:
        who: `ALONE`, or how they divide a model.
        options: of the command line.
        stack: of what is open.
    """

    def __init__(self, who: str, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        alone = who == ALONE
        size = 1 if alone else options.processes
        threads = options.processes * options.threads if alone else options.threads
        self._settings = {"how": "ddp" if alone else who, "n_threads": threads}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        meeting |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        meeting |= {"CUDA_VISIBLE_DEVICES": ""}  # else those that see a GPU meet by NCCL
        self._workers = []
        for rank in range(size):
            place = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._workers.append(
                stack.enter_context(Remote(f"{who}, rank {rank}", [sys.executable, __file__, "--serve"], place))
            )

    def ask(self, method: str, **arguments: Any) -> list[Any]:
        """Let all processes do something together, and return what each returned."""
        if method == "build":
            arguments |= self._settings
        for worker in self._workers:
            worker.tell(method, **arguments)
        return [worker.answer() for worker in self._workers]


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape in all precisions, print a table, and return all figures."""
    shape = TRAINING_SHAPES[name]
    found: dict[str, Any] = {}
    about = {
        f"shape {name}": str(shape),
        "step": "of the trainer: text, forward, backward, exchange, clipping, Adam; all alternate",
    }
    each = f"{options.threads} thread{'s' * (options.threads > 1)} each"
    about["processes"] = f"{options.processes} with {each}, against one with {options.processes * options.threads}"
    rows = [["", "median s", "min-max s", "tokens/s", "of one process", "min-max", "target", "peak MB of one"]]
    for precision, reason in dict(choose_precision(one, torch.device("cpu")) for one in options.precisions).items():
        say(f"shape {name}, {precision}: building")
        with contextlib.ExitStack() as stack:
            teams = {who: Team(who, options, stack) for who in (ALONE, *options.how)}
            differences = check_losses(teams, name, precision)
            for team in teams.values():
                team.ask("build", shape=name, precision=precision, dropout=shape.sizes.dropout)
                team.ask("steps", n=N_WARM_UP)
                team.ask("forget_peak")
            # a team is as slow as the slowest of it
            turns: dict[str, Callable[[int], float]] = {
                who: lambda _, team=team: max(team.ask("steps", n=options.steps)) for who, team in teams.items()
            }
            seconds = take_turns(turns, options.repeats, f"shape {name}, {precision}, seconds a step:")
            memory = {who: max(team.ask("memory")) for who, team in teams.items()}
        found[precision] = {"loss_differs": differences, "seconds": seconds, "peak_mb": memory}
        about[precision] = reason
        about[f"parity {precision}"] = ", ".join(f"{who} {nats:.1e} nats from one process" for who, nats in differences.items())
        for who, own in seconds.items():
            rate = shape.batch_size * shape.tgt_len / statistics.median(own)
            target = at_least(TARGET) if options.processes == 2 and who != ALONE else ""
            faster = spread(ratios(seconds[ALONE], own))
            rows.append([f"{precision} {who}", *spread(own, 3), f"{rate:,.0f}", *faster, target, f"{memory[who]:,.0f}"])
    print(f"\n{facts(about)}\n\n{table(rows)}")
    return found


def check_losses(teams: dict[str, Team], shape: str, precision: str) -> dict[str, float]:
    """Let all take the same steps without dropout, and return how far their losses are from those of one process.

    Raises:
        WorkerError: too far.
    """
    say("comparing losses")
    losses = {}
    for who, team in teams.items():
        team.ask("build", shape=shape, precision=precision, dropout=0.0)
        losses[who] = team.ask("losses", n=N_COMPARED)[0]
    alone = losses.pop(ALONE)
    differences = {who: max(abs(a - b) for a, b in zip(own, alone, strict=True)) for who, own in losses.items()}
    if not all(difference <= LOSS_TOLERANCE[precision] for difference in differences.values()):
        raise WorkerError(f"several processes do not learn what one does: losses differ by {differences} nats")
    return differences


def main() -> None:
    parser = command(__doc__, repeats=7)
    parser.add_argument("--shape", choices=[*TRAINING_SHAPES, "all"], default="E", help="E and S are those of docs/results.md")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--how", choices=PARALLEL, nargs="+", default=list(PARALLEL), help="default: both")
    parser.add_argument("--precisions", choices=("fp32", "auto"), nargs="+", default=["fp32", "auto"], help="default: both")
    parser.add_argument("--steps", type=int, default=2, help="in a turn (default: %(default)s)")
    parser.set_defaults(threads=max(1, n_cores() // 2))
    options = parse(parser)
    names = shapes_of(options, TRAINING_SHAPES)
    for name in names:
        if TRAINING_SHAPES[name].batch_size % options.processes:
            parser.error(f"--processes must divide the {TRAINING_SHAPES[name].batch_size} lanes of shape {name}")
    run(options, compare, names)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve(Process())
    else:
        main()
