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
from typing import Any

import numpy as np
import torch

from transformer_xl.console import Bar, say
from transformer_xl.cost.decoding import SessionBytes, bytes_per_token, session_bytes, slots_per_row
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

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return vars(self)


@dataclass(frozen=True)
class Decoding:
    """How fast a decoder with full memory reads one token of each row and finds the likeliest next one."""

    n_row: int
    ready: float  # seconds until the first token was read: weights prepared, memory allocated, code compiled if asked for
    seconds: tuple[float, ...]  # of each step
    n_bytes: float | None  # that a step reads; None if the decoder keeps no keys
    session: SessionBytes | None  # what the decoder holds, by count; None if it keeps no keys

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows together."""
        return self.n_row / self.median


@dataclass(frozen=True)
class Scoring:
    """How fast `evaluate` scores, once it is under way."""

    n_row: int  # lanes read side by side
    tgt_len: int  # tokens per segment
    seconds: tuple[float, ...]  # of each step, which is a segment of every lane

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all lanes together."""
        return self.n_row * self.tgt_len / statistics.median(self.seconds)


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
    """Enter the figures of a decoder in each mode; see `measure_decoding`. `bandwidth` of memory is in bytes per second."""
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
            measured = measure_decoding(model, ids, precision=precision, compile=compile, n_row=n_row, n_token=n_token)
            found.figures.append(decoding_figures(measured, precision=precision, compiled=compile, bandwidth=bandwidth))


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
            measured = measure_scoring(model, ids, tgt_len=length, batch_size=size, precision=precision, n_token=n_token)
            flops = flops_per_token(model, ids, tgt_len=length)
            found.figures.append(
                scoring_figures(measured, precision=precision, flops_per_token=flops, matmul_rate=rates[precision])
            )


def measure_decoding(
    model: LanguageModel,
    ids: np.ndarray,
    *,
    precision: InferencePrecision = "fp32",
    compile: bool = False,
    n_row: int = 1,
    n_token: int = 100,
    clock: Clock = time.perf_counter,
) -> Decoding:
    """Make a decoder of B rows, fill its memory with the text `ids` (N,), repeated if too short, and time how it reads on."""
    begin = clock()
    decoder = Decoder(model, batch_size=n_row, precision=precision, compile=compile)
    n_fill = slots_per_row(decoder)
    text_BT = torch.from_numpy(np.resize(ids, (n_row, n_fill + _N_WARM_UP + n_token)).astype(np.int64))
    decoder.step(text_BT[:, 0]).top(1)
    ready = clock() - begin
    decoder.reset()

    decoder.feed(text_BT[:, :n_fill])
    for tokens_B in text_BT[:, n_fill : n_fill + _N_WARM_UP].unbind(1):
        decoder.step(tokens_B).top(1)
    counted = bytes_per_token(decoder)
    seconds, tails = [], [0] * len(counted.tails if counted else ())
    for tokens_B in text_BT[:, n_fill + _N_WARM_UP :].unbind(1):
        begin = clock()
        scores = decoder.step(tokens_B)
        scores.top(1)
        seconds.append(clock() - begin)
        for tail in {tail for tail, _ in scores.computed}:
            tails[tail] += 1
    n_bytes = counted and counted.of_step(n_row, [n / n_token for n in tails])
    return Decoding(n_row, ready, tuple(seconds), n_bytes, session_bytes(decoder))


def decoding_figures(measured: Decoding, *, precision: str, compiled: bool, bandwidth: float) -> Figures:
    """Return a decoder's figures and the limit that reading memory at `bandwidth` bytes per second sets."""
    session = measured.session
    limit = None if measured.n_bytes is None else measured.n_bytes / bandwidth
    return {
        "precision": precision,
        "compiled": compiled,
        "rows": measured.n_row,
        "ready_seconds": measured.ready,
        "step_seconds": {"median": measured.median, "min": min(measured.seconds), "max": max(measured.seconds)},
        "tokens_per_second": measured.tokens_per_second,
        "bytes_per_step": measured.n_bytes,
        "limit_seconds": limit,
        "time_over_limit": None if limit is None else measured.median / limit,
        "held_bytes": session and {"total": session.total, **vars(session)},
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
    clock: Clock = time.perf_counter,
) -> Scoring:
    """Time the first segments of `evaluate` after lanes are warmed up, and stop it then.

    Memory need not be full, because shapes are constant: a segment costs the same. The text `ids` (N,) is repeated if it is too
    short; three segments are timed in any case.
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
    timed = stamps[_N_WARM_UP - 1 :]
    seconds = tuple(end - begin for begin, end in itertools.pairwise(timed))
    return Scoring(counts[-1] // tgt_len, tgt_len, seconds)


def scoring_figures(measured: Scoring, *, precision: str, flops_per_token: float, matmul_rate: float) -> Figures:
    """Return the figures of an evaluation and the limit that `matmul_rate`, in operations per second, sets."""
    limit = matmul_rate / flops_per_token
    return {
        "precision": precision,
        "tgt_len": measured.tgt_len,
        "batch_size": measured.n_row,
        "tokens_per_second": measured.tokens_per_second,
        "flops_per_token": flops_per_token,
        "limit_tokens_per_second": limit,
        "reached": measured.tokens_per_second / limit,
    }
