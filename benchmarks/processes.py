"""How fast several processes train together, against one process with as many threads: a whole step of the trainer.

Both read the same lanes. The processes add up their gradients over this machine's loopback (gloo), holding the model whole
(DDP) or in parts (FSDP). They take turns, in an order that alternates. Before that, losses are compared: without dropout, they
must be those of one process, or nothing is timed.
"""

import argparse
import contextlib
import json
import socket
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.machine import describe, n_cores
from common.report import facts
from common.shapes import SHAPES
from common.sides import at_least, ratios, spread
from common.wire import Remote, WorkerError

from transformer_xl.console import say, table

CHILD = Path(__file__).parent / "common" / "process_child.py"
ALONE = "one process"
PARALLEL = ("ddp", "fsdp")
PRECISIONS = ("fp32", "auto")
TARGET = 0.95
TARGET_PROCESSES = 2
N_WARM_UP = 2
N_COMPARED = 3
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Nats per token after updates; in bf16, gradients of parts are rounded otherwise than those of the whole."""


def main() -> None:
    options = parse_arguments()
    machine = describe()
    print(facts(machine))
    try:
        results = {name: compare(name, options) for name in options.shape}
    except WorkerError as error:
        sys.exit(f"error: {error}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "processes": options.processes, "shapes": results}, indent=2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["E"], help="E and S are those of docs/results.md")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="of each process; one alone has N times as many (default: cores / N)")
    parser.add_argument("--how", choices=PARALLEL, nargs="+", default=list(PARALLEL), help="default: both")
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), help="default: both")
    parser.add_argument("--rows", type=int, help="lanes of all processes together (default: those of the shape)")
    parser.add_argument("--steps", type=int, default=2, help="in a turn (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds in which all take a turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single time there too")
    options = parser.parse_args()
    options.threads = max(1, n_cores() // max(1, options.processes)) if options.threads is None else options.threads
    if min(options.processes - 1, options.threads, options.steps, options.repeats) < 1:
        parser.error("--processes must be at least 2, and --threads, --steps and --repeats at least 1")
    for name in options.shape:
        if rows_of(name, options) % options.processes:
            parser.error(f"--processes must divide the {rows_of(name, options)} lanes of shape {name}; see --rows")
    return options


def rows_of(name: str, options: argparse.Namespace) -> int:
    """Return the lanes that all processes read together."""
    return SHAPES[name].batch_size if options.rows is None else options.rows


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape in all precisions, print a table, and return all figures."""
    found = {}
    for precision, reason in chosen_precisions(options.precisions).items():
        say(f"shape {name}, {precision}: building")
        with contextlib.ExitStack() as stack:
            teams = {who: Team(who, options, stack) for who in (ALONE, *options.how)}
            settings = {"shape": name, "precision": precision, "rows": rows_of(name, options)}
            differences = check_losses(teams, settings)
            for team in teams.values():
                team.ask("build", **settings, dropout=None)
            seconds = time_steps(teams, options)
            memory = {who: max(team.ask("memory")) for who, team in teams.items()}
        found[precision] = {"reason": reason, "loss_differs": differences, "seconds": seconds, "peak_mb": memory}
    result = {"shape": asdict(SHAPES[name]), "rows": rows_of(name, options), "precisions": found}
    print(summary(name, result, options))
    return result


