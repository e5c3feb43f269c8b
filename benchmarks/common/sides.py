"""What benchmarks against a peer have in common: their options, the processes of readers, and the figures of turns taken."""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common.machine import describe, n_cores
from common.reading_shapes import READING_SHAPES
from common.report import facts
from common.wire import Remote, WorkerError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"


def peer_options(description: str | None, *, repeats: int, of: str = "timed steps of each") -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks against a peer have; `of` says what is repeated."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help=f"{of} (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=n_cores(), help="default: all cores (%(default)s)")
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="Python with peer-requirements.txt installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single time there too")
    return parser


def reading_options(description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """Return a parser of the options that `decode.py` and `evaluate.py` have."""
    parser = peer_options(description, repeats=repeats, of="rounds in which all take a turn")
    parser.add_argument("--shape", choices=[*READING_SHAPES, "all"], default="all", help="E and W are those of docs/results.md")
    parser.add_argument("--quick", action="store_true", help="try it out in seconds: a tiny shape, a stand-in for the peer")
    return parser


def checked(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options, and refuse what cannot work."""
    options = parser.parse_args(arguments)
    quick = getattr(options, "quick", None)  # None: it is no option of this benchmark
    if quick:
        options.shape, options.repeats = "tiny", min(options.repeats, 2)
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if not quick and not options.peer_python.exists():
        hint = "" if quick is None else ", or try --quick"
        parser.error(f"the peer's environment '{options.peer_python}' does not exist; run `make bench`, which sets it up{hint}")
    return options


def run(
    compare: Callable[[str, argparse.Namespace], dict[str, Any]],
    options: argparse.Namespace,
    shapes: Iterable[str] = READING_SHAPES,
) -> None:
    """Compare at each shape that was asked for, and write all figures where that was asked for."""
    names = [name for name in shapes if name != "tiny"] if options.shape == "all" else [options.shape]
    machine = describe()
    print(facts(machine))
    try:
        results = {name: compare(name, options) for name in names}
    except WorkerError as error:
        sys.exit(f"error: {error}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "threads": options.threads, "shapes": results}, indent=2))


class Sides:
    """Starts the processes of one benchmark; each ends with its `with` block.

    Args:
        shape: name of it.
        options: of the command line.
        folder: for what they exchange, and for what a compiler keeps.
    """

    def __init__(self, shape: str, options: argparse.Namespace, folder: Path) -> None:
        self.shape, self.options, self.folder = shape, options, folder
        self._environment = {
            "OMP_NUM_THREADS": str(options.threads),
            "MKL_NUM_THREADS": str(options.threads),
            "HF_HUB_OFFLINE": "1",
        }

    def peer(self) -> Remote:
        """Start the peer, or what stands in for it, and let it write its weights."""
        if self.options.quick:
            return self._model("stand-in", [sys.executable], "reading_stand_in.py")
        return self._model("peer", [str(self.options.peer_python), "-W", "ignore"], "reading_peer.py")

    def ours(self, precision: str, *, compiled: bool = False) -> Remote:
        """Start ours with the weights that the peer wrote."""
        return self._model(f"ours {precision}", [sys.executable], "reading_ours.py", precision, *["compiled"][: int(compiled)])

    def llama(self, precision: str, *, compiled: bool = False) -> Remote:
        """Start a Llama of the same sizes."""
        way = ["compiled"][: int(compiled)]
        return self._model(f"Llama {precision}", [sys.executable, "-W", "ignore"], "llama.py", "read", precision, *way)

    def bandwidth(self) -> Remote:
        """Start what measures the machine's memory."""
        worker = Remote("bandwidth", [sys.executable, str(HERE / "bandwidth.py")], self._environment)
        worker.ask("build", n_threads=self.options.threads)
        return worker

    def file(self, name: str) -> str:
        """Return the path of a file that several of them use."""
        return str(self.folder / name)

    def _model(self, name: str, interpreter: list[str], script: str, *arguments: str) -> Remote:
        # of this run and this precision alone, so that what is compiled first finds nothing
        cache = {"TORCHINDUCTOR_CACHE_DIR": self.file("-".join(["compiled", *arguments]))}
        worker = Remote(name, [*interpreter, str(HERE / script), *arguments], self._environment | cache)
        worker.ask("build", shape=self.shape, weights=self.file("weights.safetensors"), n_threads=self.options.threads)
        return worker


def random_ids(n: int, vocab_size: int, seed: int) -> list[int]:
    """Return random token ids, the same ones in every run."""
    return random.Random(seed).choices(range(vocab_size), k=n)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Divide round by round: in a round, the machine was about equally fast for all."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> list[str]:
    """Return two cells: the median, and least and greatest."""
    return [f"{statistics.median(values):.{digits}f}", f"{min(values):.{digits}f}-{max(values):.{digits}f}"]


def at_least(target: float | None) -> str:
    """Return a cell with a target."""
    return f">= {target:g}" if target else ""
