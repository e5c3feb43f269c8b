"""The picture of confusions."""

from pathlib import Path

import numpy as np
import pytest

from transformer_xl.training.confusion import draw_confusion


@pytest.mark.parametrize("n", [2, 31, *(pytest.param(n, marks=pytest.mark.slow) for n in (30, 200))])
def test_confusions_of_few_and_many_classes(n: int, tmp_path: Path) -> None:
    confusion = np.random.default_rng(0).integers(0, 9, (n, n))
    labels = [f"$class$ {i} " + "long " * (i % 9) for i in range(n)]
    path = draw_confusion(tmp_path / "confusion.png", confusion, labels, name="run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_confusion(path, np.eye(n, dtype=np.int64), labels, name="run")  # nothing confused


def test_names_of_classes_are_no_formulas(tmp_path: Path) -> None:
    """And letters that no font has are boxes without a word."""
    draw_confusion(tmp_path / "confusion.png", np.eye(3, dtype=np.int64), ["$x^{$", "\u597d", "ok"], name="$a_{$")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