def chosen_precisions(names: list[str]) -> dict[str, str]:
    """Return precisions, and why; `auto` may be one of the others."""
    import torch

    from transformer_xl.kernels.device import choose_precision

    chosen = [choose_precision(name, torch.device("cpu")) for name in dict.fromkeys(names)]
    return dict(chosen)


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
        meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        meeting |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        meeting |= {"CUDA_VISIBLE_DEVICES": ""}  # else those that see a GPU meet by NCCL
        self._workers = [
            stack.enter_context(
                Remote(
                    f"{who}, rank {rank}", [sys.executable, str(CHILD)], meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                )
            )
            for rank in range(size)
        ]

    def ask(self, method: str, **arguments: Any) -> list[Any]:
        """Let all processes do something together, and return what each returned."""
        if method == "build":
            arguments |= self._settings
        for worker in self._workers:
            worker.tell(method, **arguments)
        return [worker.answer() for worker in self._workers]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_losses(teams: dict[str, Team], settings: dict[str, Any]) -> dict[str, float]:
    """Let all take the same steps without dropout, and return how far their losses are from those of one process.

    Raises:
        WorkerError: too far.
    """
    say("comparing losses")
    losses = {}
    for who, team in teams.items():
        team.ask("build", **settings, dropout=0.0)
        losses[who] = team.ask("losses", n=N_COMPARED)[0]
    differences = {
        who: max(abs(a - b) for a, b in zip(own, losses[ALONE], strict=True)) for who, own in losses.items() if who != ALONE
    }
    if not all(difference <= LOSS_TOLERANCE[settings["precision"]] for difference in differences.values()):
        raise WorkerError(
            f"several processes do not learn what one does: losses differ by {differences} nats; nothing was timed"
        )
    return differences


def time_steps(teams: dict[str, Team], options: argparse.Namespace) -> dict[str, list[float]]:
    """Take turns, and return the seconds of a step in each; a team is as slow as the slowest of it."""
    for team in teams.values():
        team.ask("steps", n=N_WARM_UP)
        team.ask("forget_peak")
    seconds: dict[str, list[float]] = {who: [] for who in teams}
    for turn, order in enumerate(alternating(list(teams), options.repeats), start=1):
        for who in order:
            seconds[who].append(max(teams[who].ask("steps", n=options.steps)) / options.steps)
        say(f"round {turn} of {options.repeats}: " + ", ".join(f"{who} {own[-1]:.3f} s" for who, own in seconds.items()))
    return seconds


def alternating(names: list[str], n: int) -> Iterator[list[str]]:
    """Yield names forwards and backwards in turn: what follows another finds the caches that it left."""
    for i in range(n):
        yield names[:: -1 if i % 2 else 1]


def summary(name: str, result: dict[str, Any], options: argparse.Namespace) -> str:
    """Lay out what was measured at one shape."""
    n, threads = options.processes, options.threads
    about = {
        f"shape {name}": f"{SHAPES[name]}; {result['rows']} rows in all",
        "processes": f"{n} with {threads} thread{'s' * (threads > 1)} each, against one with {n * threads}",
        "step": "of the trainer: text, forward, backward, exchange, clipping, Adam; all alternate",
        **{precision: own["reason"] for precision, own in result["precisions"].items()},
        **{
            f"parity {precision}": ", ".join(f"{who} {nats:.1e}" for who, nats in own["loss_differs"].items())
            + f" nats from one process, in {N_COMPARED} steps without dropout"
            for precision, own in result["precisions"].items()
        },
    }
    rows = [
        row(f"{precision} {who}", own, who, result["rows"] * SHAPES[name].tgt_len, options)
        for precision, own in result["precisions"].items()
        for who in own["seconds"]
    ]
    header = ["", "median s", "min-max s", "tokens/s", "of one process", "min-max", "target", "peak MB of one"]
    return f"\n{facts(about)}\n\n{table([header, *rows])}"


def row(label: str, own: dict[str, Any], who: str, n_token: int, options: argparse.Namespace) -> list[str]:
    times = own["seconds"][who]
    target = TARGET if options.processes == TARGET_PROCESSES and who != ALONE else None
    return [
        label,
        *spread(times, 3),
        f"{n_token / statistics.median(times):,.0f}",
        *spread(ratios(own["seconds"][ALONE], times)),  # speed: the time of one process by that of several
        at_least(target),
        f"{own['peak_mb'][who]:,.0f}",
    ]


if __name__ == "__main__":
    main()
