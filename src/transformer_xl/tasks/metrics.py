"""What a model says of a text (`Prediction`), and how right that is of many: metrics by kind of task.

Scores of answers are those of the official scripts `evaluate-v1.1.py` and `evaluate-v2.0.py`, as shares (Rajpurkar et al. 2016,
section 6.1, and 2018). Text of a script that puts no spaces between words is counted by characters, as the scripts of CMRC 2018
and MLQA do; unlike them, digits count one by one there, too: 1994年 is nearer to 1995年 than to 红楼梦.
"""

import math
import re
import string
import unicodedata
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from transformer_xl.data.entities import entities_of, name_entities
from transformer_xl.data.labels import Example, Label
from transformer_xl.errors import CorpusError, shown

Version = Literal["1.1", "2.0"]

_ARTICLES = re.compile(r"\b(?:an?|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FEWEST = 10  # texts that may well be alike, if nobody knows their labels
_WIDE_PUNCTUATION = {chr(ord(sign) + 0xFEE0) for sign in string.punctuation}  # which Unicode calls symbols in part: ＋ ＝ ～
_SPACELESS = (  # characters that no spaces divide into words
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    r"\u2e80-\u2fff\u3001-\u312f\u31a0-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese and Japanese
    r"\uff00-\uff9f"  # full-width signs
)
_IS_SPACELESS = re.compile(rf"[{_SPACELESS}][\w{_SPACELESS}]|\w[{_SPACELESS}]")
_CHARACTERS = re.compile(rf"[{_SPACELESS}]|\d|[^\s\d{_SPACELESS}]+")


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
class Span:
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
            for numbers and answers; of words, that of each one's likeliest label.
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
    def spans(self) -> tuple[Span, ...]:
        """The entities that the labels of words write, see `data/entities.py`; empty for other kinds."""
        if not self.example.words or not isinstance(self.label, tuple):
            return ()
        text, starts = self.example.text, self.example.word_starts
        spans = []
        for kind, first, end in entities_of(self.label):
            start, stop = starts[first], starts[end - 1] + len(self.example.words[end - 1])
            spans.append(Span(kind, text[start:stop], start, stop, first, end))
        return tuple(spans)


class Sameness:
    """Notices a model that says the same of every text, as one does that has learned nothing of what tells texts apart."""

    def __init__(self) -> None:
        self._n = 0
        self._first: Prediction | None = None
        self._are_same = self._are_labels_same = True

    def add(self, prediction: Prediction) -> None:
        """Count a prediction; numbers are the same if their first three digits are, labels of words if all words get one."""
        self._first = self._first or prediction
        self._n += 1
        self._are_same &= _summary(prediction) == _summary(self._first)
        self._are_labels_same &= prediction.example.label == self._first.example.label

    @property
    def remark(self) -> str:
        """What to try, if all texts got the same and should not have, or if there are many and nobody knows; else empty."""
        if self._first is None or not self._are_same:
            return ""
        label, is_known = _summary(self._first), self._first.example.label is not None
        if self._are_labels_same if is_known else self._n < _FEWEST:
            return ""
        said = {"": "no answer", (): "no label"}.get(label) or shown(label)
        is_class = isinstance(self._first.label, str) and self._first.no_answer is None
        doubt, balanced = "" if is_known else "if they should not, ", "balanced classes (task.class_weights=balanced)"
        return (
            f"all {self._n:,} texts got the same, {said}; {doubt}fine-tune with more steps (train.max_epochs), a higher rate "
            f"(optim.lr){f' or {balanced}' if is_class else ''}"
        )


def _summary(prediction: Prediction) -> Label:
    label = prediction.label
    if isinstance(label, tuple) and prediction.example.words and len(set(label)) == 1:
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
        confusion: int64 (n_label, n_label), texts of each class (row) that got each class (column); None for other kinds.
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
        digits = {"mse": 4, "nats": 4}
        figures = [f"{_WORDS.get(name, name)} {value:z.{digits.get(name, 3)}f}" for name, value in self.metrics.items()]
        unit = "word" if self.kind == "tokens" else "text"
        return f"{', '.join(figures)} ({self.n:,} {unit}{'s' * (self.n != 1)})"


class Tally(ABC):
    """Counts how often predictions are right; it grows with numbers, not with texts."""

    n = 0

    def __init__(self) -> None:
        self._nats, self._n_nats = 0.0, 0
        self._sameness = Sameness()

    def add(self, prediction: Prediction) -> None:
        """Count a prediction, unless the label of its text is not known."""
        if prediction.example.label is None:
            return
        self._count(prediction, prediction.example.label)
        self._sameness.add(prediction)
        n = len(prediction.example.words) or 1
        self.n += n
        if prediction.nats is not None:
            self._nats += n * prediction.nats
            self._n_nats += n

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


def compared_words(*texts: str) -> list[list[str]]:
    """Return the words by which answers are compared: in lower case, without punctuation and articles.

    If characters of a script without spaces touch others in one of the texts, all texts are taken apart: into such characters,
    digits, and what else stands between spaces. Then all of Unicode's punctuation is left out, and articles stay. A Chinese
    character alone among English words is a word, as in the official scripts.

    Example:
        >>> compared_words("The  cat's (a) hat.")
        [['cats', 'hat']]
        >>> compared_words("《红楼梦》 VR版", "“19”")
        [['红', '楼', '梦', 'vr', '版'], ['1', '9']]
    """
    if not any(map(_IS_SPACELESS.search, texts)):
        return [_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split() for text in texts]
    return [_CHARACTERS.findall("".join(sign for sign in text.lower() if not _is_punctuation(sign))) for text in texts]


def _is_punctuation(sign: str) -> bool:
    return unicodedata.category(sign).startswith("P") or sign in string.punctuation or sign in _WIDE_PUNCTUATION


def exact_and_f1(said: str, answers: Sequence[str], version: Version = "2.0") -> tuple[float, float]:
    """Return how right an answer is: whether it is one of the right ones, and the best F1 of its words with one of them.

    Args:
        said: the answer, empty if there is none.
        answers: the right ones; empty if there is none.
        version: 2.0: right answers without words do not count, unless all are, and two answers without words agree. 1.1: all
            count, and an answer without words has F1 0.

    Example:
        >>> exact_and_f1("the cat sat", ["A cat", "dog"])
        (0.0, 0.6666666666666666)
        >>> exact_and_f1("1994年被", ["1994年"])
        (0.0, 0.9090909090909091)
    """
    pairs = [compared_words(said, answer) for answer in answers]
    if version == "2.0":
        pairs = [pair for pair in pairs if pair[1]] or [[*compared_words(said), []]]
    if not pairs:
        return 0.0, 0.0
    return float(any(words == gold for words, gold in pairs)), max(_f1(words, gold, version) for words, gold in pairs)


def _f1(words: list[str], gold: list[str], version: Version) -> float:
    if version == "2.0" and not (words and gold):
        return float(words == gold)
    n_common = (Counter(words) & Counter(gold)).total()
    return 2 * n_common / (len(words) + len(gold)) if n_common else 0.0


class BestThreshold(NamedTuple):
    """The best score that can be had by giving no answer where its probability is above a threshold, and the threshold."""

    score: float
    threshold: float


def best_threshold(scores: np.ndarray, no_answer: np.ndarray, is_impossible: np.ndarray) -> BestThreshold:
    """Look for the threshold of the probability of no answer that gives the best score, as the official script does.

    Args:
        scores: (n,), of the answers that would be given; those to questions without an answer count 0, unless they are empty.
        no_answer: (n,), probability that there is none.
        is_impossible: (n,) bool, whether there is none.

    Returns:
        The mean score, and the largest probability at which an answer is given; 0 if none ever should be. Questions of the
        same probability, which the script parts, stay together.

    Example:
        >>> best_threshold(np.array([1.0, 0.5, 0.0]), np.array([0.1, 0.3, 0.9]), np.array([False, False, True]))
        BestThreshold(score=0.8333333333333334, threshold=0.3)
    """
    order = np.argsort(no_answer, kind="stable")
    ordered = no_answer[order]
    gain = np.where(is_impossible, scores - 1, scores)[order]  # by answering, beside giving no answer to any
    total = is_impossible.sum() + np.cumsum(gain)
    may_end = np.append(ordered[1:] != ordered[:-1], True)
    total = np.where(may_end, total, -np.inf)
    best = int(total.argmax())
    if total[best] <= is_impossible.sum():
        return BestThreshold(float(is_impossible.mean()), 0.0)
    return BestThreshold(float(total[best] / len(scores)), float(ordered[best]))
