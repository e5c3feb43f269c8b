"""Which columns of a table, or keys of JSON objects, hold the text, the second text, the choices and the label.

The task tells them (`--text`, `--pair`, `--label`: names, or numbers from 1), or they have the names below: those of the files
of GLUE and RACE, `text` and `label`, and of words and their labels those of Hugging Face. A column of documents (`--document`)
is only told. Three tables without names are read: lines of text (or of a text and its pair) where no labels are needed, CoLA's
four columns, and Yelp's two; for files of CoNLL, see `conll.py`.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Never

from transformer_xl.config.run import TaskConfig
from transformer_xl.errors import CorpusError, did_you_mean, shown

_TEXTS = (  # and second texts, in small letters
    ("sentence1", "sentence2"),  # MNLI, RTE, STS-B, WNLI
    ("question1", "question2"),  # QQP
    ("#1 string", "#2 string"),  # MRPC
    ("question", "sentence"),  # QNLI
    ("premise", "hypothesis"),  # MNLI of Hugging Face
    ("sentence", None),  # SST-2
    ("text", None),  # IMDB of Hugging Face, and others
)
_BETTER_FIRST = (("sentence_good", "sentence_bad"), ("good", "bad"))  # the first are BLiMP's
_LABELS = ("gold_label", "label", "labels", "score", "is_duplicate", "quality")
_CHOICES = {
    "text": ("article", "text"),
    "question": ("question",),
    "choices": ("options", "choices"),
    "label": ("answer", "label"),
}
_WORDS = ("tokens", "words", "text")
_WORD_LABELS = ("labels", "tags", "ner_tags", "pos_tags")
_IDS = ("id", "idx", "index", "example_id")
_MOST_NAMED = 12  # in a message

FILES = "files"
"""What is told instead of a column if each file is a document."""

_N_COLA = 4
_STARS = ("1", "2", "3", "4", "5")


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are read."""

    text: str  # of the text, or of the list of its words
    pair: str | None = None  # of the second text; None: there is none
    label: tuple[str, ...] = ()  # of the label; several of a multilabel task; none if there are no labels
    choices: str | None = None  # of the list of choices; None: there is none
    question: str | None = None  # of what stands before each choice
    id: str | None = None  # of the example's name
    document: str | None = None  # of the document that a row belongs to; None: there is none


