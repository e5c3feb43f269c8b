"""Tokens per second on an accelerator: rows read together one token at a time, against what its memory can deliver.

Ours alone, with random weights and a full memory; each step reads one token of every row and finds the likeliest next ones. It
is launched kernel by kernel (eager), or is one CUDA graph, as by default, of the same kernels (graph) or of compiled layers
(compiled). Where there is no such device, this says so and ends.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common.harness import command, mb, parse, run, seconds_of, spread
from common.shapes import READING_SHAPES, ReadingShape

from transformer_xl.console import say, table
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tools.hardware import memory_bandwidth

PRECISIONS = ("fp32", "bf16", "int8")
WAYS = ("eager", "graph", "compiled")
N_WARM_UP = 5


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one shape, print a table, and return all figures."""
    shape, device = READING_SHAPES[name], torch.device(options.device)
    torch.manual_seed(0)
    with torch.device(device):
        model = TransformerXL(shape.sizes.config())
    measured = []
    for precision in options.precisions:
        for rows, way in itertools.product(options.rows, options.ways):
            say(f"shape {name}, {precision}, {rows} rows, {way}")
            rate = memory_bandwidth(device)
            found = {"precision": precision, "rows": rows, "way": way, "bandwidth": rate}
            with out_of_memory_as(found):
                found["seconds"] = steps(model, shape, precision, rows, way, options)
            measured.append(found)
    header = ["", "rows", "way", "ms a step", "min-max ms", "tokens/s", "MB a step", "limit ms", "times the limit"]
    print(f"\nshape {name}: {shape.sizes}, T=1\n")
    print(table([header, *[line(shape, found) for found in measured]]))
    return measured


def steps(
    model: TransformerXL, shape: ReadingShape, precision: Any, rows: int, way: str, options: argparse.Namespace
) -> list[float]:
    """Return the seconds of a step in each round."""
    decoder = Decoder(model, batch_size=rows, precision=precision, compile=way == "compiled")
    assert decoder.kept is not None
    if way == "eager":
        decoder.kept.reader.interpret()
    elif model.device.type == "cuda" and not decoder.kept.reader.captured:
        raise RuntimeError(decoder.reason)
    decoder.kept.memory.n_valid.fill_(decoder.kept.memory.n_slot)  # full, of zeros
    ids = torch.randint(shape.sizes.vocab_size, (N_WARM_UP + options.tokens, rows), device=model.device)
    for own in ids[:N_WARM_UP]:
        decoder.step(own).top(1)
    timed = iter(ids[N_WARM_UP:].repeat(options.repeats, 1))
    return [seconds_of(lambda: decoder.step(next(timed)).top(1), options.tokens, model.device) for _ in range(options.repeats)]


def line(shape: ReadingShape, found: dict[str, Any]) -> list[str]:
    rows, n_byte = found["rows"], shape.token_bytes(found["precision"], rows=found["rows"])
    first = [found["precision"], str(rows), found["way"]]
    if "seconds" not in found:
        return [*first, found["failure"], *[""] * 5]
    limit, median = n_byte / found["bandwidth"], statistics.median(found["seconds"])
    return [
        *first,
        *spread([seconds * 1e3 for seconds in found["seconds"]]),
        f"{rows / median:,.0f}",
        mb(n_byte),
        f"{limit * 1e3:.3f}",
        f"{median / limit:.2f}",
    ]


@contextlib.contextmanager
def out_of_memory_as(found: dict[str, Any]):
    """Note that a device's memory was too small, and go on."""
    try:
        yield
    except torch.OutOfMemoryError:
        found["failure"] = "no memory"
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = command(__doc__, repeats=7, device="cuda")
    parser.add_argument("--shape", choices=READING_SHAPES, nargs="+", default=["E", "W"], help="those of docs/results.md")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256], help="read together (default: 1 32 256)")
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["eager", "graph"], help="default: eager graph")
    parser.add_argument("--tokens", type=int, default=20, help="steps in a round (default: %(default)s)")
    options = parse(parser)
    run(options, measure, options.shape)
