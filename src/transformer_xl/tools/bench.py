"""`txl bench`: time a step of `Decoder` as users call it, in one mode after another, beside how fast memory is read.

Shapes: B rows, T tokens.
"""

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_xl.console import Bar, say, table
from transformer_xl.errors import ConfigError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.kernels.device import InferencePrecision, cannot_compile
from transformer_xl.model.base import LanguageModel
from transformer_xl.tools.hardware import Clock

Figures = dict[str, Any]
"""Plain numbers in seconds and bytes, ready for JSON; None where a figure is unknown."""

Mode = tuple[InferencePrecision, bool, int]
"""Precision, whether code is compiled, rows."""

_N_WARM_UP = 3
"""Steps that are not timed: allocators and caches settle in them."""


@dataclass
class Findings:
    """The figures so far, and what could not be measured and why."""

    figures: list[Figures] = field(default_factory=list)  # one entry per mode
    skipped: dict[str, str] = field(default_factory=dict)  # reasons by mode
    interrupted: bool = False  # before all was measured


def bench_decoders(
    model: LanguageModel, ids: np.ndarray, modes: Sequence[Mode], *, n_token: int, bandwidth: float, bar: Bar
) -> Findings:
    """Return the figures of a decoder in each mode, see `measure_decoding`; Ctrl-C ends it early if there are any.

    Raises:
        ConfigError: the model can be measured in none of them.
    """
    findings = Findings()
    n_compiled = sum(compile for _, compile, _ in modes)
    no_compiler = cannot_compile(model.device) if n_compiled else None
    if n_compiled and not no_compiler:
        say(f"{n_compiled} of {len(modes)} measurements compile first, about half a minute each; --no-compile leaves them out")
    try:
        for precision, compile, n_row in modes:
            code = f"{precision} {'compiled' if compile else 'eager'}"
            what = f"{code}, {n_row} rows" if n_row > 1 else code
            bar.next(what)
            if compile and no_compiler:
                findings.skipped["compiled"] = no_compiler
                continue
            options: dict[str, Any] = {"precision": precision, "compile": compile, "n_row": n_row}
            try:
                findings.figures.append(measure_decoding(model, ids, **options, n_token=n_token, bandwidth=bandwidth))
            except ConfigError as error:
                findings.skipped[what] = str(error)
    except KeyboardInterrupt:
        if not findings.figures:
            raise
        findings.interrupted = True
    if not findings.figures:
        raise ConfigError(f"nothing could be measured: {next(iter(findings.skipped.values()))}")
    return findings


def measure_decoding(
    model: LanguageModel,
    ids: np.ndarray,
    *,
    precision: InferencePrecision = "fp32",
    compile: bool = False,
    n_row: int = 1,
    n_token: int = 100,
    bandwidth: float = 1e9,
    clock: Clock = time.perf_counter,
) -> Figures:
    """Make a decoder of B rows, fill its memory with the text `ids` (N,), repeated if too short, and time how it reads on.

    A step reads a token of each row and finds the likeliest next one. `ready_seconds` pass until the first token was read:
    weights are prepared, memory is allotted, and code compiled if asked for. Reading memory at `bandwidth` bytes per second is
    the limit, which is unknown if the decoder keeps no keys.
    """
    begin = clock()
    decoder = Decoder(model, batch_size=n_row, precision=precision, compile=compile)
    n_fill = decoder.kept.memory.n_slot if decoder.kept else decoder.mem_len + decoder.tgt_len
    text_BT = torch.from_numpy(np.resize(ids, (n_row, n_fill + _N_WARM_UP + n_token)).astype(np.int64))
    decoder.step(text_BT[:, 0]).top(1)
    ready = clock() - begin
    decoder.reset()

    decoder.feed(text_BT[:, :n_fill])
    seconds = []
    for tokens_B in text_BT[:, n_fill:].unbind(1):
        begin = clock()
        decoder.step(tokens_B).top(1)
        seconds.append(clock() - begin)
    seconds = seconds[_N_WARM_UP:]
    n_bytes = bytes_of_step(decoder)
    median, limit = statistics.median(seconds), None if n_bytes is None else n_bytes / bandwidth
    return {
        "precision": precision,
        "compiled": compile,
        "rows": n_row,
        "ready_seconds": ready,
        "step_seconds": {"median": median, "min": min(seconds), "max": max(seconds)},
        "tokens_per_second": n_row / median,  # of all rows together
        "bytes_per_step": n_bytes,
        "limit_seconds": limit,
        "time_over_limit": None if limit is None else median / limit,
    }


def bytes_of_step(decoder: Decoder) -> int | None:
    """Return the bytes that a step reads at least, in their types in memory; None if earlier tokens are read again instead.

    They are the weights of the layers and of the softmax, whose tails are read only where they can matter, and all keys and
    values of all rows.
    """
    if decoder.kept is None:
        return None
    reader, memory = decoder.kept.reader, decoder.kept.memory
    head = itertools.islice(reader.softmax.clusters, 1)
    return sum(x.nbytes for x in itertools.chain(_tensors(reader.layers), _tensors(head), memory.keys, memory.values))


def _tensors(parts: object) -> Iterator[Tensor]:
    if isinstance(parts, Tensor):
        yield parts
    elif isinstance(parts, Iterable) and not isinstance(parts, str):
        for part in parts:
            yield from _tensors(part)


def decoding_table(figures: Sequence[Figures]) -> str:
    """Return a table of each decoder's speed."""
    rows = [["precision", "code", "rows", "ready s", "ms/step", "min–max", "tokens/s", "MB/step", "limit ms", "time/limit"]]
    for entry in figures:
        step = entry["step_seconds"]
        rows.append(
            [
                entry["precision"],
                "compiled" if entry["compiled"] else "eager",
                str(entry["rows"]),
                f"{entry['ready_seconds']:.1f}",
                _digits(step["median"], 1e-3),
                f"{_digits(step['min'], 1e-3)}–{_digits(step['max'], 1e-3)}",
                _digits(entry["tokens_per_second"]),
                _digits(entry["bytes_per_step"], 1e6),
                _digits(entry["limit_seconds"], 1e-3),
                _digits(entry["time_over_limit"]),
            ]
        )
    note = "A step is one token of each row. MB/step: weights, keys and values that it reads; limit: the time this takes."
    return f"{table(rows, n_left=2)}\n{note}"


def _digits(value: float | None, unit: float = 1.0) -> str:
    """Return a figure in the unit with at least three digits, or a dash."""
    if value is None:
        return "-"
    value /= unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
