"""Tokens per second of scoring on an accelerator: segments of a text, each launched as one graph or kernel by kernel.

Ours alone, with random weights and tokens and a full memory. The host waits for the nats of a segment when the next one has
been launched, as `evaluate` does. A way is one CUDA graph for each segment, as by default (graph), or what runs where a graph
cannot be captured (eager). Ways take turns on the same tokens, and all their nats are compared, bit by bit. Then `evaluate`
scores a whole text, with all that it prepares. Where there is no such device, this says so and ends.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common.harness import command, finish, parse, ratios, run, spread, take_turns
from common.machine import peak_mb, reset_peak, resident_mb
from common.shapes import READING_SHAPES
from torch import Tensor

from transformer_xl.console import say, table
from transformer_xl.kernels.graphs import Graphs, Readback
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading import stream as streams
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.reading.stream import Stream, open_stream, scoring

PRECISIONS = ("fp32", "bf16", "int8")
WAYS = ("graph", "eager")
N_WARM_UP = 3
"""Segments at least: the first compiles kernels, the second captures."""


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape, print tables, and return all figures."""
    torch.manual_seed(0)
    with torch.device(options.device):
        model = TransformerXL(READING_SHAPES[name].sizes.config())
    read = []
    for precision, rows in itertools.product(options.precisions, options.rows):
        say(f"shape {name}, {precision}, {rows} rows")
        read.append({"precision": precision, "rows": rows} | streamed(model, precision, rows, options))
    texts = []
    for precision in options.precisions:
        say(f"shape {name}, {precision}, a whole text")
        texts.append({"precision": precision} | evaluated(model, precision, options))
    print(summary(name, read, texts, options))
    return {"streams": read, "texts": texts}


