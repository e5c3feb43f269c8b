"""Pictures are written whole, with any names on them, and lines can be told apart without color."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from transformer_xl.errors import ConfigError
from transformer_xl.pictures import Look, PlotLine, check_picture, draw, new_figure, save_picture


def test_dollar_signs_in_names_are_no_formulas(tmp_path: Path) -> None:
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot([1, 2], [1, 1000], label=r"runs/a$\b$c")
    axes.set(yscale="log", title=r"runs/a$\b$c", xlabel=r"$\b$")
    axes.legend()
    figure.suptitle(r"$\b$")
    figure.legend(*axes.get_legend_handles_labels())
    written = save_picture(figure, tmp_path / "loss.svg").read_text()
    assert r"<!-- runs/a$\b$c -->" in written
    assert r"<!-- $\mathdefault{10^{1}}$ -->" in written  # numbers at axes are formulas still
    assert [path.name for path in tmp_path.iterdir()] == ["loss.svg"]


def test_a_picture_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for path, complaint in ((tmp_path / "a.txt", "must end in"), (tmp_path / "no" / "a.png", "is not there")):
        with pytest.raises(ConfigError, match=complaint):
            check_picture(path)


def test_a_picture_without_room_is_drawn_without_a_word(tmp_path: Path) -> None:
    """Warnings are errors here."""
    figure = new_figure(width=0.2, height=0.2)
    figure.subplots().set_title("a title that leaves no room at all " * 9, fontsize=40)
    assert save_picture(figure, tmp_path / "small.png").exists()


def test_fonts_with_chinese_characters_are_asked_after_the_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.pictures._WIDE_FONTS", ("No Such Font", "DejaVu Serif"))
    figure = new_figure()
    text = figure.add_subplot().set_title("\u597d", family="monospace")
    save_picture(figure, tmp_path / "a.png")
    assert text.get_fontfamily() == ["monospace", "DejaVu Serif"]


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


def test_first_losses_take_half_of_an_axis_at_most_and_the_legend_says_what_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Figure] = []
    monkeypatch.setattr("transformer_xl.pictures.save_picture", lambda figure, path: made.append(figure) or path)

    def drawn(*losses: Sequence[float], **more: Any) -> tuple[list[str], float, float]:
        lines = [PlotLine(f"{i}", f"{i}", range(1, len(y) + 1), y) for i, y in enumerate(losses)]
        draw(lines, tmp_path / "p.png", title="", xlabel="", ylabel="", **{"from_zero": True, **more})
        (axes,), (legend,) = made[-1].axes, made[-1].legends
        return [text.get_text() for text in legend.get_texts()], *axes.get_ylim()

    falling = [5.0, 2.0, 1.5, 1.25, 1.0]
    names, bottom, top = drawn(falling, [2.5, 1.5])  # a line of two points is drawn whole
    assert names == ["0 (first losses, up to 5.000, lie above)", "1"]
    assert bottom < 1 and 2.5 < top < 2.6
    many = [9.0 - i for i in range(4)] + [3.0 - i / 40 for i in range(36)]  # a tenth of the line lies high
    names, bottom, top = drawn(many)
    assert names == ["0 (first losses, up to 9.000, lie above)"] and bottom < 2.125 and 3 < top < 3.1
    for whole in ([5.0, 1.5, 1.0], [2.0, 1.75, 1.5, 1.0], [5.0, 4.0, 3.0, 8.0], [1.0] * 5, [5.0, 1.0, 1.0, 1.0]):
        names, bottom, top = drawn(whole)
        assert names == ["0"] and bottom < min(whole) and top > max(whole)
    names, _, top = drawn(falling, from_zero=False)  # no losses of a training
    assert names == ["0"] and top > 5
