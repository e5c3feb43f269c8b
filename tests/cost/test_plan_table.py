"""The plan that a person reads."""

from pathlib import Path

from transformer_xl.config import load_recipe
from transformer_xl.cost.hardware import gpu
from transformer_xl.cost.plan import make_plan
from transformer_xl.cost.plan_table import plan_table


def test_the_documentation_shows_this_plan() -> None:
    figures = plan_table(make_plan(load_recipe("scale-1b"), gpu("h100", "auto"), gpus=64)).partition("\n\n")[0]
    assert figures in (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