def streamed(model: TransformerXL, precision: Any, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Let streams of all ways read on in turn; return the seconds of a segment in each round, and the MB that each takes."""
    T, n_warm_up = options.tgt_len, max(N_WARM_UP, -(-model.mem_len // options.tgt_len))
    opened: dict[str, Stream] = {}
    peaks: dict[str, float] = {}
    with scoring(model):
        warm_up = random_segments(model, n_warm_up, rows, T)
        nats = {}
        for way in options.ways:
            held = start_peak(model.device)
            with launched(way) as made:
                opened[way] = open_stream(model, rows, tgt_len=T, precision=precision)
            nats[way] = score(opened[way], warm_up)
            check_captured(way, made)
            peaks[way] = peak(model.device) - held
        rounds = [nats, *({} for _ in range(options.repeats))]
        texts = [random_segments(model, options.segments, rows, T) for _ in range(options.repeats)]

        def turn(way: str, i: int) -> float:
            finish(model.device)
            begin = time.perf_counter()
            rounds[i + 1][way] = score(opened[way], texts[i])
            return (time.perf_counter() - begin) / options.segments

        seconds = take_turns({way: lambda i, way=way: turn(way, i) for way in options.ways}, options.repeats, "segments:")
    return {"seconds": seconds, "peak_mb": peaks, "differs": max(map(difference, rounds))}


def evaluated(model: TransformerXL, precision: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Score a whole text in one row, in turn by all ways; return the seconds of each round, after one that is not counted."""
    n_token = options.segments * options.tgt_len + 1
    ids = torch.randint(model.config.vocab_size or 0, (n_token,))
    rounds: list[dict[str, Tensor]] = [{} for _ in range(1 + options.repeats)]

    def turn(way: str, i: int) -> float:
        with launched(way) as made:
            finish(model.device)
            begin = time.perf_counter()
            found = evaluate(model, ids, tgt_len=options.tgt_len, precision=precision, per_token=True)
            seconds = time.perf_counter() - begin
        if options.segments > 1:  # a shape that comes once is not captured
            check_captured(way, made)
        assert found.token_nats is not None
        rounds[i][way] = torch.from_numpy(found.token_nats)
        return seconds

    seconds = take_turns({way: lambda i, way=way: turn(way, i) for way in options.ways}, 1 + options.repeats, "texts:")
    seconds = {way: own[1:] for way, own in seconds.items()}
    return {"n_token": n_token, "seconds": seconds, "differs": max(map(difference, rounds))}


@contextlib.contextmanager
def launched(way: str) -> Iterator[list[Graphs]]:
    """Let streams opened in this block launch segments in a way; yield what launches them, where there are graphs."""
    usual, made = streams._graphs, []

    def graphs(device: torch.device) -> Graphs | None:
        own = usual(device)
        if own is not None:
            made.append(own)
            if way == "eager":  # as after a capture that failed
                own.problem = "not asked for"
        return own

    with mock.patch.object(streams, "_graphs", graphs):
        yield made


def check_captured(way: str, made: list[Graphs]) -> None:
    """Raise a RuntimeError if segments are launched kernel by kernel although graphs were asked for."""
    if way == "graph" and any(len(own) == 0 for own in made):
        raise RuntimeError(f"no graph: {made[0].problem}")


def random_segments(model: TransformerXL, n: int, rows: int, tgt_len: int) -> Tensor:
    """Return random ids with their labels, (n, rows, T + 1), on the CPU, as a text is."""
    return torch.randint(model.config.vocab_size or 0, (n, rows, tgt_len + 1))


def score(stream: Stream, segments: Tensor) -> Tensor:
    """Score segments one after another, and return all nats when the last have come from the device."""
    found: list[Tensor] = []
    late: Readback | None = None
    for own in segments:
        nats = Readback(stream.score(own[:, :-1], own[:, 1:]))
        if late is not None:
            found.append(late.tensor)
        late = nats
    assert late is not None
    return torch.stack([*found, late.tensor])


def difference(nats: dict[str, Tensor]) -> float:
    """Return the largest difference of a token's nats between any two ways; 0 only if all bits are equal."""
    first, *others = nats.values()
    return max((0.0 if torch.equal(first, own) else (first - own).abs().max().item() for own in others), default=0.0)


def start_peak(device: torch.device) -> float:
    """Let the peak of memory count from now on, and return the MB that are held."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 1e6
    reset_peak()
    return resident_mb()


def peak(device: torch.device) -> float:
    """Return the most MB that were held since `start_peak`: of the device, or on a CPU of the process."""
    return torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else peak_mb()


def summary(name: str, read: list[dict[str, Any]], texts: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Lay out what was measured at one shape."""
    T, n_token = options.tgt_len, texts[0]["n_token"]
    faster = ["times eager", "min-max"]
    of_streams = [["", "rows", "way", "ms a segment", "min-max ms", "tokens/s", *faster, "peak MB"]]
    for own in read:
        for way in options.ways:
            first = [own["precision"], str(own["rows"]), way]
            of_streams.append([*first, *times(own["seconds"], way, own["rows"] * T), f"{own['peak_mb'][way]:,.0f}"])
    of_texts = [["", "way", "ms in all", "min-max ms", "tokens/s", *faster]]
    of_texts += [[own["precision"], way, *times(own["seconds"], way, n_token)] for own in texts for way in options.ways]
    lines = [
        f"\nshape {name}: {READING_SHAPES[name].sizes}, T={T}, {options.segments} segments in a turn\n",
        table(of_streams),
        f"\nevaluate, {n_token:,} tokens in one row, all preparation and the capture included\n",
        table(of_texts),
    ]
    if len(options.ways) > 1:
        lines += ["", bits(read, texts)]
    return "\n".join(lines)


def times(seconds: dict[str, list[float]], way: str, n_token: int) -> list[str]:
    """Return cells: milliseconds, tokens per second, and how many times as fast as kernel by kernel, round by round."""
    own, eager = seconds[way], seconds.get("eager")
    rate = f"{n_token / statistics.median(own):,.0f}"
    return [*spread([1e3 * x for x in own]), rate, *(spread(ratios(eager, own)) if eager and way != "eager" else ["", ""])]


def bits(read: list[dict[str, Any]], texts: list[dict[str, Any]]) -> str:
    """Say whether nats were the same in all ways."""
    differ = {f"{own['precision']}, {own.get('rows', 'a text in 1')} row(s)": own["differs"] for own in [*read, *texts]}
    worst = [f"{what}: by at most {nats:.1e} nats" for what, nats in differ.items() if nats != 0]
    return f"nats DIFFER between the ways: {'; '.join(worst)}" if worst else "nats are equal in all ways, to the last bit"


if __name__ == "__main__":
    parser = command(__doc__, repeats=5, device="cuda")
    parser.add_argument("--shape", choices=READING_SHAPES, nargs="+", default=["E"], help="those of docs/results.md")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="read together (default: 1 16)")
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=["bf16"], help="default: bf16")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="default: graph eager")
    parser.add_argument("--tgt-len", type=int, default=512, help="tokens of a segment (default: %(default)s)")
    parser.add_argument("--segments", type=int, default=32, help="in a turn, and in a text (default: %(default)s)")
    options = parse(parser)
    run(options, measure, options.shape)
