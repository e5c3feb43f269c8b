"""The arithmetic between what was measured and what is shown."""

import json

import pytest

from transformer_xl.cost.bench import compare_with_one_row, decoding_figures, scoring_figures
from transformer_xl.cost.decoding import SessionBytes
from transformer_xl.cost.measure import Decoding, Scoring

DECODING = Decoding(
    n_row=4,
    ready=1.5,
    seconds=(0.02, 0.01, 0.04, 0.02, 0.03),
    n_bytes=5e6,
    session=SessionBytes(memory=300, positions=20, weights=1),
    resident=400,
    peak=500,
)


def test_figures_of_a_decoder() -> None:
    figures = decoding_figures(DECODING, precision="int8", compiled=True, bandwidth=1e9)
    assert figures == {
        "precision": "int8",
        "compiled": True,
        "rows": 4,
        "ready_seconds": 1.5,
        "step_seconds": {"median": 0.02, "min": 0.01, "max": 0.04},
        "tokens_per_second": 200.0,
        "of_one_row": None,
        "bytes_per_step": 5e6,
        "limit_seconds": 0.005,
        "time_over_limit": pytest.approx(4.0),
        "resident_bytes": 400,
        "peak_bytes": 500,
        "counted_bytes": {"total": 321, "memory": 300, "positions": 20, "weights": 1},
    }
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_what_is_not_known_is_none() -> None:
    measured = Decoding(1, 0.1, (0.5,), None, None, None, None)
    figures = decoding_figures(measured, precision="fp32", compiled=False, bandwidth=1e9)
    unknown = {
        "of_one_row",
        "bytes_per_step",
        "limit_seconds",
        "time_over_limit",
        "resident_bytes",
        "peak_bytes",
        "counted_bytes",
    }
    assert {name for name, value in figures.items() if value is None} == unknown


def test_rows_are_compared_with_one_row_of_the_same_mode() -> None:
    def entry(precision: str, compiled: bool, rows: int, speed: float) -> dict[str, object]:
        return {"precision": precision, "compiled": compiled, "rows": rows, "tokens_per_second": speed}

    figures = [entry("fp32", False, 4, 30.0), entry("fp32", False, 1, 10.0), entry("fp32", True, 1, 40.0)]
    figures += [entry("fp32", True, 16, 50.0), entry("int8", False, 4, 9.0)]
    compare_with_one_row(figures)
    assert [figure["of_one_row"] for figure in figures] == [3.0, 1.0, 1.0, 1.25, None]


def test_figures_of_an_evaluation() -> None:
    measured = Scoring(n_row=8, tgt_len=32, seconds=(0.5, 0.25, 1.0))
    figures = scoring_figures(measured, precision="bf16", flops_per_token=1e6, matmul_rate=2e9)
    assert figures == {
        "precision": "bf16",
        "tgt_len": 32,
        "batch_size": 8,
        "tokens_per_second": 512.0,
        "flops_per_token": 1e6,
        "limit_tokens_per_second": 2000.0,
        "reached": 0.256,
    }
