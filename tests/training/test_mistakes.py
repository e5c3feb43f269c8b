"""The page of mistakes and the picture of confusions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_xl.data.labelled import Example
from transformer_xl.errors import CheckpointError
from transformer_xl.reading.tasks import Prediction, TaskScore
from transformer_xl.training.mistakes import Worst, draw_confusion, write_page


def page(tmp_path: Path, kind: str, predictions: list[Prediction]) -> str:
    worst = Worst(kind)
    for prediction in predictions:
        worst.add(prediction)
    score = TaskScore(kind, len(predictions), {"accuracy": 0.5})
    return write_page(tmp_path / "mistakes.html", worst, score, name="<run>").read_text(encoding="utf-8")


def test_nothing_of_a_text_becomes_markup(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script> & \ud800"
    example = Example(evil, pair=evil, label=evil, place=evil)
    found = page(tmp_path, "classification", [Prediction(example, "<b>good</b>", (0.9, 0.1), nats=2.3)])
    assert "<script>" not in found and "<b>" not in found and "<run>" not in found
    assert found.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; \\ud800") == 4
    assert "<dd>0.9</dd>" in found


@pytest.mark.parametrize(
    ("kind", "predictions", "order"),
    [
        (
            "classification",
            [("a", "x", "x", 0.1), ("b", "x", "y", 2.0), ("c", "1", 1, 0.2), ("d", "x", "y", 3.0), ("e", "x", "y", 2.0)],
            "dbe",
        ),
        ("multilabel", [("a", ("x", "y"), ("y", "x"), 0.1), ("b", ("x",), (), 1.0), ("c", (), ("x",), 2.0)], "cb"),
        ("regression", [("a", 1.0, 1.5, None), ("b", 2, -3.0, None), ("c", None, 9.0, None)], "ba"),
        ("choice", [("a", 0, 1, 0.7), ("b", 2, 2, 0.1)], "a"),
        (
            "span",
            [("a", ("Ann", "Bob"), "Bob", None), ("b", (), "", None), ("c", (), "Ann", None), ("d", ("Ann",), "", None)],
            "cd",
        ),
    ],
)
def test_only_mistakes_are_shown_and_the_worst_first(
    kind: str, predictions: list[tuple[str, Any, Any, float | None]], order: str, tmp_path: Path
) -> None:
    choices = ("p", "q", "r") if kind == "choice" else ()
    made = [
        Prediction(Example(f"text {name}.", label=label, choices=choices), guess, nats=nats)
        for name, label, guess, nats in predictions
    ]
    found = page(tmp_path, kind, made)
    assert [part[0] for part in found.split("<p>text ")[1:]] == list(order)


def test_only_so_many_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    wrong = [Prediction(Example(f"text {i}.", label="x"), "y", nats=float(i % 500)) for i in range(1000)]
    found = page(tmp_path, "classification", wrong)
    assert found.count("<article>") == 100
    assert "100 of 1,000, the worst first." in found
    assert found.index("text 499.") < found.index("text 999.") < found.index("text 498.") < found.index("text 950.")
    assert "text 449." not in found
    assert "There are none." in page(tmp_path, "classification", [])


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    found = page(tmp_path, "classification", [Prediction(Example("a" * 5000, label="x"), "y", nats=1.0)])
    assert "a" * 4000 + " … (1,000 more characters)</p>" in found and "a" * 4001 not in found


@pytest.mark.parametrize("n", [2, 31, *(pytest.param(n, marks=pytest.mark.slow) for n in (30, 200))])
def test_confusions_of_few_and_many_classes(n: int, tmp_path: Path) -> None:
    confusion = np.random.default_rng(0).integers(0, 9, (n, n))
    labels = [f"$class$ {i} " + "long " * (i % 9) for i in range(n)]
    path = draw_confusion(tmp_path / "confusion.png", confusion, labels, name="run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_confusion(path, np.eye(n, dtype=np.int64), labels, name="run")  # nothing confused
    with pytest.raises(CheckpointError, match="cannot write"):
        draw_confusion(tmp_path / "nowhere" / "confusion.png", confusion, labels, name="run")


def test_names_of_classes_are_no_formulas(tmp_path: Path) -> None:
    """And letters that no font has are boxes without a word."""
    draw_confusion(tmp_path / "confusion.png", np.eye(3, dtype=np.int64), ["$x^{$", "\u597d", "ok"], name="$a_{$")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
