"""Examples, and what their labels are as numbers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from transformer_xl.batch import NOT_SCORED
from transformer_xl.config.model import HeadConfig
from transformer_xl.config.run import TaskConfig
from transformer_xl.data.entities import Scheme, fault
from transformer_xl.errors import CorpusError, counted, did_you_mean, shown
from transformer_xl.untrusted import is_unicode

Label = str | float | int | tuple[str, ...]
"""A class; a number; the index of a choice; the labels of a text, possibly none; or those of its words."""

_MOST_CLASSES = 20  # so many may occur once on average
_MOST_SHOWN = 5
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")  # Python would read 1_0 as 10
_LARGEST = 1e9  # number, whose square is one in fp32

MOST_LABELS = 4096
"""Classes or labels of a model: a matrix of confusions fits into memory, and their names into its settings."""


@dataclass(frozen=True)
class Example:
    """A text and its label.

    Attributes:
        text: the text; of a choice: what is common to all choices.
        pair: the second text; None: there is none.
        choices: the texts to choose from, each read after `text`; empty unless it is a choice.
        words: of `text`, where a file tells them; empty: see `words_of`.
        lines: of a file of columns, those of the words.
        label: None: not known.
        place: where it comes from, for messages: a file and a line.
        id: name of the example, if its file gives one.
        document: name of the document that it is a row of, read with a memory of the rows before; None: it stands alone.
    """

    text: str
    pair: str | None = None
    choices: tuple[str, ...] = ()
    label: Label | None = None
    place: str = ""
    id: str | None = None
    words: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    document: str | None = None

    def __post_init__(self) -> None:
        if not is_unicode("".join([self.text, self.pair or "", *self.choices])):
            raise CorpusError(f"{self.where}the text has half of a character (a lone surrogate); give the whole one")

    @property
    def where(self) -> str:
        """The place with a colon, to begin a message with; empty if it is not known."""
        return f"{self.place}: " if self.place else ""

    @property
    def word_starts(self) -> list[int]:
        """The characters of `text` at which its words begin."""
        starts, end = [], 0
        for word in self.words:
            starts.append(self.text.index(word, end))
            end = starts[-1] + len(word)
        return starts

    def place_of_word(self, index: int) -> str:
        """Return where a word comes from, for messages."""
        file = self.place.rpartition(" line ")[0]
        return f"{file} line {self.lines[index]}" if self.lines else f"{self.place} word {index + 1}"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say something of."""
        return not (self.choices or self.pair or self.text.strip())


def whole_documents(examples: Iterable[Example]) -> Iterator[Example]:
    """Yield examples, and refuse rows of a document with rows of another one between them."""
    last, before = None, set[str]()
    for example in examples:
        document = example.document
        if document is not None and document != last:
            if document in before:
                raise CorpusError(
                    f"{example.where}document {shown(document)} goes on here, after rows of another one (a document column "
                    "out of order); put the rows of each document together, in their order"
                )
            last = document
            before.add(document)
        yield example


def document_borders(examples: Iterable[Example]) -> np.ndarray:
    """Return where documents begin among their rows, and where the last one ends, int64 (n + 1,)."""
    sizes = [len(list(rows)) for _, rows in groupby(examples, lambda example: example.document)]
    return np.cumsum([0, *sizes])


