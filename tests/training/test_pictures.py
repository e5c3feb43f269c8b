"""The loss curve draws all that its legend names, and the legend says of what each number is; pictures of confusions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from transformer_xl.config.model import LstmConfig, TransformerXLConfig
from transformer_xl.config.run import RunConfig
from transformer_xl.training.pictures import Entry, curves_of, draw_confusion, draw_curve

CONFIG = RunConfig(model=TransformerXLConfig(mem_len=1600))
LSTM = RunConfig(model=LstmConfig())
EXTENT = {"scored": 2000, "split_tokens": 9000, "mem_len": 800}
WHOLE = EXTENT | {"scored": 9000}


def entry(kind: str, step: int, loss: float | None, **more: Any) -> Entry:
    return {"kind": kind, "step": step, "tokens": 100 * step, "loss": loss, **more}


TRAINING = [entry("train", step, 5 - step / 10) for step in range(1, 9)]
VALIDATION = [entry("valid", step, 5 - step / 20, **EXTENT) for step in (4, 8)]
END = entry("final", 8, 4.25, loss_without_memory=4.75, average_loss=4.0, **WHOLE)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The pictures that were made."""
    made: list[Figure] = []
    monkeypatch.setattr("transformer_xl.pictures.save_picture", lambda figure, path: made.append(figure) or path)
    return made


def numbers(values: Any) -> list[float]:
    return [float(value) for value in values]


def drawn(figures: list[Figure], entries: list[Entry], config: RunConfig = CONFIG, **more: str) -> dict[str, Line2D]:
    """Draw entries and return each name of the legend with its line, as it lies within the axes."""
    path = Path("runs") / "mine" / "loss.png"
    assert draw_curve(entries, config, path, **more) == path
    (axes,), (legend,) = figures[-1].axes, figures[-1].legends
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert [text.get_text() for text in legend.get_texts()] == list(lines)
    bottom, top = axes.get_ylim()
    for line in lines.values():
        if line.get_transform() == axes.transData:
            assert all(bottom <= y <= top for y in numbers(line.get_ydata()))
        assert len(numbers(line.get_xdata())) > 1 or line.get_marker(), "one point is drawn by its marker only"
    shapes = [(line.get_marker(), line.get_linestyle(), line.get_markersize()) for line in lines.values()]
    assert len(set(shapes)) == len(shapes), "without color they could not be told apart"
    return lines


def test_every_number_says_its_split_its_size_and_its_memory(figures: list[Figure]) -> None:
    validation = [each | {"average_loss": each["loss"] - 0.5} for each in VALIDATION]
    lines = drawn(figures, [*TRAINING, *validation, END])
    assert {name: numbers(line.get_ydata()) for name, line in lines.items()} == {
        "training, memory of 1,600": [each["loss"] for each in TRAINING],
        "validation, first 2,000 of 9,000 tokens, memory of 800: 4.600 at step 8": [4.8, 4.6],
        "validation, averaged weights, first 2,000 of 9,000 tokens, memory of 800: 4.100 at step 8": [4.3, 4.1],
        "validation at the end, all 9,000 tokens, memory of 800: 4.250": [4.25],
        "validation at the end, all 9,000 tokens, no memory: 4.750": [4.75],
        "validation at the end, averaged weights, all 9,000 tokens, memory of 800: 4.000": [4.0],
    }
    training, validation, average, *ends = lines.values()
    assert [line.get_linestyle() for line in (training, validation, average)] == ["-", "-", "--"]
    for line in ends:  # visible around a validation in the same place
        assert (line.get_markerfacecolor(), line.get_linestyle()) == ("none", "None")
        assert line.get_markersize() > 2 * validation.get_markersize()
    axes = figures[-1].axes[0]
    assert axes.get_title() == "mine: loss while training"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training tokens read (thousands)", "loss (nats per token)")
    assert numbers(lines["training, memory of 1,600"].get_xdata()) == [step / 10 for step in range(1, 9)]


def test_many_tokens_are_millions_and_one_of_each_can_be_told_apart(figures: list[Figure]) -> None:
    (line,) = drawn(figures, [entry("train", 20_000, 1.0)]).values()
    assert (figures[-1].axes[0].get_xlabel(), numbers(line.get_xdata())) == ("training tokens read (millions)", [2.0])
    assert len(drawn(figures, [TRAINING[-1], VALIDATION[-1] | {"average_loss": 4.6}, END])) == 6


