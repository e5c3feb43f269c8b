"""The figures of measurements as JSON has them: plain numbers in seconds, bytes and operations, None where nothing is known."""

import statistics
from collections.abc import Sequence
from typing import Any

from transformer_xl.speed.measure import Decoding, Scoring
from transformer_xl.speed.needs import flops_per_token
from transformer_xl.speed.rereading import PUBLISHED, Race, Sides, with_length

Figures = dict[str, Any]


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
    counted = session and {
        "total": session.total,
        "memory": session.memory,
        "positions": session.positions,
        "weights": session.weights,
    }
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
        "counted_bytes": counted,
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


def rereading_figures(race: Race, sides: Sides) -> Figures:
    """Return the figures of both sides at one attention length, with the operations that a token takes each of them.

    Args:
        race: what was measured, a round at least.
        sides: the two models, and the text whose words say how often the tails of an adaptive softmax are needed.
    """
    stride, length, ids = sides.stride, race.length, sides.text
    vanilla_flops = flops_per_token(sides.vanilla.with_context(ext_len=length - 1), ids, tgt_len=1)
    our_flops = flops_per_token(with_length(sides.ours, length), ids, tgt_len=sides.tgt_len)
    figures: Figures = {
        "length": length,
        "rounds": len(race.ours),
        "vanilla_seconds": _spread(race.vanilla),
        "our_seconds": _spread(race.ours),
        "slowdown": _spread(race.slowdowns),
        "published_slowdown": PUBLISHED.get(length),
        "vanilla_flops": vanilla_flops,
        "our_flops": our_flops,
        "flops_ratio": vanilla_flops / our_flops,
    }
    if stride:
        flops = flops_per_token(sides.vanilla.with_context(ext_len=length - stride), ids, tgt_len=stride)
        figures["stride"] = {
            "tokens": stride,
            "vanilla_seconds": _spread(race.strided),
            "slowdown": _spread(race.strided_slowdowns),
            "flops_ratio": flops / our_flops,
        }
    return figures


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
