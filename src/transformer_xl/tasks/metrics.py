"""What a model says of a text (`Prediction`), and how right that is of many: metrics by kind of task."""

import math
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from transformer_xl.data.entities import entities_of, name_entities
from transformer_xl.data.labels import Example, Label
from transformer_xl.errors import CorpusError, counted, shown
from transformer_xl.tasks.answer_scores import best_threshold, exact_and_f1

_FEWEST = 10  # texts that may well be alike, if nobody knows their labels


@dataclass(frozen=True)
class Answer:
    """A place in a text that may answer a question.

    Attributes:
        text: what stands there, as it is written; empty: there is no answer.
        start: its first character.
        end: the character after its last.
        probability: that it is the answer, as the part of the passage says that was read with it at one time.
        score: those of its first and last token together, before the softmax over that part. It can be compared between parts
            and passages, as programs for SQuAD do with `start_logit + end_logit`.
    """

    text: str
    start: int
    end: int
    probability: float
    score: float


@dataclass(frozen=True)
class EntitySpan:
    """An entity in a text.

    Attributes:
        type: what it is, as its labels say; "_" if they only say where it is.
        text: what stands there.
        start: its first character.
        end: the character after its last.
        first_word: index of its first word.
        end_word: index of the word after its last.
    """

    type: str
    text: str
    start: int
    end: int
    first_word: int
    end_word: int


