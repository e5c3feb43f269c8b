"""Tokens per second on an accelerator: rows read together one token at a time, against what its memory can deliver.

Ours alone, with random weights and a full memory; each step reads one token of every row and finds the likeliest next ones. It
is launched kernel by kernel (eager), or is one CUDA graph, as by default, of the same kernels (graph) or of compiled layers
(compiled). Where there is no such device, this says so and ends.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common.machine import describe
from common.reading_ours import config_of
from common.reading_shapes import READING_SHAPES, ReadingShape
from common.report import facts
from common.sides import spread

import transformer_xl
from transformer_xl.console import say, table
from transformer_xl.cost.hardware import finish, memory_bandwidth
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.transformer_xl import TransformerXL

PRECISIONS = ("fp32", "bf16", "int8")
WAYS = ("eager", "graph", "compiled")
N_WARM_UP = 5


def main() -> None:
    options = parse_arguments()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"skipped: there is no device '{options.device}' here; --device cpu tries the benchmark out")
        return
    machine = describe() | {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "bandwidth": f"{memory_bandwidth(device) / 1e9:,.0f} GB/s",
        "ours": f"transformer_xl {transformer_xl.__version__}, torch {torch.__version__}",
    }
    print(facts(machine))
    results = {name: measure(name, device, options) for name in options.shape}
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "shapes": results}, indent=2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=READING_SHAPES, nargs="+", default=["E", "W"], help="those of docs/results.md")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256], help="read together (default: 1 32 256)")
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["eager", "graph"], help="default: eager graph")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=20, help="steps in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single time there too")
    options = parser.parse_args()
    if min(options.repeats, options.tokens, *options.rows) < 1:
        parser.error("--repeats, --tokens and --rows must be at least 1")
    return options


def measure(name: str, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one shape, print a table, and return all figures."""
    shape = READING_SHAPES[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = TransformerXL(config_of(shape))
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
    print(f"\nshape {name}: {shape}, T=1\n")
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
    ids = torch.randint(shape.vocab_size, (N_WARM_UP + options.tokens, rows), device=model.device)
    for own in ids[:N_WARM_UP]:
        decoder.step(own).top(1)
    seconds = []
    for _ in range(options.repeats):
        finish(model.device)
        begin = time.perf_counter()
        for own in ids[N_WARM_UP:]:
            decoder.step(own).top(1)
        finish(model.device)
        seconds.append((time.perf_counter() - begin) / options.tokens)
    return seconds


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
        f"{n_byte / 1e6:,.0f}",
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
    main()
