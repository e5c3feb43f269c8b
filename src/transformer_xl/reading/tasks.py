"""What a fine-tuned model says of texts, one after another, and how often it is right.

Texts come and go in windows: those of a window are read in batches of about the same length, and given back in the order in
which they came. So memory does not grow with their number. An answer does not depend on its batch, because padding is not seen.
"""

import itertools
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_xl.config.model import HeadConfig
from transformer_xl.data.labelled import LabelledBatch, Layout, Row, batch_of
from transformer_xl.data.labels import Example, Label, labels_of
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.kernels.device import Precision, autocast, check_precision, choose_precision
from transformer_xl.model.call import Execution
from transformer_xl.model.task_model import TaskModel
from transformer_xl.reading.stream import scoring

WINDOW = 16
"""Batches whose texts are sorted by length: enough to save most of the padding, few enough that answers come soon."""

_T = TypeVar("_T")
_MOST_CHARACTERS = 1 << 24  # of a window's texts, so that long ones do not fill the memory
_FLOATS = ("auto", "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Answer:
    """A place in a text that may answer a question.

    Attributes:
        text: what stands there, as it is written; empty: there is no answer.
        start: its first character.
        end: the character after its last.
        probability: that it is the answer, as the part of the passage says that was read with it at one time.
    """

    text: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a model says of a text.

    Attributes:
        example: the text, with its own label if that is known.
        label: the likeliest class; all labels of probability 0.5 or more; a number; the index of a choice; the text of an
            answer, empty if there is none.
        probabilities: of each class, label or choice, in the order of the model's labels or the example's choices; empty
            for numbers and answers.
        nats: negative log-likelihood of the example's own label, in multilabel the mean over all labels; None where it is not
            known, and for numbers and answers.
        answers: places that may answer a question, the likeliest first; empty for other kinds.
        no_answer: probability that there is no answer in the text; None for other kinds.
    """

    example: Example
    label: Label
    probabilities: tuple[float, ...] = ()
    nats: float | None = None
    answers: tuple[Answer, ...] = ()
    no_answer: float | None = None

    @property
    def probability(self) -> float | None:
        """That the class or choice is right, or the answer; None for numbers, and where there are several labels or none."""
        if self.answers and self.label:
            return self.answers[0].probability
        if self.no_answer is not None:
            return self.no_answer
        return None if isinstance(self.label, tuple) or not self.probabilities else max(self.probabilities)


def head_of(model: Any, source: object = "the model") -> HeadConfig:
    """Return the settings of a fine-tuned model's head."""
    head = getattr(getattr(model, "config", None), "head", None)
    if not isinstance(model, TaskModel) or head is None:
        raise ConfigError(f"{source} has no head; teach it a task first: txl finetune RUN --task NAME --data FILE --out DIR")
    return head


def predictions(
    model: Any,
    tokenizer: Tokenizer,
    examples: Iterable[Example],
    *,
    batch_size: int = 32,
    precision: str = "fp32",
    skip: int = 0,
    is_ready: Callable[[], bool] | None = None,
    execution: Execution = Execution(),
) -> Iterator[Prediction]:
    """Return what a fine-tuned model says of each text, in their order, as an iterator that reads the texts as it goes.

    Args:
        model: a `TaskModel`; its mode is restored whenever a prediction is handed out.
        tokenizer: of the model.
        examples: the texts; their labels may be known or not.
        batch_size: texts that are read side by side.
        precision: of matrix products: auto, fp32, bf16 or fp16.
        skip: leave out the predictions of so many texts at the beginning; the others are computed to the last bit as they are
            without it.
        is_ready: whether the next text is there already; texts that others still have to write are not waited for while some
            that are there have no answer. None: they all are there.
        execution: how the model computes.

    Returns:
        The predictions.

    Raises:
        ConfigError: a model without a head, an unknown precision, or scores that are not finite numbers.
        CorpusError: a text that does not fit the task.
    """
    head = head_of(model)
    if batch_size < 1:
        raise ConfigError(f"batch_size ({batch_size}) must be at least 1")
    chosen = precision_of_texts(precision, model.device)
    predict: _Predict
    if head.kind == "span":
        from transformer_xl.reading.answers import SpanPredictor  # which says what it finds in words of this file

        predict = SpanPredictor(model, tokenizer, batch_size, chosen, execution)
    else:
        predict = _Texts(model, head, tokenizer, batch_size, chosen, execution)
    return _predicted(predict, windows(examples, batch_size, is_ready), skip)


def precision_of_texts(name: str, device: torch.device) -> Precision:
    """Return the precision of a name; `auto` takes bf16 or fp16 where the device multiplies it natively.

    Raises:
        ConfigError: an unknown name, or int8.
    """
    check_precision(name, _FLOATS)
    return choose_precision(name, device)[0]


def n_characters(example: Example) -> int:
    """Return how many characters the texts of an example have."""
    return sum(map(len, (example.text, example.pair or "", *example.choices)))


def windows(
    examples: Iterable[_T],
    batch_size: int,
    is_ready: Callable[[], bool] | None = None,
    *,
    size: Callable[[Any], int] = n_characters,
) -> Iterator[list[_T]]:
    """Yield texts in lists: the first of one batch, each of the next twice as long, up to `WINDOW` batches.

    So the first answers come soon. Where the lists end follows from the texts alone, unless some are waited for (`is_ready`).
    """
    source, n_most = iter(examples), batch_size
    while True:
        window: list[_T] = []
        n_character = 0
        while len(window) < n_most and n_character < _MOST_CHARACTERS and (not window or is_ready is None or is_ready()):
            example = next(source, None)
            if example is None:
                break
            window.append(example)
            n_character += size(example)
        if not window:
            return
        yield window
        n_most = min(2 * n_most, WINDOW * batch_size)


_Predict = Callable[[Sequence[Example]], list[Prediction]]
"""Says something of each of some texts, in their order."""


def _predicted(predict: _Predict, parts: Iterator[list[Example]], skip: int) -> Iterator[Prediction]:
    n_done = 0
    for window in parts:
        n_done += len(window)
        if n_done > skip:
            yield from predict(window)[max(len(window) - (n_done - skip), 0) :]


@dataclass(frozen=True)
class _Texts:
    """Predicts classes, labels, numbers and choices."""

    model: TaskModel
    head: HeadConfig
    tokenizer: Tokenizer
    batch_size: int
    precision: Precision
    execution: Execution

    def __call__(self, examples: Sequence[Example]) -> list[Prediction]:
        """Read the longest texts first, so that a lack of memory is noticed at once."""
        if self.head.kind == "choice":
            _check_choices(examples)
        layout, labels = Layout.of(self.model.config, self.tokenizer), labels_of(self.head, examples)
        rows = [layout.rows(example) for example in examples]
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), max(len(row.ids) for row in rows[i])), reverse=True)
        found: dict[int, Prediction] = {}
        with scoring(self.model):
            for chosen in self._batches(rows, order):
                batch = batch_of([rows[i] for i in chosen], labels[chosen])
                said = self._said([examples[i] for i in chosen], self._logits(batch), batch.labels)
                found.update(zip(chosen, said, strict=True))
        return [found[i] for i in range(len(examples))]

    def _batches(self, rows: Sequence[tuple[Row, ...]], order: Sequence[int]) -> Iterator[list[int]]:
        """Yield indices of texts with equally many choices."""
        for _, group in itertools.groupby(order, key=lambda i: len(rows[i])):
            chosen = list(group)
            for begin in range(0, len(chosen), self.batch_size):
                yield chosen[begin : begin + self.batch_size]

    def _logits(self, batch: LabelledBatch) -> Tensor:
        device = self.model.device
        with autocast(device, self.precision):
            out = self.model(
                batch.ids.to(device),
                n_pad=batch.n_pad.to(device),
                segments=batch.segments.to(device),
                execution=self.execution,
            )
        assert out.logits is not None
        logits = out.logits.cpu().double()
        if not logits.isfinite().all():
            raise ConfigError(f"the model's scores in {self.precision} are not finite numbers; use --precision fp32")
        return logits

    def _said(self, examples: Sequence[Example], logits: Tensor, labels: Tensor) -> list[Prediction]:
        """Return predictions from scores (B, n), or (B, 1) of numbers."""
        if self.head.kind == "regression":
            return [Prediction(example, value) for example, value in zip(examples, logits[:, 0].tolist(), strict=True)]
        if self.head.kind == "multilabel":
            probabilities = logits.sigmoid()
            nats = F.binary_cross_entropy_with_logits(logits, labels.double(), reduction="none").mean(1)
            found = [
                tuple(name for name, p in zip(self.head.labels, row, strict=True) if p >= 0.5) for row in probabilities.tolist()
            ]
        else:
            probabilities = logits.softmax(1)
            nats = F.cross_entropy(logits, labels, reduction="none")
            best = logits.argmax(1).tolist()
            found = best if self.head.kind == "choice" else [self.head.labels[i] for i in best]
        rows = zip(examples, found, probabilities.tolist(), nats.tolist(), strict=True)
        return [Prediction(example, label, tuple(p), None if example.label is None else nat) for example, label, p, nat in rows]