@dataclass(frozen=True)
class Prediction:
    """What a model says of a text.

    Attributes:
        example: the text, with its own label if that is known.
        label: the likeliest class; all labels of probability 0.5 or more; a number; the index of a choice; the text of an
            answer, empty if there is none; the likeliest label of each of the example's words.
        probabilities: of each class, label or choice, in the order of the model's labels or the example's choices; empty
            for numbers and answers; for words, the probability of each word's likeliest label.
        nats: negative log-likelihood of the example's own label, in multilabel and of words the mean over all labels; None
            where it is not known, and for numbers and answers.
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

    @property
    def spans(self) -> tuple[EntitySpan, ...]:
        """The entities that the labels of words write, see `data/entities.py`; empty for other kinds and plain labels."""
        if not self.example.words or not isinstance(self.label, tuple) or not name_entities(self.label):
            return ()
        text, starts = self.example.text, self.example.word_starts
        spans = []
        for kind, first, end in entities_of(self.label):
            start, stop = starts[first], starts[end - 1] + len(self.example.words[end - 1])
            spans.append(EntitySpan(kind, text[start:stop], start, stop, first, end))
        return tuple(spans)


class Sameness:
    """Notices a model that says the same of every text, as one does that has learned nothing of what tells texts apart."""

    def __init__(self) -> None:
        self._n = self.n_empty = 0
        self._first: Prediction | None = None
        self._are_same = self._are_labels_same = True

    def add(self, prediction: Prediction) -> None:
        """Count a prediction; numbers are the same if their first three digits are, labels of words if all words get one."""
        if prediction.example.is_empty:
            self.n_empty += 1
            return
        self._first = self._first or prediction
        self._n += 1
        example, first = prediction.example, self._first.example
        self._are_same &= _summary(prediction.label, example) == _summary(self._first.label, first)
        self._are_labels_same &= _summary(example.label, example) == _summary(first.label, first)

    @property
    def remark(self) -> str:
        """What to try, if all texts got the same and should not have, or if there are many and nobody knows; else empty."""
        if self._first is None or not self._are_same:
            return ""
        label, is_known = _summary(self._first.label, self._first.example), self._first.example.label is not None
        if self._are_labels_same if is_known else self._n < _FEWEST:
            return ""
        said = {"": "no answer", (): "no label"}.get(label) or shown(label)
        is_class = isinstance(self._first.label, str) and self._first.no_answer is None
        doubt, balanced = "" if is_known else "if they should not, ", "balanced classes (task.class_weights=balanced)"
        return (
            f"all {self._n:,} texts got the same, {said}; {doubt}fine-tune with more steps (train.max_epochs), a higher rate "
            f"(optim.lr){f' or {balanced}' if is_class else ''}"
        )


def _summary(label: Label | None, example: Example) -> Label | None:
    if isinstance(label, tuple) and example.words and len(set(label)) == 1:
        return label[0]
    return float(f"{label:.3g}") if isinstance(label, float) else label


_MAIN = {
    "classification": "accuracy",
    "multilabel": "micro_f1",
    "regression": "pearson",
    "choice": "accuracy",
    "span": "f1",
    "tokens": "accuracy",
}
_WORDS = {"micro_f1": "micro F1", "macro_f1": "macro F1", "f1": "F1", "exact": "exact match", "mse": "mean squared error"}


def metrics_in_words(metrics: Mapping[str, float]) -> str:
    """Return metrics by name on one line.

    Example:
        >>> metrics_in_words({"exact": 0.5, "nats": 0.25})
        'exact match 0.500, nats 0.2500'
    """
    digits = {"mse": 4, "nats": 4}
    return ", ".join(f"{_WORDS.get(name, name)} {value:z.{digits.get(name, 3)}f}" for name, value in metrics.items())


@dataclass(frozen=True)
class TaskScore:
    """How right predictions are.

    A class that neither occurs nor is predicted counts in no mean. Matthews' correlation is 0, and the others are NaN, where
    all labels or all predictions are the same, which leaves them undefined.

    Attributes:
        kind: of the task.
        n: texts, or words, that were scored: those with a label.
        metrics: by name, all between -1 and 1 but `mse` and `nats` (mean per text): accuracy, macro_f1, matthews (of two
            classes); micro_f1, macro_f1, exact; pearson, spearman, mse; accuracy of choices; exact, f1 of answers; precision,
            recall and f1 of entities, and accuracy of words, or of plain labels accuracy and macro_f1.
        per_label: precision, recall, f1 and n, how often it occurs, of each class or label, or of each type of entity.
        confusion: int64 (n_label, n_label), texts or words of each class (row) that got each class (column), or None.
        remark: what to try if all texts got the same although their labels differ; else empty.
    """

    kind: str
    n: int
    metrics: dict[str, float]
    per_label: dict[str, dict[str, float]] = field(default_factory=dict)
    confusion: np.ndarray | None = None
    remark: str = ""

    @staticmethod
    def of(kind: str, labels: Sequence[str], predictions: Iterable[Prediction]) -> "TaskScore":
        """Return the score of predictions, which are looked at one by one.

        Args:
            kind: of the task, see `HeadConfig.kind`.
            labels: names of the classes or labels.
            predictions: texts without a label and empty texts, which get no prediction, are left out.

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
        if self.kind == "tokens" and "f1" in self.metrics:
            return "f1"
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
        return parts | ({"remark": self.remark} if self.remark else {})

    def in_words(self) -> str:
        """Return the metrics on one line."""
        unit = "word" if self.kind == "tokens" else "text"
        return f"{metrics_in_words(self.metrics)} ({counted(self.n, unit)})"


class Tally(ABC):
    """Counts how often predictions are right; it grows with numbers, not with texts."""

    n = 0

    def __init__(self) -> None:
        self._nats, self._n_nats = 0.0, 0
        self._sameness = Sameness()

    def add(self, prediction: Prediction) -> None:
        """Count a prediction, unless the label of its text is not known, or the text is empty."""
        if prediction.example.label is None or prediction.example.is_empty:
            return
        self._count(prediction, prediction.example.label)
        self._sameness.add(prediction)
        n = self._size(prediction)
        self.n += n
        if prediction.nats is not None:
            self._nats += n * prediction.nats
            self._n_nats += n

    def _size(self, prediction: Prediction) -> int:
        """Return how many labels a prediction is of."""
        return 1

    def score(self) -> TaskScore:
        """Return the score of what was counted."""
        if not self.n:
            raise CorpusError("no text has a label, so there is nothing to score; give a file with labels")
        score = self._score()
        nats = {"nats": self._nats / self._n_nats} if self._n_nats else {}
        return replace(score, metrics=score.metrics | nats, remark=self._sameness.remark)

    @abstractmethod
    def _count(self, prediction: Prediction, label: Label) -> None:
        """Count a prediction of a text whose label is known."""

    @abstractmethod
    def _score(self) -> TaskScore:
        """Return the score, without nats."""


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