class ColumnFinder:
    """Finds the columns of one file, as a task tells them by name or by number from 1, or by their usual names.

    `better_first` looks for two sentences instead, the better and the worse one.
    """

    def __init__(self, file: str, task: TaskConfig, *, labelled: bool, better_first: bool = False) -> None:
        self._file, self._task, self._labelled, self._better_first = file, task, labelled, better_first
        self._texts = _BETTER_FIRST if better_first else _TEXTS

    def in_table(self, first: Sequence[str], kind: str) -> tuple[list[str], Columns, bool]:
        """Return the names of a table's columns, those that are read, and whether its first line holds the names.

        Args:
            first: the first line of the table. Columns without names are called 1, 2 and so on.
            kind: ending of the file; a single column of a .txt is lines of text, whatever the first one says.
        """
        names = [cell.strip() for cell in first]
        lower = {name.lower() for name in names}
        task = self._task
        told = {task.text, task.pair, task.document, *task.label}.intersection(names)
        has_names = any(lower.issuperset(filter(None, pair)) for pair in self._texts)
        if self._better_first:
            has_names = has_names or len(names) != 2
        elif not (lower.isdisjoint(_LABELS) and all(map(_is_number, filter(None, told)))) or task.kind == "choice":
            has_names = True
        if has_names and (kind != ".txt" or len(names) > 1):
            return names, self.named(names), True
        numbers = list(map(str, range(1, len(names) + 1)))
        return numbers, self._unnamed(numbers, names, is_csv=kind == ".csv"), False

    def named(self, names: Sequence[str]) -> Columns:
        """Return the columns that are read of those with these names."""
        lower = {name.lower(): name for name in reversed(names)}
        text, pair, labels = self._told(names)
        choices = question = None
        if self._task.kind == "choice":
            found = {what: _first(known, lower) for what, known in _CHOICES.items()}
            text, question, choices = text or found["text"], found["question"], found["choices"]
            if choices is None:
                raise CorpusError(f"{self._file} has no choices: it has {_some(names)}; give a list named options")
            known_label = found["label"]
        elif self._task.kind == "tokens":
            text, known_label = text or _first(_WORDS, lower), _first(_WORD_LABELS, lower)
        else:
            if text is None and pair is None:
                each = ((lower[a], lower.get(b or "")) for a, b in self._texts if a in lower and (b is None or b in lower))
                text, pair = next(each, (None, None))
            known_label = _first(_LABELS, lower)
        if not self._task.label and known_label not in (None, text, pair):
            labels = (known_label,)
        return self._complete(Columns(text or "", pair, labels, choices, question, _first(_IDS, lower)), names)

    def of_words(self, n_column: int, usual: tuple[str, str]) -> tuple[int, int]:
        """Return the indices of the columns of words and of their labels; `usual` are their numbers where none are told."""
        text, _, labels = self._told(list(map(str, range(1, n_column + 1))))
        return int(text or usual[0]) - 1, int(labels[0] if labels else usual[1]) - 1

    def _unnamed(self, names: list[str], first: Sequence[str], *, is_csv: bool) -> Columns:
        if len(names) == 1:
            return self._complete(Columns("1"), names)
        text, pair, labels = self._told(names)
        if text is None and not labels:
            if len(names) == _N_COLA and first[1] in ("0", "1") and first[2] in ("", "*"):
                return self._complete(Columns("4", label=("2",)), names)
            if is_csv and len(names) == 2 and first[0] in _STARS:
                return self._complete(Columns("2", label=("1",)), names)
            if not self._labelled and len(names) == 2 and self._task.document in (None, FILES):
                return Columns("1", "2")
        return self._complete(Columns(text or "", pair, labels), names)

    def _told(self, names: Sequence[str]) -> tuple[str | None, str | None, tuple[str, ...]]:
        """Return the columns of text, second text and labels that are told; labels that are not needed may be missing."""
        task = self._task
        text, pair = self._one("text", task.text, names), self._one("pair", task.pair, names)
        labels = [self._one("label", name, names, optional=not self._labelled) for name in task.label]
        return text, pair, () if None in labels else tuple(filter(None, labels))

    def _one(self, what: str, name: str | None, names: Sequence[str], *, optional: bool = False) -> str | None:
        if name is None or name in names:
            return name
        if _is_number(name) and 1 <= int(name) <= len(names):
            return names[int(name) - 1]
        if optional:
            return None
        near = did_you_mean(name, filter(None, names))
        if what == "document" and not self._labelled:
            near = "" if all(map(_is_number, names)) else f" ({near})"
            raise CorpusError(
                f"{self._file} has no column {shown(name)} of documents; name theirs by --document{near}, or give "
                f"--document {FILES}: all of it is one document"
            )
        raise CorpusError(f"{self._file} has no column {shown(name)}, as task.{what} says; {near}")

    def _complete(self, columns: Columns, names: Sequence[str]) -> Columns:
        if self._better_first and columns.pair is None:
            has = f"its columns are {_some(names)}" if len(names) > 1 else "it has one column"
            raise CorpusError(
                f"{self._file}: which sentence is the better one? {has}; give two sentences a line, "
                f"the better first, or name them {' and '.join(_BETTER_FIRST[0])}"
            )
        if not columns.text:
            self._refuse("text", names)
        if self._labelled and not columns.label:
            self._refuse("label", names)
        told = self._task.document
        return replace(columns, document=self._one("document", told, names, optional=told == FILES))

    def _refuse(self, what: str, names: Sequence[str]) -> Never:
        raise CorpusError(
            f"{self._file}: which column holds the {what}? its columns are {_some(names)}; give the name of one by --{what} "
            f"(task.{what}), or its number if the first line holds no names"
        )


def _is_number(name: str) -> bool:
    """Return whether a column is told by its number; ٣ is a name."""
    return name.isascii() and name.isdecimal()


def _first(known: Sequence[str], lower: Mapping[str, str]) -> str | None:
    return next((lower[name] for name in known if name in lower), None)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names[:_MOST_NAMED])) + (", …" if len(names) > _MOST_NAMED else "")


def with_columns_of(text: bytes, task: TaskConfig, *, is_csv: bool) -> TaskConfig:
    """Return a task without the columns that were told for other texts, if the first line of a table does not have them."""
    line = text.partition(b"\n")[0].decode("utf-8-sig", "replace").rstrip("\r")
    cells = next(csv.reader([line]), []) if is_csv else line.split("\t")
    names = {cell.strip() for cell in cells} | set(map(str, range(1, len(cells) + 1)))
    if line.lstrip().startswith(("{", "[")) or names.issuperset(filter(None, (task.text, task.pair))):
        return task
    return task.model_copy(update={"text": None, "pair": None})