def _check_choices(examples: Iterable[Example]) -> None:
    for example in examples:
        if len(example.choices) < 2:
            where = f"{example.place}: " if example.place else ""
            raise CorpusError(f"{where}it has {len(example.choices)} choices, and the model chooses among 2 or more; give them")


_MAIN = {
    "classification": "accuracy",
    "multilabel": "micro_f1",
    "regression": "pearson",
    "choice": "accuracy",
    "span": "f1",
}
_WORDS = {"micro_f1": "micro F1", "macro_f1": "macro F1", "f1": "F1", "exact": "exact match", "mse": "mean squared error"}


@dataclass(frozen=True)
class TaskScore:
    """How right predictions are.

    A class that neither occurs nor is predicted counts in no mean. Matthews' correlation is 0, and the others are NaN, where
    all labels or all predictions are the same, which leaves them undefined.

    Attributes:
        kind: of the task.
        n: texts that were scored: those with a label.
        metrics: by name, all between -1 and 1 but `mse` and `nats` (mean per text): accuracy, macro_f1, matthews (of two
            classes); micro_f1, macro_f1, exact; pearson, spearman, mse; accuracy of choices; exact, f1 of answers.
        per_label: precision, recall, f1 and n, how often it occurs, of each class or label.
        confusion: int64 (n_label, n_label), texts of each class (row) that got each class (column); None for other kinds.
    """

    kind: str
    n: int
    metrics: dict[str, float]
    per_label: dict[str, dict[str, float]] = field(default_factory=dict)
    confusion: np.ndarray | None = None

    @staticmethod
    def of(kind: str, labels: Sequence[str], predictions: Iterable[Prediction]) -> "TaskScore":
        """Return the score of predictions, which are looked at one by one.

        Args:
            kind: of the task, see `HeadConfig.kind`.
            labels: names of the classes or labels.
            predictions: those of texts without a label are left out.

        Raises:
            CorpusError: no text has a label.

        Example:
            >>> texts = [Example("fine", label="good"), Example("poor", label="bad"), Example("so so", label="bad")]
            >>> predictions = [Prediction(text, "good") for text in texts]
            >>> print(TaskScore.of("classification", ["good", "bad"], predictions).in_words())
            accuracy 0.333, macro F1 0.250, matthews 0.000 (3 texts)
        """
        tally = tally_of(kind, labels)
        for prediction in predictions:
            tally.add(prediction)
        return tally.score()

    @property
    def main_name(self) -> str:
        """Name of the metric by which models are chosen, as the authors choose.

        If some questions have no answer, it is the F1 that the best threshold of no answer gives.
        """
        return "best_f1" if "best_f1" in self.metrics else _MAIN[self.kind]

    @property
    def main(self) -> float:
        """That metric: larger is better, and -1 where it is not defined."""
        value = self.metrics[self.main_name]
        return -1.0 if math.isnan(value) else value

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for JSON, with None where one is not defined."""
        parts: dict[str, Any] = {"kind": self.kind, "n": self.n, "main": self.main_name}
        parts |= {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        if self.per_label:
            parts["per_label"] = self.per_label
        if self.confusion is not None:
            parts |= {"labels": list(self.per_label), "confusion": self.confusion.tolist()}
        return parts

    def in_words(self) -> str:
        """Return the metrics on one line."""
        digits = {"mse": 4, "nats": 4}
        figures = [f"{_WORDS.get(name, name)} {value:z.{digits.get(name, 3)}f}" for name, value in self.metrics.items()]
        return f"{', '.join(figures)} ({self.n:,} {'text' if self.n == 1 else 'texts'})"


class Tally(ABC):
    """Counts how often predictions are right; it grows with numbers, not with texts."""

    n = 0

    def __init__(self) -> None:
        self._nats, self._n_nats = 0.0, 0

    def add(self, prediction: Prediction) -> None:
        """Count a prediction, unless the label of its text is not known."""
        if prediction.example.label is None:
            return
        self._count(prediction, prediction.example.label)
        self.n += 1
        if prediction.nats is not None:
            self._nats += prediction.nats
            self._n_nats += 1

    def score(self) -> TaskScore:
        """Return the score of what was counted."""
        if not self.n:
            raise CorpusError("no text has a label, so there is nothing to score; give a file with labels")
        score = self._score()
        return replace(score, metrics=score.metrics | ({"nats": self._nats / self._n_nats} if self._n_nats else {}))

    @abstractmethod
    def _count(self, prediction: Prediction, label: Label) -> None:
        """Count a prediction of a text whose label is known."""

    @abstractmethod
    def _score(self) -> TaskScore:
        """Return the score, without nats."""


def tally_of(kind: str, labels: Sequence[str]) -> Tally:
    """Return what counts the predictions of a task; see `TaskScore.of`."""
    if kind == "span":
        from transformer_xl.reading.answers import AnswerTally

        return AnswerTally(labels)
    return {"classification": _Classes, "multilabel": _Labels, "regression": _Numbers, "choice": _Choices}[kind](labels)


class _Classes(Tally):
    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__()
        self._ids = {label: i for i, label in enumerate(labels)}
        self._confusion = np.zeros((len(labels), len(labels)), np.int64)

    def _count(self, prediction: Prediction, label: Label) -> None:
        self._confusion[self._ids[str(label)], self._ids[str(prediction.label)]] += 1

    def _score(self) -> TaskScore:
        n_true, n_said, n_right = self._confusion.sum(1), self._confusion.sum(0), self._confusion.diagonal()
        per_label, f1 = _per_label(list(self._ids), n_true, n_said, n_right)
        metrics = {"accuracy": float(n_right.sum() / self.n), "macro_f1": f1}
        if len(self._ids) == 2:
            metrics["matthews"] = matthews(self._confusion)
        return TaskScore("classification", self.n, metrics, per_label, self._confusion)


class _Labels(Tally):
    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__()
        self._ids = {label: i for i, label in enumerate(labels)}
        self._n_true, self._n_said, self._n_right = np.zeros((3, len(labels)), np.int64)
        self._n_exact = 0

    def _count(self, prediction: Prediction, label: Label) -> None:
        assert isinstance(label, tuple) and isinstance(prediction.label, tuple), "multilabel has tuples of labels"
        true, said = ({self._ids[each] for each in labels} for labels in (label, prediction.label))
        self._n_true[list(true)] += 1
        self._n_said[list(said)] += 1
        self._n_right[list(true & said)] += 1
        self._n_exact += true == said

    def _score(self) -> TaskScore:
        per_label, f1 = _per_label(list(self._ids), self._n_true, self._n_said, self._n_right)
        n_any = int(self._n_true.sum() + self._n_said.sum())
        micro = 2 * int(self._n_right.sum()) / n_any if n_any else math.nan
        metrics = {"micro_f1": micro, "macro_f1": f1, "exact": self._n_exact / self.n}
        return TaskScore("multilabel", self.n, metrics, per_label)


class _Numbers(Tally):
    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__()
        self._true, self._said = array("d"), array("d")  # 16 bytes a text, because ranks need all of them

    def _count(self, prediction: Prediction, label: Label) -> None:
        assert isinstance(label, int | float) and isinstance(prediction.label, int | float), "regression has numbers"
        self._true.append(label)
        self._said.append(prediction.label)

    def _score(self) -> TaskScore:
        true, said = np.array(self._true), np.array(self._said)
        metrics = {
            "pearson": pearson(true, said),
            "spearman": pearson(ranks(true), ranks(said)),
            "mse": float(np.square(true - said).mean()),
        }
        return TaskScore("regression", self.n, metrics)


class _Choices(Tally):
    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__()
        self._n_right = 0

    def _count(self, prediction: Prediction, label: Label) -> None:
        self._n_right += prediction.label == label

    def _score(self) -> TaskScore:
        return TaskScore("choice", self.n, {"accuracy": self._n_right / self.n})


def _per_label(
    labels: Sequence[str], n_true: np.ndarray, n_said: np.ndarray, n_right: np.ndarray
) -> tuple[dict[str, dict[str, float]], float]:
    """Return precision, recall, F1 and n of each label, 0 where one is not defined, and the mean F1."""

    def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
        return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)

    columns = {
        "precision": share(n_right, n_said),
        "recall": share(n_right, n_true),
        "f1": share(2 * n_right, n_true + n_said),
        "n": n_true,
    }
    counts = (n_true + n_said) > 0
    f1 = float(columns["f1"][counts].mean()) if counts.any() else math.nan
    return {label: {name: column[i].item() for name, column in columns.items()} for i, label in enumerate(labels)}, f1


def matthews(confusion: np.ndarray) -> float:
    """Return Matthews' correlation of any number of classes, 0 where it is not defined (Gorodkin 2004).

    Args:
        confusion: integers (n, n), see `TaskScore`.

    Example:
        >>> round(matthews(np.array([[3, 1], [1, 1]])), 4)
        0.25
    """
    n_true, n_said = confusion.sum(1).astype(float), confusion.sum(0).astype(float)
    n = n_true.sum()
    spread = (n * n - n_true @ n_true) * (n * n - n_said @ n_said)
    return float((confusion.trace() * n - n_true @ n_said) / math.sqrt(spread)) if spread > 0 else 0.0


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation of floats (N,); NaN where all of one are the same, or there are fewer than two."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return max(-1.0, min(1.0, float(x @ y) / (math.sqrt(x @ x) * math.sqrt(y @ y))))


def ranks(x: np.ndarray) -> np.ndarray:
    """Return the rank of each number from 1, floats (N,); equal numbers share the mean of theirs.

    Example:
        >>> ranks(np.array([2.0, 7.0, 2.0, 1.0])).tolist()
        [2.5, 4.0, 2.5, 1.0]
    """
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]