class _Words(_Classes):
    """Counts labels of words, and the entities that they write, as seqeval does by default."""

    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__(labels)
        self._entities = (Counter[str](), Counter[str](), Counter[str]()) if name_entities(labels) else None

    def _size(self, prediction: Prediction) -> int:
        return len(prediction.label) if isinstance(prediction.label, tuple) else 0

    def _count(self, prediction: Prediction, label: Label) -> None:
        assert isinstance(label, tuple) and isinstance(prediction.label, tuple), "words have tuples of labels"
        for true, said in zip(label, prediction.label, strict=True):
            self._confusion[self._ids[true], self._ids[said]] += 1
        if self._entities is not None:
            true, said = set(entities_of(label)), set(entities_of(prediction.label))
            for counts, entities in zip(self._entities, (true, said, true & said), strict=True):
                counts.update(entity.type for entity in entities)

    def _score(self) -> TaskScore:
        score = replace(super()._score(), kind="tokens")
        if self._entities is None:
            return score
        types = sorted(set().union(*self._entities))
        n_true, n_said, n_right = (np.array([counts[each] for each in types], np.int64) for counts in self._entities)
        per_type, _ = _per_label(types, n_true, n_said, n_right)
        micro, _ = _per_label(["all"], *(counts.sum(keepdims=True) for counts in (n_true, n_said, n_right)))
        metrics = {name: micro["all"][name] for name in ("f1", "precision", "recall")}
        return TaskScore("tokens", self.n, metrics | {"accuracy": score.metrics["accuracy"]}, per_type)


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


class _Answers(Tally):
    """Counts how right answers are: as in version 2.0 if a question has no answer, else as in 1.1.

    Labels are the right answers: a tuple of texts, empty if the passage holds none.
    """

    def __init__(self, labels: Sequence[str] = ()) -> None:
        super().__init__()
        self._columns: dict[str, array[float]] = {
            name: array("d")
            for name in ("exact_1", "f1_1", "exact", "f1", "no_answer", "is_impossible", "is_found", "is_silent")
        }

    def _count(self, prediction: Prediction, label: Label) -> None:
        assert isinstance(label, tuple), "questions have tuples of answers"
        said = prediction.answers[0].text if prediction.answers else ""
        values = (
            *exact_and_f1(said, label, "1.1"),
            *exact_and_f1(said, label),
            1.0 if prediction.no_answer is None else prediction.no_answer,
            float(not label),
            float(bool(said)),
            float(bool(said) and not prediction.label),
        )
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def _score(self) -> TaskScore:
        columns = {name: np.array(column) for name, column in self._columns.items()}
        is_impossible, is_silent = columns["is_impossible"] > 0, columns["is_silent"] > 0
        if not is_impossible.any():
            given = {name: np.where(is_silent, 0.0, columns[f"{name}_1"]) for name in ("exact", "f1")}
            return TaskScore("span", self.n, {name: float(each.mean()) for name, each in given.items()})
        given = {name: np.where(is_silent, columns["is_impossible"], columns[name]) for name in ("exact", "f1")}
        metrics = {name: float(each.mean()) for name, each in given.items()}
        for part, of_part in (("answerable", ~is_impossible), ("impossible", is_impossible)):
            if of_part.any():
                metrics |= {f"{part}_{name}": float(each[of_part].mean()) for name, each in given.items()}
        for name in given:
            scores = np.where(is_impossible, 1 - columns["is_found"], columns[name])
            best = best_threshold(scores, columns["no_answer"], is_impossible)
            metrics |= {f"best_{name}": best.score, f"best_{name}_threshold": best.threshold}
        return TaskScore("span", self.n, metrics)


def tally_of(kind: str, labels: Sequence[str]) -> Tally:
    """Return what counts the predictions of a task; see `TaskScore.of`."""
    kinds = {
        "classification": _Classes,
        "multilabel": _Labels,
        "regression": _Numbers,
        "choice": _Choices,
        "span": _Answers,
        "tokens": _Words,
    }
    return kinds[kind](labels)


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
