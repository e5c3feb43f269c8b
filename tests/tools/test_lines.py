"""Lines can be told apart without color, and all that the legend names is there."""

from pathlib import Path
from typing import Any

import pytest

from transformer_xl.pictures import Look
from transformer_xl.tools.lines import PlotLine, draw


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
