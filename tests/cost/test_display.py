"""Tables."""

from pathlib import Path

from transformer_xl.config.recipes import load_recipe
from transformer_xl.cost.display import decoding_table, plan_table, scoring_table
from transformer_xl.cost.hardware import gpu
from transformer_xl.cost.plan import make_plan


def test_table_of_decoders() -> None:
    first = {"precision": "int8", "compiled": True, "rows": 4, "ready_seconds": 1.5, "tokens_per_second": 200.0}
    first |= {"step_seconds": {"median": 0.02, "min": 0.01, "max": 0.04}, "bytes_per_step": 5e6, "limit_seconds": 0.005}
    first |= {"time_over_limit": 4.0, "held_bytes": {"total": 41e6}}
    second = first | {"precision": "fp32", "compiled": False, "rows": 1, "ready_seconds": 0.04, "tokens_per_second": 2.0}
    second |= {"step_seconds": {"median": 0.5, "min": 0.5, "max": 0.5}, "bytes_per_step": None, "limit_seconds": None}
    second |= {"time_over_limit": None, "held_bytes": None}
    lines = decoding_table([first, second]).splitlines()
    assert lines[0].split("  ")[0] == "precision"
    expected = ["int8", "compiled", "4", "1.5", "20.0", "10.0–40.0", "200", "5.00", "5.00", "4.00", "41.0"]
    assert lines[1].split() == expected
    assert lines[2].split() == ["fp32", "eager", "1", "0.0", "500", "500–500", "2.00", *"----"]
    assert max(map(len, lines)) <= 120


def test_table_of_scoring() -> None:
    figures = {"precision": "bf16", "tgt_len": 32, "batch_size": 8, "tokens_per_second": 512.0, "flops_per_token": 1e6}
    lines = scoring_table([figures | {"limit_tokens_per_second": 2000.0, "reached": 0.256}]).splitlines()
    assert lines[1].split() == ["bf16", "32", "8", "512", "1.00", "2,000", "26%"]


def test_the_documentation_shows_this_plan() -> None:
    figures = plan_table(make_plan(load_recipe("scale-1b"), gpu("h100", "auto"), gpus=64)).partition("\n\n")[0]
    assert figures in (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
