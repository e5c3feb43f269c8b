"""Which columns of a table, or keys of JSON objects, hold the text, the second text, the choices and the label."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Never

from transformer_xl.config import TaskConfig
from transformer_xl.errors import CorpusError, did_you_mean, shown

LISTS = ("options", "choices", "endings", "candidates")
"""Names of a list of choices."""

_PAIRS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("passage", "question"),
    ("context", "question"),
    ("query", "passage"),
    ("#1 string", "#2 string"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("s1", "s2"),
)
_TEXTS = (
    "sentence",
    "text",
    "review",
    "content",
    "document",
    "comment_text",
    "comment",
    "tweet",
    "body",
    "passage",
    "article",
    "context",
    "question",
)
_LABELS = (
    "label",
    "labels",
    "gold_label",
    "class",
    "score",
    "is_duplicate",
    "quality",
    "sentiment",
    "stars",
    "rating",
    "category",
    "target",
)
_CONTEXTS = ("article", "passage", "context", "ctx", "text", "premise", "sent1", "startphrase", "goal", "sentence")
_QUESTIONS = ("question", "sent2", "question_stem")
_ANSWERS = ("label", "answer", "answerkey", "answer_key", "gold", "correct")
_IDS = ("id", "idx", "guid", "index", "example_id", "uid", "pairid")
_KNOWN = frozenset(chain(*_PAIRS, _TEXTS, _LABELS, _CONTEXTS, _QUESTIONS))
_ONE_CHOICE = re.compile(r"(ending|choice|option|answer|solution|sol)[ _-]?([0-9]+|[a-h])", re.IGNORECASE)
_MOST_NAMED = 12  # in a message
_N_COLA = 4
_ENOUGH = 20  # lines that show which labels there are


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are read.

    Attributes:
        text: of the text.
        pair: of the second text; None: there is none.
        label: of the label; several of a multilabel task; none if there are no labels.
        choices: of a list of choices, or of each of them.
        question: of what stands before each choice.
        id: of the example's name.
    """

    text: str
    pair: str | None = None
    label: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    question: str | None = None
    id: str | None = None


