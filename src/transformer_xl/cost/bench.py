"""`txl bench decode|eval`: time a step of `Decoder`, and `evaluate`, as users call them, in one mode after another.

Shapes: B rows, T tokens.
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from transformer_xl.console import Bar, say
from transformer_xl.cost.decoding import count_bytes
from transformer_xl.cost.display import Figures, mode_name
from transformer_xl.cost.hardware import Clock
from transformer_xl.cost.operations import flops_per_token
from transformer_xl.errors import ConfigError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.kernels.device import InferencePrecision, cannot_compile
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.room import check_room
from transformer_xl.reading.evaluation import evaluate

DecoderMode = tuple[InferencePrecision, bool, int]
"""Precision, whether code is compiled, rows."""

ScoringMode = tuple[InferencePrecision, int, int]
"""Precision, batch_size, tgt_len."""

_N_WARM_UP = 3
"""Steps, and segments, that are not timed: allocators and caches settle in them."""


@dataclass
class Findings:
    """The figures so far, and what could not be measured and why."""

    figures: list[Figures] = field(default_factory=list)  # one entry per mode
    skipped: dict[str, str] = field(default_factory=dict)  # reasons by mode
    interrupted: bool = False  # before all was measured

    @contextlib.contextmanager
    def skipping(self, what: str) -> Iterator[None]:
        """Note why the model cannot do something, and leave it out."""
        try:
            yield
        except ConfigError as error:
            self.skipped[what] = str(error)

    @contextlib.contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """End early on Ctrl-C if there are figures to show."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.figures:
                raise
            self.interrupted = True
        if not self.figures:
            raise ConfigError(f"nothing could be measured: {next(iter(self.skipped.values()))}")


def bench_decoders(
    found: Findings,
    model: LanguageModel,
    ids: np.ndarray,
    modes: Sequence[DecoderMode],
    *,
    n_token: int,
    bandwidth: float,
    bar: Bar,
) -> None:
    """Enter the figures of a decoder in each mode; see `measure_decoding`."""
    n_compiled = sum(compile for _, compile, _ in modes)
    no_compiler = cannot_compile(model.device) if n_compiled else None
    if n_compiled and not no_compiler:
        say(f"{n_compiled} of {len(modes)} measurements compile first, about half a minute each; --no-compile leaves them out")
    for precision, compile, n_row in modes:
        what = mode_name({"precision": precision, "compiled": compile, "rows": n_row})
        bar.next(what)
        if compile and no_compiler:
            found.skipped["compiled"] = no_compiler
            continue
        with found.skipping(what):
            figures = measure_decoding(
                model, ids, precision=precision, compile=compile, n_row=n_row, n_token=n_token, bandwidth=bandwidth
            )
            found.figures.append(figures)


def bench_scoring(
    found: Findings,
    model: LanguageModel,
    ids: np.ndarray,
    modes: Sequence[ScoringMode],
    *,
    n_token: int,
    rates: Mapping[InferencePrecision, float],
    bar: Bar,
) -> None:
    """Enter the figures of `evaluate` in each mode; see `measure_scoring`.

    `rates` of large matrix products, by precision, are in operations per second.
    """
    for precision, size, length in modes:
        bar.next(f"{precision}, tgt_len {length}, batch_size {size}")
        with found.skipping(f"{precision} with tgt_len {length}"):
            rate = rates[precision]
            figures = measure_scoring(
                model, ids, tgt_len=length, batch_size=size, precision=precision, n_token=n_token, rate=rate
            )
            found.figures.append(figures)


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
    the limit. What depends on kept keys is None if the decoder keeps none.
    """
    begin = clock()
    decoder = Decoder(model, batch_size=n_row, precision=precision, compile=compile)
    n_fill = decoder.kept.memory.n_slot if decoder.kept else decoder.mem_len + decoder.tgt_len
    text_BT = torch.from_numpy(np.resize(ids, (n_row, n_fill + _N_WARM_UP + n_token)).astype(np.int64))
    decoder.step(text_BT[:, 0]).top(1)
    ready = clock() - begin
    decoder.reset()

    decoder.feed(text_BT[:, :n_fill])
    for tokens_B in text_BT[:, n_fill : n_fill + _N_WARM_UP].unbind(1):
        decoder.step(tokens_B).top(1)
    counted = count_bytes(decoder)
    seconds, tails = [], [0] * len(counted.tails if counted else ())
    for tokens_B in text_BT[:, n_fill + _N_WARM_UP :].unbind(1):
        begin = clock()
        scores = decoder.step(tokens_B)
        scores.top(1)
        seconds.append(clock() - begin)
        for tail in {tail for tail, _ in scores.computed}:
            tails[tail] += 1
    n_bytes = counted and counted.of_step(n_row, [n / n_token for n in tails])
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
        "held_bytes": counted and counted.held,
    }


class _EnoughError(Exception):
    """Ends an evaluation that was measured long enough."""


def measure_scoring(
    model: LanguageModel,
    ids: np.ndarray,
    *,
    tgt_len: int,
    batch_size: int = 1,
    precision: InferencePrecision = "fp32",
    n_token: int = 2000,
    rate: float = 1e9,
    clock: Clock = time.perf_counter,
) -> Figures:
    """Time the first segments of `evaluate` after lanes are warmed up, and stop it then.

    Memory need not be full, because shapes are constant: a segment costs the same. The text `ids` (N,) is repeated if it is too
    short; three segments are timed in any case. Large matrix products at `rate` operations per second set the limit.
    """
    n_step = max(3, math.ceil(n_token / (tgt_len * batch_size)))
    length = max(model.reach(tgt_len), (_N_WARM_UP + n_step + 1) * tgt_len)
    check_room(
        8 * batch_size * length,
        None,
        f"a text that fills mem_len {model.mem_len:,} with tgt_len {tgt_len:,} and batch_size {batch_size:,}",
    )
    text = np.resize(ids, batch_size * length + 1)
    stamps, counts = [], []

    def stamp(n: int) -> None:
        stamps.append(clock())
        counts.append(n)
        if len(stamps) == _N_WARM_UP + n_step:
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        evaluate(model, text, tgt_len=tgt_len, batch_size=batch_size, precision=precision, on_tokens=stamp)
    seconds = statistics.median(end - begin for begin, end in itertools.pairwise(stamps[_N_WARM_UP - 1 :]))
    flops = flops_per_token(model, ids, tgt_len=tgt_len)
    return {
        "precision": precision,
        "tgt_len": tgt_len,
        "batch_size": counts[-1] // tgt_len,  # lanes that were read side by side
        "tokens_per_second": counts[-1] / seconds,  # of all lanes together
        "flops_per_token": flops,
        "limit_tokens_per_second": rate / flops,
        "reached": counts[-1] / seconds * flops / rate,
    }
