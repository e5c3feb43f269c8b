"""Measure decoding and scoring as users call them: a step of `Decoder`, and `evaluate`.

Shapes: B rows, T tokens.
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from transformer_xl.cost.decoding import SessionBytes, bytes_per_token, session_bytes, slots_per_row
from transformer_xl.cost.machine import Clock, MemoryWatch
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import InferencePrecision
from transformer_xl.reading.evaluation import evaluate

_N_WARM_UP = 3
"""Steps, and segments, that are not timed: allocators and caches settle in them."""

Report = Callable[[str], object]
"""Told in a few words what is going on."""


@dataclass(frozen=True)
class Decoding:
    """How fast a decoder whose memory is full reads one token of each row and finds the likeliest next one."""

    n_row: int
    ready: float  # seconds until a first token was read: weights made ready, memory allotted, and compiled if at all
    seconds: tuple[float, ...]  # of each step
    n_bytes: float | None  # what a step reads; None where tokens are read again
    session: SessionBytes | None  # what the decoder holds by count; None where it keeps no keys
    resident: int | None  # bytes that it really holds; None where the system does not tell
    peak: int | None  # the most that it held while it was made and used

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


def measure_decoding(
    model: LanguageModel,
    ids: np.ndarray,
    *,
    precision: InferencePrecision = "fp32",
    compile: bool = False,
    n_row: int = 1,
    n_token: int = 100,
    clock: Clock = time.perf_counter,
    report: Report = lambda _: None,
) -> Decoding:
    """Make a decoder, fill its memory by reading, and time how it reads on.

    Args:
        model: with the memory that it is to read with.
        ids: integers (N,), what is read, over again if need be.
        precision: of the decoder.
        compile: whether it compiles.
        n_row: B.
        n_token: how many steps are timed.
        clock: for tests.
        report: told what is going on.

    Returns:
        What was measured.
    """
    report("getting ready")
    for parameter in model.parameters():
        parameter.sum()  # weights mapped from a file are read at first use, and would seem to be the decoder's
    with MemoryWatch(model.device) as watch:
        begin = clock()
        decoder = Decoder(model, batch_size=n_row, precision=precision, compile=compile)
        n_fill = slots_per_row(decoder)
        text_BT = torch.from_numpy(np.resize(ids, (n_row, n_fill + _N_WARM_UP + n_token)).astype(np.int64))
        decoder.step(text_BT[:, 0]).top(1)
        ready = clock() - begin
        decoder.reset()

        report(f"reading {n_fill:,} tokens into memory")
        decoder.feed(text_BT[:, :n_fill])
        for tokens_B in text_BT[:, n_fill : n_fill + _N_WARM_UP].unbind(1):
            decoder.step(tokens_B).top(1)
        counted = bytes_per_token(decoder)
        seconds, tails = [], [0] * len(counted.tails if counted else ())
        for i, tokens_B in enumerate(text_BT[:, n_fill + _N_WARM_UP :].unbind(1), start=1):
            begin = clock()
            scores = decoder.step(tokens_B)
            scores.top(1)
            seconds.append(clock() - begin)
            for tail in {tail for tail, _ in scores.computed}:
                tails[tail] += 1
            report(f"{i} of {n_token} steps")
        n_bytes = counted and counted.of_step(n_row, [n / n_token for n in tails])
        return Decoding(n_row, ready, tuple(seconds), n_bytes, session_bytes(decoder), watch.resident, watch.peak)


def measure_scoring(
    model: LanguageModel,
    ids: np.ndarray,
    *,
    tgt_len: int,
    batch_size: int = 1,
    precision: InferencePrecision = "fp32",
    n_token: int = 2000,
    clock: Clock = time.perf_counter,
    report: Report = lambda _: None,
) -> Scoring:
    """Time `evaluate` from its first segments on, when lanes are warmed up; it is stopped when enough is measured.

    A segment costs the same whether memory is full or not, because shapes are constant.

    Args:
        model: with the memory that it is to read with.
        ids: integers (N,), what is scored, over again if need be.
        tgt_len: tokens per segment.
        batch_size: lanes read side by side.
        precision: of the matrix products.
        n_token: how many tokens are timed, at least; three segments are in any case.
        clock: for tests.
        report: told what is going on.

    Returns:
        What was measured.
    """
    n_step = max(3, math.ceil(n_token / (tgt_len * batch_size)))
    reach = model.config.n_layer * math.ceil(model.mem_len / tgt_len) * tgt_len  # what a lane must be longer than
    length = max(reach, (_N_WARM_UP + n_step + 1) * tgt_len)
    text = np.resize(ids, batch_size * length + 1)
    stamps, counts = [], []

    def stamp(n: int) -> None:
        stamps.append(clock())
        counts.append(n)
        report(f"{min(max(len(stamps) - _N_WARM_UP, 0), n_step)} of {n_step} steps")
        if len(stamps) == _N_WARM_UP + n_step:
            raise _EnoughError

    report("getting ready")
    with contextlib.suppress(_EnoughError):
        evaluate(model, text, tgt_len=tgt_len, batch_size=batch_size, precision=precision, on_tokens=stamp)
    timed = stamps[_N_WARM_UP - 1 :]
    seconds = tuple(end - begin for begin, end in itertools.pairwise(timed))
    return Scoring(counts[-1] // tgt_len, tgt_len, seconds)


class _EnoughError(Exception):
    """Ends an evaluation that was measured long enough."""