class ColumnFinder:
    """Finds the columns of one file.

    Args:
        file: its name, for messages.
        task: its kind, and columns that are told by name, or by number from 1.
        labelled: there must be a label.
        classes: names of classes that are known.
    """

    def __init__(self, file: str, task: TaskConfig, *, labelled: bool, classes: Iterable[str]) -> None:
        self._file, self._task, self._labelled, self._classes = file, task, labelled, frozenset(classes)

    def in_table(self, rows: Sequence[Sequence[str]], *, is_plain: bool = False) -> tuple[list[str], Columns, bool]:
        """Return the names of a table's columns, those that are read, and whether the first line holds the names.

        Args:
            rows: the first lines of the table, at least one. Columns without names are called 1, 2 and so on.
            is_plain: nobody said that it is a table, so a single column is lines of text, whatever the first one says.

        Raises:
            CorpusError: columns that are told but missing, or cannot be found.
        """
        first, others = [cell.strip() for cell in rows[0]], rows[1:]
        if not (is_plain and len(first) == 1) and self._is_header(first, others):
            if twice := next((name for name, n in Counter(first).items() if name and n > 1), None):
                raise CorpusError(f"{self._file} line 1: two columns are named {shown(twice)}; rename one")
            return first, self.named(first), True
        names = _numbers(len(first))
        columns = self._unnamed(names, rows)
        if len(columns.label) == 1:
            self._check_is_row(rows, names.index(columns.label[0]))
        return names, columns, False

    def named(self, names: Sequence[str]) -> Columns:
        """Return the columns that are read of those with these names, as `in_table` does."""
        lower = {name.lower(): name for name in reversed(names)}
        name_of_id = _first(_IDS, lower)
        text, pair, labels = self._told(names)
        if self._task.kind == "choice":
            return self._of_choice(names, lower, text, labels, name_of_id)
        if not labels and not self._task.label:
            order = ("score", *_LABELS) if self._task.kind == "regression" else _LABELS
            found = _first(order, lower, without=(text, pair))
            labels = (found,) if found else ()
        if text is None and pair is None:
            text, pair = next(((lower[a], lower[b]) for a, b in _PAIRS if a in lower and b in lower), (None, None))
        text = text or _first(_TEXTS, lower, without=(pair, *labels))
        left = [name for name in names if name not in (pair, *labels)]
        if text is None and labels and len(left) == 1:
            text = left[0]
        return Columns(self._required_text(text, names), pair, self._required_labels(labels, names), id=name_of_id)

    def _unnamed(self, names: list[str], rows: Sequence[Sequence[str]]) -> Columns:
        """Return the columns of a table without names: the text is first, the label last, and a second text between them."""
        if self._task.kind == "choice":
            self._refuse("text", names)
        if not self._labelled and len(names) == 1:
            return Columns(names[0])
        text, pair, labels = self._told(names)
        left = [name for name in names if name not in (text, pair, *labels)]
        if len(left) == len(names) == _N_COLA and self._task.kind == "classification" and _is_cola(rows):
            return Columns("4", label=("2",))
        needs_text = text is None
        if not labels and len(left) > needs_text and (self._labelled or self._are_labels(rows, names.index(left[-1]))):
            labels = (left.pop(),)
        if needs_text and 1 <= len(left) <= 2:
            text = left.pop(0)
            pair = pair or (left[0] if left else None)
        return Columns(self._required_text(text, names), pair, self._required_labels(labels, names))

    def _of_choice(
        self,
        names: Sequence[str],
        lower: Mapping[str, str],
        text: str | None,
        labels: tuple[str, ...],
        name_of_id: str | None,
    ) -> Columns:
        listed = _first(LISTS, lower)
        choices = (listed,) if listed else self._numbered(names)
        question = _first(_QUESTIONS, lower, without=(text,))
        text = text or _first(_CONTEXTS, lower)
        if text is None:
            text, question = question, None
        if not choices:
            raise CorpusError(
                f"{self._file} has no choices: it has {_some(names)}; give a list named {' or '.join(LISTS[:2])}, or columns "
                "choice0, choice1 and so on"
            )
        if not labels and not self._task.label:
            found = _first(_ANSWERS, lower, without=(text, *choices))
            labels = (found,) if found else ()
        text = self._required_text(text, names)
        return Columns(text, None, self._required_labels(labels, names), choices, question, name_of_id)

    @staticmethod
    def _numbered(names: Iterable[str]) -> tuple[str, ...]:
        """Return the columns that hold a choice each: of two and more with the same name, numbers or letters apart."""
        found: dict[str, list[tuple[int, str, str]]] = {}
        for name in names:
            if match := _ONE_CHOICE.fullmatch(name):
                number = int(match[2]) if match[2].isdecimal() else 0
                found.setdefault(match[1].lower(), []).append((number, match[2].lower(), name))
        most = max(found.values(), key=len, default=[])
        return tuple(name for *_, name in sorted(most)) if len(most) > 1 else ()

    def _told(self, names: Sequence[str]) -> tuple[str | None, str | None, tuple[str, ...]]:
        """Return the columns of text, second text and labels that are told; labels that are not needed may be missing."""
        task = self._task
        text, pair = self._one("text", task.text, names), self._one("pair", task.pair, names)
        labels = [self._one("label", name, names, optional=not self._labelled) for name in task.label]
        return text, pair, () if None in labels else tuple(filter(None, labels))

    def _one(self, what: str, name: str | None, names: Sequence[str], *, optional: bool = False) -> str | None:
        if name is None or name in names:
            return name
        if name.isdecimal() and 1 <= int(name) <= len(names):
            return names[int(name) - 1]
        if optional:
            return None
        near = did_you_mean(name, filter(None, names))
        raise CorpusError(f"{self._file} has no column {shown(name)}, as task.{what} says; {near}")

    def _required_text(self, text: str | None, names: Sequence[str]) -> str:
        return self._refuse("text", names) if text is None else text

    def _required_labels(self, labels: tuple[str, ...], names: Sequence[str]) -> tuple[str, ...]:
        return self._refuse("label", names) if self._labelled and not labels else labels

    def _refuse(self, what: str, names: Sequence[str]) -> Never:
        unnamed = list(names) == _numbers(len(names))
        found = f"{counted(len(names))} without names that are known" if unnamed else _some(names)
        raise CorpusError(f"{self._file}: which column holds the {what}? it has {found}; name it by --{what} (task.{what})")

    def _is_header(self, first: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
        """Return whether the first line has names that are known or told, and that do not come again in their columns."""
        told = {name for name in (self._task.text, self._task.pair, *self._task.label) if name and not name.isdecimal()}
        found = [i for i, name in enumerate(first) if name not in self._classes and (name in told or name.lower() in _KNOWN)]
        return bool(found) and not any(i < len(row) and row[i].strip() == first[i] for i in found for row in others)

    def _check_is_row(self, rows: Sequence[Sequence[str]], column: int) -> None:
        """Refuse a first line whose label looks like the name of a column."""
        first, *labels = [row[column].strip() for row in rows if column < len(row)]
        if not labels or first in labels or first in self._classes:
            return
        is_name = not _is_number(first) and all(map(_is_number, labels))
        is_alone = len(labels) >= _ENOUGH and all(labels.count(label) > 1 for label in set(labels))
        is_alone = is_alone and self._task.kind != "multilabel"  # a text may have labels that no other has
        if is_name or is_alone:
            raise CorpusError(
                f"{self._file} line 1: {shown(first)} looks like the name of a column, but is none that is known; name the "
                "columns by --text and --label (task.text, task.label)"
            )

    def _are_labels(self, rows: Sequence[Sequence[str]], column: int) -> bool:
        cells = [row[column].strip() for row in rows if column < len(row)]
        if self._task.kind == "regression":
            return all(map(_is_number, cells))
        return bool(self._classes) and self._classes.issuperset(cells)


def counted(n: int) -> str:
    """Return a number of columns in words."""
    return f"{n} column{'s' if n != 1 else ''}"


def _numbers(n: int) -> list[str]:
    return [str(i) for i in range(1, n + 1)]


def _first(known: Iterable[str], lower: Mapping[str, str], *, without: tuple[str | None, ...] = ()) -> str | None:
    """Return the first of the known names that there is, as it is written."""
    return next((lower[name] for name in known if name in lower and lower[name] not in without), None)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names[:_MOST_NAMED])) + (", …" if len(names) > _MOST_NAMED else "")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_cola(rows: Iterable[Sequence[str]]) -> bool:
    """Return whether these are lines of CoLA: source, label, the author's mark, sentence."""
    return all(len(row) == _N_COLA and row[1] in ("0", "1") and row[2] in ("", "*") for row in rows if list(row) != [""])
