"""What memory costs: peak resident memory and time of training and of evaluation, against `mem_len` and against tokens read.

Every point is measured in a fresh process: a training step is the `Trainer`'s, evaluation is `evaluate` with one lane. More
memory positions cost more; more text must not.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from common.harness import apart, command, parse, run
from common.machine import peak_mb, reset_peak, resident_mb

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.run import OptimConfig, TrainConfig
from transformer_xl.console import say, table
from transformer_xl.data.streams import SegmentStream
from transformer_xl.kernels.device import Precision, choose_precision
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.training.trainer import Trainer

Work = Literal["train", "evaluate"]
VOCAB_SIZE = 256
N_WARM_UP = 2


@dataclass(frozen=True)
class Sizes:
    """How large everything is: a model of middle size for the sweep over `mem_len`, a small one for many segments."""

    n_layer: int
    d_model: int
    batch_size: int
    tgt_len: int

    def __str__(self) -> str:
        return f"{self.n_layer} layers / {self.d_model}, B={self.batch_size} T={self.tgt_len}"


MIDDLE = Sizes(n_layer=6, d_model=256, batch_size=4, tgt_len=128)
SMALL = Sizes(n_layer=4, d_model=128, batch_size=1, tgt_len=64)
MEM_LENS = (0, 128, 512, 1024, 2048)
N_SEGMENTS = (10, 100, 1000, 5000)
SMALL_MEM_LEN = 128

TINY = Sizes(n_layer=1, d_model=16, batch_size=1, tgt_len=8)


@dataclass(frozen=True)
class Point:
    """One measurement: read `n_segments` segments of the given sizes."""

    work: Work
    sizes: Sizes
    mem_len: int
    n_segments: int
    precision: Precision
    n_threads: int


@dataclass(frozen=True)
class Measured:
    """What a point came to.

    Attributes:
        peak: MB of the whole process while it worked.
        above_idle: MB of that which it did not hold before there was a model.
        seconds: per segment.
    """

    peak: float
    above_idle: float
    seconds: float


def measure(name: str, options: argparse.Namespace) -> list[Any]:
    """Measure each point in a process of its own, print a table for each sweep, and return all figures."""
    precision, reason = choose_precision(options.precision, torch.device("cpu"))
    print(f"precision: {precision}, {reason}")
    sweeps = list(plan(options, precision))
    measured = []
    for title, points in sweeps:
        say(title)
        measured.append([apart(read, point) for point in points])
        print(f"\n{title}\n\n{as_table(points, measured[-1])}")
    if options.plot:
        plot(options.plot, sweeps, measured)
    return [[title, [asdict(result) for result in results]] for (title, _), results in zip(sweeps, measured, strict=True)]


def plan(options: argparse.Namespace, precision: Precision) -> Iterator[tuple[str, list[Point]]]:
    """Yield sweeps, each with its title."""
    middle, small = (TINY, TINY) if options.tiny else (MIDDLE, SMALL)
    works: tuple[Work, ...] = ("train", "evaluate")
    fixed = {"precision": precision, "n_threads": options.threads}
    for work in works:
        points = [Point(work, middle, mem_len, options.segments, **fixed) for mem_len in options.mem_lens]
        yield f"{work}, against mem_len ({middle})", points
    for work in works:
        points = [Point(work, small, SMALL_MEM_LEN, length, **fixed) for length in options.lengths]
        yield f"{work}, against text read ({small}, mem_len {SMALL_MEM_LEN})", points


def read(point: Point) -> Measured:
    """Read the segments of a point, the first few before the clock starts."""
    torch.set_num_threads(point.n_threads)
    torch.manual_seed(0)
    idle = resident_mb()
    sizes = point.sizes
    config = TransformerXLConfig(
        vocab_size=VOCAB_SIZE,
        n_layer=sizes.n_layer,
        d_model=sizes.d_model,
        n_head=4,
        d_head=sizes.d_model // 4,
        d_inner=4 * sizes.d_model,
        mem_len=point.mem_len,
    )
    model = TransformerXL(config)
    n_tokens = sizes.batch_size * sizes.tgt_len * (point.n_segments + N_WARM_UP) + 1
    ids = np.random.default_rng(0).integers(VOCAB_SIZE, size=n_tokens, dtype=np.uint16)
    seconds = (train_segments if point.work == "train" else evaluate_segments)(model, ids, point)
    return Measured(peak_mb(), peak_mb() - idle, seconds / point.n_segments)


def train_segments(model: TransformerXL, ids: np.ndarray, point: Point) -> float:
    stream = SegmentStream(ids, batch_size=point.sizes.batch_size, tgt_len=point.sizes.tgt_len)
    train = TrainConfig(batch_size=point.sizes.batch_size, tgt_len=point.sizes.tgt_len, max_steps=point.n_segments + N_WARM_UP)
    trainer = Trainer(model, stream, train=train, optim=OptimConfig(), precision=point.precision)
    for _ in range(N_WARM_UP):
        trainer.train_step()
    reset_peak()
    begin = time.perf_counter()
    for _ in range(point.n_segments):
        trainer.train_step()
    return time.perf_counter() - begin


def evaluate_segments(model: TransformerXL, ids: np.ndarray, point: Point) -> float:
    n_warm_up = point.sizes.tgt_len * N_WARM_UP
    evaluate(model, ids[: n_warm_up + 1], tgt_len=point.sizes.tgt_len, precision=point.precision)
    reset_peak()
    text = ids[: point.sizes.tgt_len * point.n_segments + 1]
    return evaluate(model, text, tgt_len=point.sizes.tgt_len, precision=point.precision).seconds


def swept(points: list[Point]) -> tuple[str, list[int]]:
    """Return what differs between the points of a sweep, and its values."""
    if len({point.mem_len for point in points}) > 1:
        return "mem_len", [point.mem_len for point in points]
    return "segments", [point.n_segments for point in points]


def as_table(points: list[Point], results: list[Measured]) -> str:
    name, values = swept(points)
    rows = [
        [f"{value:,}", f"{result.peak:,.0f}", f"{result.above_idle:,.0f}", f"{result.seconds * 1e3:,.1f}"]
        for value, result in zip(values, results, strict=True)
    ]
    return table([[name, "peak MB", "above idle MB", "ms per segment"], *rows])


def plot(path: Path, sweeps: list[tuple[str, list[Point]]], measured: list[list[Measured]]) -> None:
    """Draw a panel per sweep: memory from zero on, so that a flat line looks flat."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for panel, (_, points), results in zip(figure.subplots(2, 2).flat, sweeps, measured, strict=True):
        name, values = swept(points)
        panel.plot(values, [result.above_idle for result in results], "o-")
        top = 1.1 * max(result.above_idle for result in results)
        panel.set(title=f"{points[0].work}, against {name}", xlabel=name, ylabel="peak above idle (MB)", ylim=(0, top))
        panel.set_xscale("linear" if name == "mem_len" else "log")
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--segments", type=int, default=20, help="segments read per mem_len (default: %(default)s)")
    parser.add_argument("--mem-lens", type=int, nargs="+", default=list(MEM_LENS), help="default: %(default)s")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(N_SEGMENTS), help="segments of text (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of no interest, to see whether this script works")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the tables, as PNG")
    options = parse(parser, zero="mem_lens")
    run(options, measure, ["memory"])
