"""Tables."""

from pathlib import Path

from tests.cost.test_bench import DECODING
from transformer_xl.config.recipes import load_recipe
from transformer_xl.cost.bench import Decoding, Scoring, decoding_figures, scoring_figures
from transformer_xl.cost.display import (
    Figures,
    decoding_table,
    plan_table,
    scoring_table,
)
from transformer_xl.cost.hardware import gpu
from transformer_xl.cost.plan import make_plan

UNKNOWN = Decoding(1, 0.04, (0.5,), None, None)


def figures() -> list[Figures]:
    return [
        decoding_figures(DECODING, precision="int8", compiled=True, bandwidth=1e9),
        decoding_figures(UNKNOWN, precision="fp32", compiled=False, bandwidth=1e9),
    ]


def test_table_of_decoders() -> None:
    first, second = figures()
    first |= {"held_bytes": {"total": 41e6}}
    lines = decoding_table([first, second]).splitlines()
    assert lines[0].split("  ")[0] == "precision"
    expected = ["int8", "compiled", "4", "1.5", "20.0", "10.0–40.0", "200", "5.00", "5.00", "4.00", "41.0"]
    assert lines[1].split() == expected
    assert lines[2].split() == ["fp32", "eager", "1", "0.0", "500", "500–500", "2.00", *"----"]
    assert max(map(len, lines)) <= 120


def test_table_of_scoring() -> None:
    measured = Scoring(n_row=8, tgt_len=32, seconds=(0.5,))
    lines = scoring_table([scoring_figures(measured, precision="bf16", flops_per_token=1e6, matmul_rate=2e9)]).splitlines()
    assert lines[1].split() == ["bf16", "32", "8", "512", "1.00", "2,000", "26%"]


def test_the_documentation_shows_this_plan() -> None:
    figures = plan_table(make_plan(load_recipe("scale-1b"), gpu("h100", "auto"), gpus=64)).partition("\n\n")[0]
    assert figures in (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
