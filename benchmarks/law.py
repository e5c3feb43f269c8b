"""A small law: the loss of models of one family by their parameters, the tokens that they read, and their memory.

Trains every setting of a grid, and some between that the fit does not see. What --out has is not trained again,
and a second terminal takes a share. The family is that of the recipe enwik8-byte: three layers, tables of pairs and triples,
segments of 64. Parameters are those of the layers, because tables cost no products.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common.machine import describe
from common.report import facts
from torch import Tensor

from transformer_xl.config import load_recipe
from transformer_xl.console import progress, say, table
from transformer_xl.cost.law import Law
from transformer_xl.errors import TxlError, one_line
from transformer_xl.files import locked, replace_file
from transformer_xl.model.sequence_model import make_model
from transformer_xl.training.display import Display
from transformer_xl.training.run import train

WIDTHS = (64, 128, 224)
GRID = [(width, n, memory) for n in (800_000, 1_600_000) for width in WIDTHS for memory in (0, 16, 64, 192)]
GRID += [(width, 3_200_000, memory) for width in WIDTHS for memory in (0, 64)]
"""Width, tokens and memory of each model."""
HELD_OUT = [(width, n, memory) for width in (96, 176) for n in (1_100_000, 2_300_000) for memory in (32, 128)]
"""What the fit does not see: settings between those of the grid."""


@dataclass(frozen=True)
class Point:
    """One trained model."""

    width: int
    parameters: int  # of the layers
    tokens: int
    memory: int
    loss: float  # nats per byte
    held_out: bool  # the fit does not see it


class BusyError(Exception):
    """Another process trains this model."""


def leave() -> None:
    raise BusyError


def settings(width: int, tokens: int, memory: int) -> list[str]:
    """Return what is laid over the recipe."""
    inner = 32 * round(width / 14)  # 512 of 224
    return [
        *(f"model.{name}={value}" for name, value in {"d_model": width, "d_inner": inner, "mem_len": memory}.items()),
        *("train.max_minutes=none", f"train.max_tokens={tokens}", "train.eval_interval=1_000_000", "train.sample_tokens=0"),
        *("train.threads=1", "train.precision=fp32", "train.device=cpu", "eval.max_tokens=200_000"),
    ]


def measure(width: int, tokens: int, memory: int, *, corpus: str, out: Path, held_out: bool) -> Point:
    """Train a model and score it on validation text."""
    done = train("enwik8-byte", corpus=corpus, overrides=settings(width, tokens, memory), out=out, display=Display(quiet=True))
    assert done.score is not None
    shutil.rmtree(out)
    config = load_recipe("enwik8-byte", settings(width, tokens, memory)).model
    n = sum(x.numel() for x in make_model(config.completed(vocab_size=256, tgt_len=64)).get_submodule("layers").parameters())
    return Point(width, n, done.tokens, memory, done.score.loss, held_out)


def fit(points: Sequence[Point], starts: int) -> Law:
    """Return the law with the least squared error, the best found from so many random starts.

    All its numbers are positive, so their logarithms are fitted.
    """
    numbers = ([p.parameters for p in points], [p.tokens for p in points], [p.memory for p in points], [p.loss for p in points])
    parameters, tokens, memory, loss = (torch.tensor(x, dtype=torch.float64) for x in numbers)
    generator, best = torch.Generator().manual_seed(0), (math.inf, torch.empty(0))
    for _ in range(starts):
        logs = torch.randn(9, dtype=torch.float64, generator=generator) - 1
        logs[7] += 4  # of M_0
        logs.requires_grad_()
        optimizer = torch.optim.LBFGS([logs], max_iter=2_000, line_search_fn="strong_wolfe", tolerance_change=1e-14)

        def error(logs: Tensor = logs, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            squared = (law(logs).loss(parameters, tokens, memory) - loss).square().mean()
            squared.backward()
            return squared

        optimizer.step(error)
        found = float(error().detach())
        if found < best[0]:
            best = (found, logs.detach())
    return Law(*(round(float(x), 4) for x in best[1].exp()))


def law(logs: Tensor) -> Any:
    """Return a law whose numbers are tensors."""
    return Law(*logs.exp())  # pyright: ignore[reportArgumentType]


def show(points: Sequence[Point], starts: int) -> None:
    """Fit the points of the grid, and print how far all are from the law."""
    grid, held_out = ([point for point in points if point.held_out == is_held_out] for is_held_out in (False, True))
    found = fit(grid, starts)
    print(f"fitted to {len(grid)} models, the root of the mean squared error is {rms(found, grid):.4f} nats:\n{found}\n")
    rows = [["width", "parameters", "tokens", "memory", "loss", "law", "error"]]
    for point in held_out:
        said = found.loss(point.parameters, point.tokens, point.memory)
        counts = (f"{n:,}" for n in (point.width, point.parameters, point.tokens, point.memory))
        rows.append([*counts, f"{point.loss:.4f}", f"{said:.4f}", f"{said - point.loss:+.4f}"])
    if held_out:
        print(f"held out, {rms(found, held_out):.4f}:\n{table(rows)}")


def rms(found: Law, points: Sequence[Point]) -> float:
    errors = (found.loss(point.parameters, point.tokens, point.memory) - point.loss for point in points)
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/law"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--corpus", default="enwik8", help="bytes: a name, a file, a directory or a glob (default: %(default)s)"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the tokens of all runs, to try this out (default: 1)")
    parser.add_argument(
        "--starts", type=int, default=20, help="of the fit, at random; the best is taken (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    with progress("models", len(GRID) + len(HELD_OUT), unit=None) as bar:
        for place, (width, n, memory) in enumerate((*GRID, *HELD_OUT)):
            setting = (width, round(options.share * n), memory)
            name = "-".join(map(str, setting))
            with suppress(BusyError), locked(options.out / f"{name}.lock", on_busy=leave):
                if not (options.out / f"{name}.json").exists():
                    shutil.rmtree(options.out / name, ignore_errors=True)  # of a run that was interrupted
                    point = measure(*setting, corpus=options.corpus, out=options.out / name, held_out=place >= len(GRID))
                    replace_file(options.out / f"{name}.json", json.dumps(asdict(point)).encode())
            bar.advance()
    points = [Point(**json.loads(file.read_text())) for file in sorted(options.out.glob("*.json"))]
    print(facts(describe()))
    if len(points) < len(GRID) + len(HELD_OUT):
        say(f"{len(points)} models are trained so far; another process is at others")
    else:
        show(points, options.starts)


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"law.py: error: {one_line(error)}")
