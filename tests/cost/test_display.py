"""Tables and pictures."""

from pathlib import Path

from tests.cost.test_bench import DECODING
from transformer_xl.config.recipes import load_recipe
from transformer_xl.cost.bench import Decoding, Scoring, decoding_figures, scoring_figures
from transformer_xl.cost.display import (
    Figures,
    decoding_tables,
    draw_decoding,
    loss_table,
    plan_table,
    scoring_table,
)
from transformer_xl.cost.hardware import gpu
from transformer_xl.cost.plan import make_plan

UNKNOWN = Decoding(1, 0.04, (0.5,), None, None, None, None)


def figures() -> list[Figures]:
    return [
        decoding_figures(DECODING, precision="int8", compiled=True, bandwidth=1e9),
        decoding_figures(UNKNOWN, precision="fp32", compiled=False, bandwidth=1e9),
    ]


def test_table_of_speeds_and_of_memory() -> None:
    first, second = figures()
    first |= {"of_one_row": 3.5, "resident_bytes": 41e6, "peak_bytes": 1e9}
    lines = decoding_tables([first, second]).splitlines()
    assert lines[0].split("  ")[0] == "precision"
    assert lines[1].split() == ["int8", "compiled", "4", "1.5", "20.0", "10.0–40.0", "200", "3.50", "5.00", "5.00", "4.00"]
    assert lines[2].split() == ["fp32", "eager", "1", "0.0", "500", "500–500", "2.00", "-", "-", "-", "-"]
    assert max(map(len, lines)) <= 110
    assert [line.split() for line in lines[-2:]] == [
        ["int8", "compiled", "4", "41.0", "1,000", "0.00", "0.00", "0.00", "0.00"],
        ["fp32", "eager", "1", *"------"],
    ]


def test_table_of_losses() -> None:
    losses = [
        {"precision": "fp32", "tokens": 1200, "loss": 1.25, "difference": 0.0},
        {"precision": "bf16", "tokens": 1200, "loss": 1.25, "difference": -0.00001},
        {"precision": "int8", "tokens": 1200, "loss": 1.24, "difference": -0.01},
    ]
    lines = loss_table(losses).splitlines()
    assert lines[0] == "loss on 1,200 tokens"
    assert [line.split() for line in lines[2:]] == [
        ["fp32", "1.2500", "+0.0000"],
        ["bf16", "1.2500", "+0.0000"],
        ["int8", "1.2400", "-0.0100"],
    ]


def test_table_of_scoring() -> None:
    measured = Scoring(n_row=8, tgt_len=32, seconds=(0.5,))
    lines = scoring_table([scoring_figures(measured, precision="bf16", flops_per_token=1e6, matmul_rate=2e9)]).splitlines()
    assert lines[1].split() == ["bf16", "32", "8", "512", "1.00", "2,000", "26%"]


def test_picture(tmp_path: Path) -> None:
    for name, magic in (("speed.png", b"\x89PNG"), ("speed.svg", b"<?xml")):
        draw_decoding(tmp_path / name, figures(), title="a run", machine="a machine")
        assert (tmp_path / name).read_bytes().startswith(magic)
    text = (tmp_path / "speed.svg").read_text()
    for shown in ("int8 compiled, 4 rows", "fp32 eager", "a run", "a machine", "limit"):
        assert f"<!-- {shown}" in text
    draw_decoding(tmp_path / "unlimited.svg", figures()[1:], title="a run", machine="a machine")
    assert "<!-- limit" not in (tmp_path / "unlimited.svg").read_text()


def test_the_documentation_shows_this_plan() -> None:
    figures = plan_table(make_plan(load_recipe("scale-1b"), gpu("h100", "auto"), gpus=64)).partition("\n\n")[0]
    assert figures in (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