def label_names(task: TaskConfig, examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the classes or labels of the training examples, sorted, numbers as numbers; columns of labels as they stand."""
    if task.kind not in ("classification", "multilabel", "tokens"):
        return ()
    if task.kind == "multilabel" and task.label and len(task.label) > 1:
        return task.label
    file = examples[0].place.rpartition(" line ")[0] or "the training file"
    found: set[str] = set()
    for example in examples:
        label = () if example.label is None else example.label
        found.update(label if isinstance(label, tuple) else (str(label),))
    names = _sorted(found)
    if not names:
        raise CorpusError(f"{file}: no text has any label; name the column of labels by --label (task.label)")
    if len(names) == 1 and task.kind != "multilabel":
        what = "words" if task.kind == "tokens" else counted(len(examples), "text")
        raise CorpusError(f"{file}: all {what} have the label {shown(names[0])}; give texts of two classes or more")
    if task.kind == "classification" and len(names) > max(_MOST_CLASSES, len(examples) // 2):
        some = ", ".join(map(shown, names[:_MOST_SHOWN]))
        raise CorpusError(
            f"{file}: {len(names):,} different labels in {counted(len(examples), 'text')} ({some}, …) are no classes; name the "
            "column of the label by --label (task.label), or use --task regression for numbers"
        )
    if len(names) > MOST_LABELS:
        what = f"{len(names):,} different labels are too many for a model, which has at most {MOST_LABELS:,}"
        raise CorpusError(f"{file}: {what}; name the column of the label by --label (task.label), or merge some")
    return names


def check_scheme(examples: Sequence[Example], scheme: Scheme) -> None:
    """Refuse sentences whose labels contradict the scheme in which labels of words write entities."""
    for example in examples:
        if isinstance(example.label, tuple) and (broken := fault(example.label, scheme)):
            where, why = example.place_of_word(broken[0]), broken[1]
            raise CorpusError(f"{where}: {why} ({scheme}); mend the label, or the empty line between sentences")


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    names = sorted(names)
    if all(_number(name) is not None for name in names):
        names.sort(key=float)
    return tuple(names)


def _number(text: str) -> float | None:
    """Return the number that a text is, written in digits as JSON and tables have them; None: it is none, or not finite."""
    return number if _NUMBER.fullmatch(text) and np.isfinite(number := float(text)) else None


def labels_of(head: HeadConfig, examples: Sequence[Example]) -> Tensor:
    """Return the labels of examples as numbers, as in a `Batch`; spans have no such labels."""
    index = {name: i for i, name in enumerate(head.labels)}
    if head.kind == "tokens":
        labels = torch.full((len(examples), max((len(each.words) for each in examples), default=0)), NOT_SCORED)
        for row, each in zip(labels, examples, strict=True):
            row[: len(each.words)] = torch.tensor(_of_words(each, index))
        return labels
    if head.kind == "regression":
        numbers = [torch.nan if each.label is None else label_number(each.label, each.place) for each in examples]
        return torch.tensor(numbers, dtype=torch.float32)
    if head.kind == "choice":
        return torch.tensor([_choice(example) for example in examples], dtype=torch.int64)
    if head.kind == "classification":
        numbers = [NOT_SCORED if each.label is None else _index(str(each.label), index, each.place) for each in examples]
        return torch.tensor(numbers, dtype=torch.int64)
    assert head.kind == "multilabel"
    has = torch.zeros(len(examples), len(index))
    for i, example in enumerate(examples):
        if example.label is None:
            has[i] = torch.nan
            continue
        assert isinstance(example.label, tuple)
        for name in example.label:
            has[i, _index(name, index, example.place)] = 1
    return has


def _of_words(example: Example, index: dict[str, int]) -> list[int]:
    if example.label is None:
        return [NOT_SCORED] * len(example.words)
    assert isinstance(example.label, tuple)
    if unknown := set(example.label).difference(index):
        place = next(i for i, name in enumerate(example.label) if name in unknown)
        _index(example.label[place], index, example.place_of_word(place))
    return [index[name] for name in example.label]


def balanced_weights(labels: Tensor, n_class: int) -> Tensor:
    """Return a weight for each class, fp32 (n_class,), with which all classes count as much: n / (k · count).

    So does scikit-learn's `class_weight="balanced"`: n labels are of k different classes; a class without labels has weight 0.

    Args:
        labels: integers below `n_class`, of any shape; -100 is none.
        n_class: number of classes.

    Example:
        >>> balanced_weights(torch.tensor([0, 0, 0, 1, -100]), 3).tolist()
        [0.6666666865348816, 2.0, 0.0]
    """
    counts = torch.bincount(labels[labels != NOT_SCORED].flatten(), minlength=n_class).double()
    weights = counts.sum() / (counts.count_nonzero() * counts)
    return weights.where(counts > 0, 0.0).float()


def _index(name: str, index: dict[str, int], place: str) -> int:
    if name in index:
        return index[name]
    numbers = _number(name) is not None and not any(_number(known) is not None for known in index)
    why, near = ("is a number, but the classes have names", "") if numbers else ("is unknown", name)
    raise CorpusError(f"{place}: label {shown(name)} {why}; {did_you_mean(near, index)}")


def label_number(label: object, place: str) -> float:
    """Return a label as the number that it must be for regression."""
    number = None if isinstance(label, bool) else _number(str(label))
    if number is None:
        raise CorpusError(
            f"{place}: label {shown(label)} is not a number, as regression needs; mend it, or use --task classification"
        )
    if abs(number) > _LARGEST:
        raise CorpusError(f"{place}: label {shown(label)} is above {_LARGEST:.0e}; divide all numbers by the same one")
    return number


def _choice(example: Example) -> int:
    if example.label is None:
        return NOT_SCORED
    if not isinstance(example.label, int) or not 0 <= example.label < len(example.choices):
        n = len(example.choices)
        raise CorpusError(f"{example.place}: label {shown(example.label)} is none of the {n} choices; they count from 0")
    return example.label
