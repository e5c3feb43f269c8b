"""Lines can be told apart without color, and all that the legend names is there."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.test_pictures import CONFIG, TRAINING, VALIDATION
from transformer_xl.pictures import Look
from transformer_xl.tools.lines import PlotLine, draw
from transformer_xl.training.pictures import curves_of, draw_curve


def test_no_two_lines_look_alike_in_gray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("transformer_xl.pictures.save_picture", lambda figure, path: figures.append(figure) or path)
    x, looks = list(range(100)), tuple[Look, ...](("thin", "marked", "marked", "dashed", "dashed", "level"))
    lines = [
        PlotLine(run, f"{run} {i}", [0] if look == "level" else x, [1.0] if look == "level" else x, look=look)
        for run in "abcdefgh"
        for i, look in enumerate(looks)
    ]
    draw([*lines, PlotLine("i", "i", [7], [1.0], trained=7)], tmp_path / "a.png", title="", xlabel="", ylabel="")
    (axes,) = figures[0].axes
    drawn = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names == [line.get_label() for line in drawn] == [*(line.name for line in lines), "i", "length in training"]
    kinds = [
        (line.get_marker(), str(line.get_linestyle()), line.get_markerfacecolor() == "none", line.get_linewidth())
        for line in drawn[: len(lines)]
    ]
    assert len(set(kinds)) == len(kinds)
    assert all(line.get_markevery() == (3 * (i // len(looks)) % 7, 7) for i, line in enumerate(drawn[:48]) if i % 6 < 5)


def test_one_run_looks_as_in_its_loss_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("transformer_xl.pictures.save_picture", lambda figure, path: figures.append(figure) or path)
    entries = [*TRAINING, *({**each, "average_loss": 1.0} for each in VALIDATION)]
    draw_curve(entries, CONFIG, tmp_path / "loss.png")
    curves = curves_of(entries, CONFIG)
    assert [curve.look for curve in curves] == ["thin", "marked", "dashed"]
    lines = [
        PlotLine("a", curve.title(), range(len(curve.points)), [y for _, y in curve.points], look=curve.look)
        for curve in curves
    ]
    draw(lines, tmp_path / "plot.png", title="", xlabel="", ylabel="", from_zero=True)
    own, compared = (
        [
            (
                line.get_label(),
                line.get_color(),
                line.get_marker(),
                line.get_linestyle(),
                line.get_linewidth(),
                line.get_alpha(),
            )
            for line in figure.axes[0].get_lines()
        ]
        for figure in figures
    )
    assert own == compared
    assert [figure.get_size_inches().tolist() for figure in figures] == [figures[0].get_size_inches().tolist()] * 2
    assert figures[1].axes[0].get_xlim()[0] == 0
