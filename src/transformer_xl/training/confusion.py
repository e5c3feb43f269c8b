"""A picture: how often a fine-tuned model takes one class for another."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from transformer_xl.pictures import new_figure, save_picture

_MOST_CELLS = 30  # classes of a matrix; of more, the largest confusions are drawn
_MOST_BARS = 25


def draw_confusion(path: Path, confusion: np.ndarray, labels: Sequence[str], *, name: str) -> Path:
    """Draw how many texts (n, n) of each class (row) got each class (column); of many classes, only which are confused most."""
    names = [_short(label) for label in labels]
    n = len(labels)
    if n > _MOST_CELLS:
        return _draw_largest(path, confusion, names, name=name)
    size = max(4.0, 1.6 + 0.42 * n)
    figure = new_figure(width=size + 1.5, height=size + 0.6)
    axes = figure.add_subplot()
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i in range(n):
        for j in range(n):
            if confusion[i, j]:
                color = "white" if shares[i, j] > 0.5 else "black"
                axes.text(j, i, f"{confusion[i, j]:,}", ha="center", va="center", color=color, fontsize=9 if n <= 12 else 6)
    upright = max(map(len, names)) <= 3
    axes.set_xticks(range(n), names, **({} if upright else {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}))
    axes.set_yticks(range(n), names)
    axes.set(xlabel="guess", ylabel="truth", title=f"{name}: texts of each class, and what they were taken for")
    figure.colorbar(image, ax=axes, label="share of the class", shrink=0.8)
    return save_picture(figure, path)


def _draw_largest(path: Path, confusion: np.ndarray, names: Sequence[str], *, name: str) -> Path:
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:_MOST_BARS]
    pairs = [divmod(int(place), len(names)) for place in order if wrong.flat[place]]
    figure = new_figure(width=9, height=1.5 + 0.28 * max(len(pairs), 1))
    axes = figure.add_subplot()
    axes.barh(range(len(pairs)), [int(wrong[pair]) for pair in pairs], color="#0072B2")
    axes.set_yticks(range(len(pairs)), [f"{names[i]} → {names[j]}" for i, j in pairs])
    axes.invert_yaxis()
    axes.set(xlabel="texts", title=f"{name}: the largest confusions (truth → guess) of {len(names):,} classes")
    return save_picture(figure, path)


def _short(label: str) -> str:
    return label if len(label) <= 24 else f"{label[:23]}…"
