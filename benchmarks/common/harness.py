"""What all benchmarks do alike: options, sides that take turns, figures of rounds, and what is printed and written.

A benchmark says what it sets up and what it times. In each round all sides take a turn, in an order that alternates, because
what comes later finds the caches, or the heat, of what was before; ratios are of values of one round, in which the machine was
about equally fast for all.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import transformer_xl
from common.machine import describe, n_cores
from common.wire import Remote, WorkerError
from transformer_xl.console import say, table

COMMON = Path(__file__).parent
PEER_PYTHON = COMMON.parents[1] / ".venv-peer" / "bin" / "python"


def command(description: str | None, *, repeats: int | None = None, peer: bool = False, device: str | None = None) -> Any:
    """Return a parser with the options that benchmarks share.

    Args:
        description: of the benchmark.
        repeats: rounds by default; None: there are none.
        peer: sides need the peer's environment.
        device: the default of --device; None: this is about processors alone.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="rounds in which all take a turn (%(default)s)")
    if peer:
        parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="Python with peer-requirements.txt installed")
    if device is not None:
        parser.add_argument("--device", default=device, help="default: %(default)s")
    threads = int(os.environ.get("OMP_NUM_THREADS", n_cores()))
    parser.add_argument("--threads", type=int, default=threads, help="default: OMP_NUM_THREADS, or all cores (%(default)s)")
    parser.add_argument("--json", type=lambda name: Path(name).resolve(), metavar="FILE", help="write every figure there too")
    return parser


def parse(parser: argparse.ArgumentParser, *, zero: str = "") -> argparse.Namespace:
    """Parse the command line, and refuse numbers below 1, but for one option that may be 0, and a peer that is not there."""
    options = parser.parse_args()
    for name, value in vars(options).items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, int) and not isinstance(each, bool) and each < (name != zero) for each in values):
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not getattr(options, "peer_python", Path(sys.executable)).exists():
        parser.error(f"the peer's environment '{options.peer_python}' does not exist; run `make bench`, which sets it up")
    return options


def run(
    options: argparse.Namespace, measure: Callable[[str, argparse.Namespace], Any], names: Iterable[str], **about: str
) -> None:
    """Print the machine, measure all that is named, and write the figures where that was asked for."""
    device = torch.device(getattr(options, "device", "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"skipped: there is no device '{device}' here; --device cpu tries the benchmark out")
        return
    if device.type == "cuda":
        about["device"] = torch.cuda.get_device_name(device)
    torch.set_num_threads(options.threads)
    versions = {"ours": f"transformer_xl {transformer_xl.__version__}, torch {torch.__version__}"}
    machine = {**describe(), **versions, "threads": str(options.threads), **about}
    print(facts(machine))
    try:
        results = {name: measure(name, options) for name in names}
    except WorkerError as error:
        sys.exit(f"error: {error}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2), encoding="utf-8")


class Sides(contextlib.ExitStack):
    """The processes of a comparison, which end with the block, and a folder for what they exchange.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self._options, self._folder = options, Path(self.enter_context(tempfile.TemporaryDirectory()))

    def file(self, name: str) -> str:
        """Return the path of a file that several of them use."""
        return str(self._folder / name)

    def start(self, name: str, script: str, *arguments: str, **build: Any) -> Remote:
        """Start a script of `common` that serves a side, and let it build its model; the caller ends it.

        The peer comes first: it writes the weights that others read.
        """
        python = self._options.peer_python if script == "peer.py" else sys.executable
        threads = str(self._options.threads)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        # of this run and this way alone, so that what is compiled first finds nothing
        environment["TORCHINDUCTOR_CACHE_DIR"] = self.file("-".join(["compiled", *arguments]))
        say(f"starting {name}")
        side = Remote(name, [str(python), "-W", "ignore", str(COMMON / script), *arguments], environment)
        side.ask("build", weights=self.file("weights.safetensors"), n_threads=self._options.threads, **build)
        return side


def take_turns(sides: Mapping[str, Callable[[int], float]], repeats: int, what: str = "") -> dict[str, list[float]]:
    """Let all sides take a turn in each round, forwards and backwards; return what each gave.

    Args:
        sides: by name; each is called with the number of the round.
        repeats: rounds.
        what: is measured, for messages.
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats):
        for name in list(sides)[:: -1 if i % 2 else 1]:
            values[name].append(sides[name](i))
        say(f"{what} round {i + 1} of {repeats}: " + ", ".join(f"{name} {own[-1]:.4g}" for name, own in values.items()))
    return values


def seconds_of(run: Callable[[], object], n: int = 1, device: torch.device | None = None) -> float:
    """Return the seconds of a call, of `n` in a row, until the device has done its work."""
    finish(device)
    begin = time.perf_counter()
    for _ in range(n):
        run()
    finish(device)
    return (time.perf_counter() - begin) / n


def finish(device: torch.device | None) -> None:
    """Wait until a device has done its work."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process, which owes nothing to earlier calls."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def facts(pairs: Mapping[str, str]) -> str:
    """Lay out names and values in two columns."""
    return table(list(pairs.items()), n_left=2)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Divide round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> list[str]:
    """Return two cells: the median, and least and greatest."""
    return [f"{statistics.median(values):.{digits}f}", f"{min(values):.{digits}f}-{max(values):.{digits}f}"]


def at_least(target: float | None) -> str:
    """Return a cell with a target."""
    return f">= {target:g}" if target else ""


def mb(n_bytes: float | None) -> str:
    """Return a cell with megabytes."""
    return "" if n_bytes is None else f"{n_bytes / 1e6:,.0f}"