def test_a_final_score_lies_where_its_weights_were_reached(figures: list[Figure]) -> None:
    validation = [entry("valid", step, 4.5, **EXTENT) for step in (2, 4, 8)]
    lines = drawn(figures, [*validation, END | {"best_step": 4}])
    assert numbers(lines["validation at the end, all 9,000 tokens, memory of 800: 4.250"].get_xdata()) == [0.4]


def test_validations_with_other_settings_are_other_curves(figures: list[Figure]) -> None:
    later = [entry("valid", 8, 4.0, **EXTENT | change) for change in ({"mem_len": 0}, {"scored": 3000})]
    assert list(drawn(figures, [VALIDATION[0], *later])) == [
        "validation, first 2,000 of 9,000 tokens, memory of 800: 4.800 at step 4",
        "validation, first 2,000 of 9,000 tokens, no memory: 4.000 at step 8",
        "validation, first 3,000 of 9,000 tokens, memory of 800: 4.000 at step 8",
    ]


def test_a_state_is_no_number_of_positions(figures: list[Figure]) -> None:
    end = entry("final", 8, 4.0, loss_without_memory=4.5, **WHOLE | {"mem_len": 1})
    assert list(drawn(figures, [*TRAINING, end], LSTM)) == [
        "training, a state carried on",
        "validation at the end, all 9,000 tokens, a state carried on: 4.000",
        "validation at the end, all 9,000 tokens, no memory: 4.500",
    ]


def test_a_log_of_an_older_version_says_what_its_settings_say() -> None:
    old = [entry("valid", 4, 1.0), entry("final", 4, 1.0, loss_without_memory=2.0, scored=5)]
    names = [curve.name for curve in curves_of(old, CONFIG)]
    end = "validation at the end"
    assert names == ["validation, memory of 1,600", f"{end}, memory of 1,600", f"{end}, no memory"]
    assert curves_of([{"kind": "final", "step": 4, "loss": 1.0, "bpc": 1.0}, {"kind": "sample", "step": 4}], CONFIG) == []


def test_what_is_not_finite_is_marked_where_it_was(figures: list[Figure]) -> None:
    bad = [
        entry("train", 4, None, skipped=3),
        entry("train", 5, 4.0, skipped=3),
        entry("train", 6, 4.0, skipped=4),
        entry("valid", 6, None, average_loss=4.0, **EXTENT),
        entry("final", 6, None, loss_without_memory=None, **WHOLE),
    ]
    lines = drawn(figures, [*TRAINING[:3], *bad], end="diverged at step 5")
    name, marks = list(lines.items())[-1]
    what = "training steps, skipped, validation, validation at the end, validation at the end, no memory"
    assert name == f"not finite: {what}"
    assert numbers(marks.get_xdata()) == [0.4, 0.6, 0.6, 0.6, 0.6]
    assert figures[-1].axes[0].get_title() == "mine: loss while training, diverged at step 5"
    assert numbers(lines["training, memory of 1,600"].get_ydata()) == [4.9, 4.8, 4.7, 4.0, 4.0]


def test_many_validations_keep_their_line_visible(figures: list[Figure]) -> None:
    (line,) = drawn(figures, [entry("valid", step, 1.0, **EXTENT) for step in range(1, 200)]).values()
    assert line.get_markevery() == (0, 13)


@pytest.mark.parametrize("entries", [[], [entry("train", 4, None)], [END]])
def test_nothing_finite_draws_nothing(entries: list[Entry], tmp_path: Path) -> None:
    assert draw_curve(entries, CONFIG, tmp_path / "loss.png") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_confusions_of_few_and_many_classes(n: int, tmp_path: Path) -> None:
    confusion = np.random.default_rng(0).integers(0, 9, (n, n))
    labels = ["$x^{$", "\u597d", *(f"$class$ {i} " + "long " * (i % 9) for i in range(n - 2))]  # no formulas; no font has all
    path = draw_confusion(tmp_path / "confusion.png", confusion, labels, name="$a_{$")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_confusion(path, np.eye(n, dtype=np.int64), labels, name="run")  # nothing confused
