"""Files of CoNLL: a word with its label in each line, in columns, and an empty line after each sentence.

Tabs divide the columns if the first word's line has one, or else spaces. The word is in the first column and its label in the
last, but in the second and the fourth of CoNLL-U's ten; or where the task says, unless `txl predict` wrote the file. Lines of
`-DOCSTART-` are left out, as are comments, which begin with # and do not have the columns of the others, and of CoNLL-U words
that stand for several (1-2) or for none (1.1).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from transformer_xl.config.run import TaskConfig
from transformer_xl.data.columns import ColumnFinder
from transformer_xl.data.labels import Example
from transformer_xl.errors import CorpusError, counted
from transformer_xl.tokenizers.spaceless import join_words

DOCUMENT = "-DOCSTART-"
"""Begins a document, in a line of its own."""

_N_CONLLU = 10
_N_PREDICTED = 3  # columns of what `txl predict` writes: word, probability, label
_PROBABILITY = re.compile(r"[01]\.[0-9]{4}")
_COMMENT = re.compile(r"# ?(newdoc|newpar|sent_id|text|global\.columns)( |=|$)")  # of CoNLL-U, however many columns there are
_NO_WORD = re.compile(r"[0-9]+[-.][0-9]+")  # the first column of CoNLL-U

_Line = tuple[int, str]


class _Format(NamedTuple):
    """How the lines of a file are divided."""

    line: int  # which says so
    tab: str | None  # None: spaces divide columns
    n: int  # columns
    word: int  # index of the column
    label: int | None  # likewise; None: there are no labels


def read_sentences(
    lines: Iterable[_Line], file: str, task: TaskConfig, *, labelled: bool, reads_labels: bool
) -> Iterator[Example]:
    """Yield the sentences of a file's numbered lines.

    Args:
        lines: their numbers, and their text with or without its end.
        file: name for messages.
        task: which columns hold word and label, if it says so.
        labelled: every word must have a label.
        reads_labels: False: labels are left out.
    """
    finder = ColumnFinder(file, task, labelled=labelled)
    form: _Format | None = None
    rows: list[_Line] = []
    for number, line in chain(lines, [(0, "")]):
        text = line.rstrip("\r\n")
        if text.strip():
            rows += [] if text.startswith(DOCUMENT) or _COMMENT.match(text) else [(number, text)]
            continue
        if rows:
            if form is None and all(text.startswith("#") and not text.startswith("#\t") for _, text in rows):
                rows = []  # comments alone
                continue
            form = form or _format_of(rows, file, finder, labelled=labelled)
            words = list(_words_in(rows, form, file))
            if words:
                numbers, texts, labels = zip(*words, strict=True)
                label = labels if form.label is not None and reads_labels else None
                yield Example(join_words(texts), label=label, place=f"{file} line {numbers[0]}", words=texts, lines=numbers)
        rows = []
    if form is None and labelled:
        raise CorpusError(f"{file} has no sentence; give a file with a word and its label in each line")


def _format_of(rows: Sequence[_Line], file: str, finder: ColumnFinder, *, labelled: bool) -> _Format:
    line, text = next((row for row in rows if not row[1].startswith("#")), rows[-1])
    tab = "\t" if "\t" in text else None
    n = len(_cells(text, tab))
    if n == 1:
        if labelled:
            raise CorpusError(f"{file} line {line}: it has 1 column; give a word and its label in each line")
        return _Format(line, tab, n, 0, None)
    if n == _N_PREDICTED and _PROBABILITY.fullmatch(_cells(text, tab)[1]):
        return _Format(line, tab, n, 0, 2)
    word, label = finder.of_words(n, ("2", "4") if n == _N_CONLLU else ("1", str(n)))
    return _Format(line, tab, n, word, label)


def _words_in(rows: Sequence[_Line], form: _Format, file: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the word and the label of each row that is a word."""
    for number, text in rows:
        cells, place = _cells(text, form.tab), f"{file} line {number}"
        if len(cells) != form.n:
            if text.startswith("#"):
                continue
            why = "is one missing?" if len(cells) < form.n else "is a line end missing?"
            raise CorpusError(f"{place}: it has {counted(len(cells), 'column')}, but line {form.line} has {form.n}; {why}")
        if form.n == _N_CONLLU and _NO_WORD.fullmatch(cells[0]):
            continue
        word, label = cells[form.word], "" if form.label is None else cells[form.label].strip()
        if not word.strip() or (form.label is not None and not label):
            raise CorpusError(f"{place}: its {'label' if word.strip() else 'word'} is empty; give one, or leave the line out")
        yield number, word, label


def _cells(text: str, tab: str | None) -> list[str]:
    return text.split(tab) if tab else [cell for cell in text.split(" ") if cell]
