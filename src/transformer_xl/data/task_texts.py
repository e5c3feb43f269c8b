"""The texts of a task: which files are there to train, validate and test on, and what is in them."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.config.model import HeadConfig
from transformer_xl.config.run import TaskConfig
from transformer_xl.data.columns import FILES
from transformer_xl.data.entities import name_entities, odd_label, scheme_of
from transformer_xl.data.examples import (
    FORMATS,
    UNLABELLED,
    WORD_FORMATS,
    entries,
    is_race,
    read_examples,
    subdirectories,
    suffix_of,
)
from transformer_xl.data.labels import Example, check_scheme, label_names, labels_of
from transformer_xl.data.order import permutation
from transformer_xl.data.squad import Question, divide, held_out, learnable, read_squad
from transformer_xl.data.text_files import COMPRESSED
from transformer_xl.errors import CorpusError, beside, shown

_NAMES = {
    "train": ("train", "training"),
    "valid": ("dev", "valid", "validation", "val", "dev_matched", "validation_matched"),
    "test": ("test", "test_matched"),
}
_VALID_SHARE = 0.1  # of the training texts, where there is no file to validate on
_MOST_CLASSES = 1000  # that each have a text to validate on; more are numbers
_MOST_NAMED = 12  # classes in a note
_AROUND = re.compile(r"-v\d[\d.]*$|^.*-ud-")  # versions of SQuAD's files, and what treebanks' names begin with
_MISMATCHED = ("dev_mismatched", "validation_mismatched", "test_mismatched")


@dataclass(frozen=True)
class TaskFiles:
    """What there is to train, validate and test on: files, or directories of classes or of documents."""

    train: Path  # what is learned from
    valid: Path | None = None  # None: a share of `train` is cut off
    test: Path | None = None  # None: there is none
    notes: tuple[str, ...] = ()  # sentences about what is not read


@dataclass(frozen=True)
class TaskTexts:
    """The examples of a task, whose labels have been checked; of spans, `Question`s."""

    train: Sequence[Any]  # in the order of the file
    valid: Sequence[Any]  # likewise
    test: Sequence[Any] | None  # None: there is no file with labels
    labels: tuple[str, ...]  # names of the classes or labels, in the order of their scores
    notes: tuple[str, ...] = ()  # sentences about what was not read, or was cut off


def find_files(task: TaskConfig) -> TaskFiles:
    """Return what a task is trained, validated and tested on.

    `task.data` is a file; or a directory with files, or directories of classes or of RACE, that are called train, dev (or
    valid, validation, val) and test; or such a directory of classes itself, or one of documents. `task.valid` and `task.test`
    go before these.
    """
    data = Path(task.data)
    valid, test = (Path(name) if name else None for name in (task.valid, task.test))
    if not task.data:
        raise CorpusError("there are no texts to learn from; give a file or directory by --data")
    if not data.is_dir():
        return TaskFiles(data, valid, test)
    formats = WORD_FORMATS if task.kind == "tokens" else FORMATS
    found = {purpose: _find(data, purpose, formats) for purpose in _NAMES}
    notes = [f"'{each}' is not read; give it as task.valid or task.test" for each in _called(data, _MISMATCHED, formats)]
    train = found["train"]
    if train is None:
        is_found = task.document == FILES or (task.kind != "tokens" and (is_race(data) or len(_classes(data)) >= 2))
        if not is_found:
            raise CorpusError(
                f"'{data}' has no file to train on: it needs train{formats[0]} (or {', '.join(formats[1:])}), or one directory "
                f"per class{beside(data / 'train', Path.is_file)}"
            )
        train = data
    notes += [f"'{train / name}' is not read: its texts have no labels" for name in UNLABELLED if (train / name).is_dir()]
    return TaskFiles(train, valid or found["valid"], test or found["test"], tuple(notes))


def read_task(task: TaskConfig, *, seed: int, known_labels: Collection[str] = ()) -> TaskTexts:
    """Read all examples, with labels as a model knows them, and cut off a share to validate on if there is no file for it."""
    files, is_span = find_files(task), task.kind == "span"
    notes = list(files.notes)
    train: list[Any] = _read(files.train, task, known_labels=known_labels)
    if is_span:
        train, about_places = learnable(train, files.train)
        notes += about_places
    labels = () if is_span else label_names(task, train)
    if task.kind == "tokens" and (odd := odd_label(labels)) is not None:
        place = next(each.place for each in train if odd in each.label)
        raise CorpusError(
            f"{place}: label {shown(odd)} is neither O nor begins with B-, I-, E- or S- as others do; write it so"
        )
    scheme = scheme_of([each.label for each in train]) if task.kind == "tokens" and name_entities(labels) else None
    if scheme == "IOB1":
        notes.append("labels are IOB1: an entity begins with I-, or with B- right after another of its type")
    if files.valid:
        valid = _read(files.valid, task, known_labels=labels)
    else:
        apart: Any = {"span": held_out, "choice": passages_apart}.get(task.kind, documents_apart if task.document else cut_off)
        train, valid = apart(train, _VALID_SHARE, seed=seed)
        notes.append(f"{len(valid):,} of {len(train) + len(valid):,} texts of '{files.train}' are kept to validate on")
        held = {str(each.label) for each in valid} if task.kind == "classification" else labels
        if lacking := [shown(name) for name in labels if name not in held]:
            more = f" and {len(lacking) - _MOST_NAMED:,} more" if len(lacking) > _MOST_NAMED else ""
            notes.append(f"none of these is of class {', '.join(lacking[:_MOST_NAMED])}{more}; give more texts, or task.valid")
    test = _read(files.test, task, labelled=False, known_labels=labels) if files.test else None
    if test is not None and _has_no_labels(test, labels):
        notes.append(f"'{files.test}' is not scored: its texts have no labels")
        test = None
    for each in test or ():
        if not _has_label(each):
            raise CorpusError(f"{each.place}: it has no label, unlike others; give one, or leave it out")
    if not is_span:
        head = HeadConfig(kind=task.kind, labels=labels)
        texts = [*train, *valid, *(test or ())]
        for some in ([each] for each in texts) if task.kind == "tokens" else [texts]:  # one long sentence lengthens no others
            labels_of(head, some)
    if scheme:
        check_scheme([*train, *valid, *(test or ())], scheme)
    return TaskTexts(train, valid, test, labels, tuple(notes))


def _read(path: Path, task: TaskConfig, *, labelled: bool = True, known_labels: Collection[str] = ()) -> list[Any]:
    if task.kind == "span":
        return read_squad(path, labelled=labelled)
    if examples := list(read_examples(path, task, labelled=labelled, known_labels=known_labels)):
        return examples
    raise CorpusError(f"'{path}' has no texts; give a file with some")


def cut_off(examples: Sequence[Example], share: float, *, seed: int) -> tuple[list[Example], list[Example]]:
    """Return examples without a random share of them, and this share; both in their order."""
    n = len(examples)
    if n < 2:
        raise CorpusError(f"{examples[0].place} is the only text; give more, because one is held out to validate")
    n_cut = min(max(round(n * share), 1), n - 1)
    order = permutation(n, seed)
    labels = np.array([each.label if isinstance(each.label, str) else "" for each in examples])
    by_class = order[np.argsort(labels[order], kind="stable")]
    is_cut = np.zeros(n, bool)  # evenly from all classes, or a small part could be nearly all of one
    is_cut[by_class[((np.arange(n_cut) + 0.5) * n / n_cut).astype(np.int64)]] = True
    _, sizes = np.unique(labels, return_counts=True)
    if len(sizes) <= _MOST_CLASSES:
        _spread(is_cut, np.split(by_class, np.cumsum(sizes)[:-1]))
    kept, cut = ([examples[i] for i in np.flatnonzero(chosen).tolist()] for chosen in (~is_cut, is_cut))
    return kept, cut


def _spread(is_cut: np.ndarray, classes: Sequence[np.ndarray]) -> None:
    """Leave a text of each class to be learned from and, of those with two, as far as the cut ones suffice, one among these."""
    sizes, cut = np.array([len(each) for each in classes]), np.array([is_cut[each].sum() for each in classes])

    def move(giver: int, taker: int) -> None:
        is_cut[next(i for i in classes[giver] if is_cut[i])] = False
        is_cut[next(i for i in classes[taker] if not is_cut[i])] = True
        cut[giver] -= 1
        cut[taker] += 1

    for giver in np.flatnonzero(cut == sizes).tolist():
        if (sizes - cut).max() > 1:
            move(giver, int((sizes - cut).argmax()))
    for taker in np.flatnonzero((cut == 0) & (sizes > 1)).tolist():
        if cut.max() > 1:
            move(int(cut.argmax()), taker)


def passages_apart(examples: Sequence[Example], share: float, *, seed: int) -> tuple[list[Example], list[Example]]:
    """Return examples as `cut_off` does, but all about the same text on the same side, as several questions of RACE are."""
    passages = [example.text for example in examples]
    return divide(examples, passages, share, seed=seed) if len(set(passages)) > 1 else cut_off(examples, share, seed=seed)


def documents_apart(examples: Sequence[Example], share: float, *, seed: int) -> tuple[list[Example], list[Example]]:
    """Return examples as `cut_off` does, but all rows of a document on the same side."""
    documents = [example.document for example in examples]
    if len(set(documents)) < 2:
        raise CorpusError(f"{examples[0].place} begins the only document; give more, because one is held out to validate")
    return divide(examples, documents, share, seed=seed)


def _has_label(text: Example | Question) -> bool:
    return text.is_labelled if isinstance(text, Question) else text.label is not None


def _has_no_labels(texts: Sequence[Example | Question], labels: tuple[str, ...]) -> bool:
    """Return whether no text has a label; Hugging Face writes -1 for none."""
    is_minus_one = all(isinstance(text, Example) and text.label in ("-1", -1.0) for text in texts)
    return not any(map(_has_label, texts)) or (is_minus_one and "-1" not in labels)


def _find(data: Path, purpose: str, formats: Sequence[str]) -> Path | None:
    for name in _NAMES[purpose]:
        found = _called(data, (name,), formats)
        if len(found) > 1:
            raise CorpusError(f"'{data}' has more than one '{name}': '{found[0].name}' and '{found[1].name}'; move one away")
        if found:
            return found[0]
    return None


def _called(data: Path, names: tuple[str, ...], formats: Sequence[str]) -> list[Path]:
    """Return the files and directories that have one of these names before their endings, or before a version."""
    return [path for path in entries(data) if _stem(path) in names and (path.is_dir() or suffix_of(path) in formats)]


def _stem(path: Path) -> str:
    name = path.stem if path.suffix in COMPRESSED else path.name
    return _AROUND.sub("", (name if path.is_dir() else Path(name).stem).lower())


def _classes(data: Path) -> list[Path]:
    named = {name for names in _NAMES.values() for name in names}
    folders = subdirectories(data)
    return [] if any(each.name in named for each in folders) else [each for each in folders if each.name not in UNLABELLED]
