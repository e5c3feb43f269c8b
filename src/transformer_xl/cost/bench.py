"""What `txl bench decode|eval` finds out: the modes of a model are measured one after another, as long as it is let.

Figures are plain numbers in seconds, bytes and operations, as JSON has them; None where nothing is known.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from transformer_xl.console import Bar
from transformer_xl.cost import measure
from transformer_xl.cost.measure import Decoding, Scoring
from transformer_xl.cost.operations import flops_per_token
from transformer_xl.errors import ConfigError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import InferencePrecision, cannot_compile
from transformer_xl.reading.evaluation import evaluate

Figures = dict[str, Any]

DecoderMode = tuple[InferencePrecision, bool, int]
"""Precision, whether code is compiled, rows."""

ScoringMode = tuple[InferencePrecision, int, int]
"""Precision, batch_size, tgt_len."""


@dataclass
class Findings:
    """What was measured so far, and what could not be and why."""

    figures: list[Figures] = field(default_factory=list)  # of each mode
    losses: list[Figures] = field(default_factory=list)  # of each precision
    skipped: dict[str, str] = field(default_factory=dict)  # reasons by mode
    interrupted: bool = False  # it was ended before all was measured

    @contextlib.contextmanager
    def skipping(self, what: str) -> Iterator[None]:
        """Leave out what cannot work with this model."""
        try:
            yield
        except ConfigError as error:
            self.skipped[what] = str(error)

    @contextlib.contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """End early on Ctrl-C, if there is something to show; complain if there is nothing at the end.

        Raises:
            ConfigError: nothing could be measured.
        """
        try:
            yield
        except KeyboardInterrupt:
            if not self.figures:
                raise
            self.interrupted = True
        if not self.figures:
            raise ConfigError(f"nothing could be measured: {next(iter(self.skipped.values()))}")

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        losses = {"losses": self.losses} if self.losses else {}
        return {"figures": self.figures, **losses, "skipped": self.skipped, "interrupted": self.interrupted}


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
    """Measure decoders.

    Args:
        found: filled in.
        model: with the memory that it is to read with.
        ids: integers (N,), what is read.
        modes: one after another.
        n_token: steps that are timed.
        bandwidth: of the memory, bytes per second.
        bar: told what is being done.
    """
    no_compiler = cannot_compile(model.device) if any(compile for _, compile, _ in modes) else None
    for precision, compile, n_row in modes:
        what = mode_name({"precision": precision, "compiled": compile, "rows": n_row})
        bar.next(what)
        if compile and no_compiler:
            found.skipped["compiled"] = no_compiler
            continue
        with found.skipping(what):
            measured = measure.measure_decoding(
                model, ids, precision=precision, compile=compile, n_row=n_row, n_token=n_token, report=bar.note
            )
            found.figures.append(decoding_figures(measured, precision=precision, compiled=compile, bandwidth=bandwidth))


def bench_losses(found: Findings, model: LanguageModel, ids: np.ndarray, precisions: Sequence[InferencePrecision]) -> None:
    """Enter the loss of each precision, and how much more than that in fp32 it is."""
    for precision in cast("list[InferencePrecision]", list(dict.fromkeys(("fp32", *precisions)))):
        with found.skipping(f"loss in {precision}"):
            score = evaluate(model, ids, precision=precision)
            exact = found.losses[0]["loss"] if found.losses else score.loss
            found.losses.append(
                {"precision": precision, "tokens": score.tokens, "loss": score.loss, "difference": score.loss - exact}
            )


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
    """Measure evaluations.

    Args:
        found: filled in.
        model: with the memory that it is to read with.
        ids: integers (N,), what is scored.
        modes: one after another.
        n_token: tokens that are timed, at least.
        rates: of large matrix products, operations per second, by precision.
        bar: told what is being done.
    """
    for precision, size, length in modes:
        bar.next(f"{precision}, tgt_len {length}, batch_size {size}")
        with found.skipping(f"{precision} with tgt_len {length}"):
            measured = measure.measure_scoring(
                model, ids, tgt_len=length, batch_size=size, precision=precision, n_token=n_token, report=bar.note
            )
            flops = flops_per_token(model, ids, tgt_len=length)
            found.figures.append(
                scoring_figures(measured, precision=precision, flops_per_token=flops, matmul_rate=rates[precision])
            )


def decoding_figures(measured: Decoding, *, precision: str, compiled: bool, bandwidth: float) -> Figures:
    """Return the figures of a decoder beside what the machine's memory allows.

    Args:
        measured: what was measured.
        precision: in which.
        compiled: whether the code was.
        bandwidth: bytes per second.
    """
    session = measured.session
    limit = None if measured.n_bytes is None else measured.n_bytes / bandwidth
    return {
        "precision": precision,
        "compiled": compiled,
        "rows": measured.n_row,
        "ready_seconds": measured.ready,
        "step_seconds": {"median": measured.median, "min": min(measured.seconds), "max": max(measured.seconds)},
        "tokens_per_second": measured.tokens_per_second,
        "of_one_row": None,
        "bytes_per_step": measured.n_bytes,
        "limit_seconds": limit,
        "time_over_limit": None if limit is None else measured.median / limit,
        "resident_bytes": measured.resident,
        "peak_bytes": measured.peak,
        "counted_bytes": session and {"total": session.total, **vars(session)},
    }


def compare_with_one_row(measured: Sequence[Figures]) -> None:
    """Enter how many times as many tokens as one row alone all rows of the same mode read in the same time."""
    one = {(entry["precision"], entry["compiled"]): entry["tokens_per_second"] for entry in measured if entry["rows"] == 1}
    for entry in measured:
        single = one.get((entry["precision"], entry["compiled"]))
        entry["of_one_row"] = single and entry["tokens_per_second"] / single


def scoring_figures(measured: Scoring, *, precision: str, flops_per_token: float, matmul_rate: float) -> Figures:
    """Return the figures of an evaluation beside what the machine can multiply.

    Args:
        measured: what was measured.
        precision: in which.
        flops_per_token: operations that a token needs.
        matmul_rate: operations per second.
    """
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


def mode_name(figures: Figures) -> str:
    """Return a decoder's mode in words.

    Example:
        >>> mode_name({"precision": "int8", "compiled": True, "rows": 4})
        'int8 compiled, 4 rows'
    """
    rows = f", {figures['rows']} rows" if figures["rows"] > 1 else ""
    return f"{figures['precision']} {'compiled' if figures['compiled'] else 'eager'}{rows}"
