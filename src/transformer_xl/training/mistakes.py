"""Where a fine-tuned model goes wrong: a picture of which classes it confuses, and a page of its worst mistakes."""

import heapq
import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from transformer_xl.data.labels import Example
from transformer_xl.errors import CheckpointError
from transformer_xl.files import replace_file
from transformer_xl.pictures import new_figure, save_picture
from transformer_xl.reading.answers import exact_and_f1
from transformer_xl.reading.tasks import Prediction, TaskScore
from transformer_xl.training.record import REMEDY

_MOST = 100  # mistakes on the page
_LONGEST = 4000  # characters of a text on it
_MOST_CELLS = 30  # classes of a matrix; of more, the largest confusions are drawn
_MOST_BARS = 25

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 16px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
article {{ border-top: 1px solid #888; padding: .6rem 0; }}
p {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: 0; }}
dt, .place {{ color: #666; }} dd {{ margin: 0; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd; }} dt, .place {{ color: #999; }} }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
{articles}
</body></html>
"""


class Worst:
    """The predictions that are most wrong, of however many.

    A mistake is the worse the less likely the model thought the truth; of a number, the farther it is from it; of an answer,
    the likelier the model thought the wrong one.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._heap: list[tuple[float, int, Prediction]] = []
        self.n = 0  # mistakes seen

    def add(self, prediction: Prediction) -> None:
        """Keep a prediction if it is one of the worst."""
        if prediction.example.label is None or not self._is_wrong(prediction):
            return
        self.n += 1
        entry = (self._badness(prediction), -self.n, prediction)
        if len(self._heap) < _MOST:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    @property
    def predictions(self) -> list[Prediction]:
        """The worst first; of equally bad ones the first."""
        return [prediction for _, _, prediction in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]

    def _is_wrong(self, prediction: Prediction) -> bool:
        truth, guess = prediction.example.label, prediction.label
        if self._kind == "span":
            assert isinstance(truth, tuple)
            return exact_and_f1(str(guess), truth)[0] < 1
        if self._kind == "multilabel":
            assert isinstance(truth, tuple) and isinstance(guess, tuple)
            return set(truth) != set(guess)
        return self._kind == "regression" or str(truth) != str(guess)

    def _badness(self, prediction: Prediction) -> float:
        if self._kind == "regression":
            return abs(float(str(prediction.label)) - float(str(prediction.example.label)))
        if prediction.nats is not None:
            return prediction.nats
        return prediction.probability or 0.0


def write_page(path: Path, worst: Worst, score: TaskScore, *, name: str) -> Path:
    """Write a page of the worst mistakes: text, truth, guess and how sure the model was. Nothing of a text is markup."""
    shown = worst.predictions
    what = "largest errors" if score.kind == "regression" else "worst mistakes"
    shows = f"{len(shown):,} of {worst.n:,}, the worst first" if shown else "There are none"
    summary = f"{score.in_words()}. {shows}."
    page = _PAGE.format(
        title=html.escape(f"{name}: {what}"),
        summary=html.escape(summary),
        articles="\n".join(_article(prediction) for prediction in shown),
    )
    try:
        replace_file(path, page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise CheckpointError(f"cannot write '{path}': {error.strerror or error}; {REMEDY}") from None
    return path


def _article(prediction: Prediction) -> str:
    example = prediction.example
    choices = [f"{_letter(i)}. {choice}" for i, choice in enumerate(example.choices)]
    texts = [example.text, *([example.pair] if example.pair is not None else []), *choices]
    sure = "" if prediction.probability is None else f"{prediction.probability:.3g}"
    rows = {
        "truth": _said(example.label, example),
        "guess": _said(prediction.label, example),
        "probability of the guess": sure,
    }
    facts = "".join(f"<dt>{name}</dt><dd>{html.escape(value)}</dd>" for name, value in rows.items() if value)
    paragraphs = "".join(f"<p>{html.escape(_cut(text))}</p>" for text in texts)
    return f'<article><dl>{facts}</dl>{paragraphs}<p class="place">{html.escape(example.place)}</p></article>'


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index)


def _said(label: object, example: Example) -> str:
    """Return a label in words."""
    if example.choices and isinstance(label, int):
        return _letter(label)
    if isinstance(label, tuple):
        return ", ".join(map(str, dict.fromkeys(label))) or "(none)"
    if isinstance(label, float):
        return f"{label:.4g}"
    return str(label) or "(none)"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text) - _LONGEST:,} more characters)"


def draw_confusion(path: Path, confusion: np.ndarray, labels: Sequence[str], *, name: str) -> Path:
    """Draw how many texts of each class got each class; of many classes, only which are confused most.

    Args:
        path: of the picture.
        confusion: int (n, n), texts of each class (row) that got each class (column).
        labels: names of the n classes.
        name: of the run.
    """
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
    return save_picture(figure, path, remedy=REMEDY)


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
    return save_picture(figure, path, remedy=REMEDY)


def _short(label: str) -> str:
    return label if len(label) <= 24 else f"{label[:23]}…"
