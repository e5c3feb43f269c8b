"""Files of texts with labels as examples: tables, JSON, RACE, CoNLL (`conll.py`), and directories with one directory per class.

Rows may belong to documents: by a column, or because each file of a directory is one.

Tables are TSV (every tab divides, quotation marks are text, as in GLUE) or CSV; see `columns.py` for which columns are read.

Files are read line by line, however long they are; a line is held as a whole.
"""

import csv
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from transformer_xl.config.run import TaskConfig
from transformer_xl.data.columns import FILES, ColumnFinder, Columns
from transformer_xl.data.conll import DOCUMENT, read_sentences
from transformer_xl.data.labels import Example, Label, label_number, whole_documents
from transformer_xl.data.text_files import BLOCK_BYTES, COMPRESSED, MAX_LINE_BYTES, FileRange, numbered_lines, read_blocks
from transformer_xl.errors import CorpusError, counted, shown
from transformer_xl.files import files_below
from transformer_xl.tokenizers.spaceless import SPACELESS, join_words
from transformer_xl.untrusted import is_unicode, not_utf8, parse_texts

FORMATS = (".tsv", ".csv", ".jsonl", ".json", ".ndjson", ".txt")
"""Endings of files with examples, before those of compressed files."""

WORD_FORMATS = (".conll", ".conllu", ".tsv", ".jsonl", ".json", ".ndjson", ".txt")
"""Endings of files whose words have labels. A file with any other ending is read as one of CoNLL."""

UNLABELLED = ("unsup",)
"""The directory of IMDB that is no class."""

STDIN = "standard input"

_JSON = (".jsonl", ".ndjson", ".json")
_RACE = ("high", "middle")
_CONLL = (".conll", ".conllu", ".tsv")
_TRUE, _FALSE = ("1", "1.0", "true"), ("0", "0.0", "false")

_GAP = re.compile(rf"(?<![^\W{SPACELESS}])_+|_+(?![^\W{SPACELESS}])")  # nothing inside a word, as in my_file
_HEADS = ("text", "sentence", "article", "question")  # of a line of names
_EMPTY = object()  # in place of a JSON object

Fields = Mapping[str, Any]


def read_examples(
    source: Path | Iterable[bytes],
    task: TaskConfig,
    *,
    labelled: bool = True,
    reads_labels: bool = True,
    for_scores: bool = False,
    known_labels: Collection[str] = (),
    keeps_empty: bool = False,
) -> Iterator[Example]:
    """Yield the examples of a file, of a directory with one directory per class, or of standard input, in constant memory.

    Without labels, all files of a directory are texts.

    Args:
        source: path with one of the endings `.tsv .csv .txt .jsonl .ndjson .json`, then perhaps one of `.gz .xz .zst`; or
            bytes, such as standard input, of lines that are texts, tables divided by tabs, or JSON.
        task: its kind, and the names of columns, where they are told.
        labelled: every example must have a label; False: it may.
        reads_labels: False: labels are left out, whatever they are.
        for_scores: texts are scored against each other, and never read from a directory: the better sentence comes first;
            choices are whole texts, and not equally many in each example.
        known_labels: of a model; a number is the one of them that is equal to it. Where words need no labels, lines are texts,
            unless the first one ends in one of these, or the file is called .conll, .conllu or .tsv.
        keeps_empty: an empty line is an example without text, as soon as it comes; False: it is an error before another text.

    Raises:
        CorpusError: a file that is none of these, or holds what does not fit the task; its message names the line.
    """
    path = source if isinstance(source, Path) else None
    how = {"labelled": labelled, "reads_labels": reads_labels, "for_scores": for_scores, "keeps_empty": keeps_empty}
    reader = _Reader(path, task, known_labels, **how)
    if not isinstance(source, Path):
        if hasattr(source, "readline"):  # which takes no more than it is told, unlike iteration
            source = iter(partial(cast("BinaryIO", source).readline, BLOCK_BYTES), b"")
        return whole_documents(reader.lines(source))
    is_words = task.kind == "tokens"
    if source.is_dir() and task.document == FILES:
        files = _document_files(source, WORD_FORMATS if is_words else FORMATS)
        return chain.from_iterable(_rows(file, read_examples(file, task, known_labels=known_labels, **how)) for file in files)
    if source.is_dir() and is_words and labelled:
        raise CorpusError(f"'{source}' is a directory; give a file of words with labels, such as train{WORD_FORMATS[0]}")
    if source.is_dir() and not for_scores:
        if not labelled and not is_race(source):
            return reader.files(source)
        return reader.race(_race_files(source)) if is_race(source) else reader.directories(source)
    kind = suffix_of(source)
    if kind not in FORMATS and source.is_file() and not is_words:
        raise CorpusError(
            f"cannot tell what '{source}' holds by its name; give a file that ends in {', '.join(FORMATS)}, or "
            f"in one of these and {', '.join(COMPRESSED)}"
        )
    return whole_documents(reader.lines(read_blocks(FileRange(source)), kind))


def _rows(file: Path, rows: Iterator[Example]) -> Iterator[Example]:
    """Yield the rows of a file that is a document, which must have some."""
    first = next(rows, None)
    if first is None:
        raise CorpusError(f"'{file}' is a document without rows; give it some, or leave it out")
    yield first
    yield from rows


def _document_files(path: Path, formats: Sequence[str]) -> list[Path]:
    if files := [each for each in entries(path) if each.is_file() and suffix_of(each) in formats]:
        return files
    raise CorpusError(f"'{path}' has no documents; give files that end in {', '.join(formats)}, one for each")


def suffix_of(path: Path) -> str:
    """Return the ending of a name in small letters, without that of a compressed file.

    Example:
        >>> suffix_of(Path("train.TSV.xz"))
        '.tsv'
    """
    return (Path(path.stem) if path.suffix in COMPRESSED else path).suffix.lower()


def read_pairs(source: Path | Iterable[bytes]) -> Iterator[Example]:
    """Yield pairs of sentences, the better one first: of JSON lines, TSV or CSV with the names of BLiMP, or of two columns."""
    task = TaskConfig(kind="classification")
    return read_examples(source, task, labelled=False, reads_labels=False, for_scores=True)


def read_choices(source: Path | Iterable[bytes]) -> Iterator[Example]:
    """Yield texts with what may stand in their gap `_` or at their end, whole texts as `choices`; the label is the right one.

    They are JSON lines with a text, choices and perhaps an answer, or tables of a text and its choices.
    """
    return read_examples(source, TaskConfig(kind="choice"), labelled=False, for_scores=True)


def read_last_words(source: Path | Iterable[bytes]) -> Iterator[Example]:
    """Yield the texts of LAMBADA: JSON lines with a `text`."""
    return read_examples(source, TaskConfig(kind="classification", text="text"), labelled=False, reads_labels=False)


class _Reader:
    """Reads one source; `path` None is standard input."""

    def __init__(
        self,
        path: Path | None,
        task: TaskConfig,
        known_labels: Collection[str] = (),
        *,
        labelled: bool,
        reads_labels: bool,
        for_scores: bool = False,
        keeps_empty: bool = False,
    ) -> None:
        self._name = STDIN if path is None else f"'{path}'"
        self._task, self._kind, self._labelled, self._reads_labels = task, task.kind, labelled, reads_labels
        self._known_labels, self._keeps_empty = frozenset(known_labels), keeps_empty
        better_first = for_scores and task.kind != "choice"
        self._finder = ColumnFinder(self._name, task, labelled=labelled, better_first=better_first)
        self._n_choice, self._for_scores = 0, for_scores
        self._in_documents = task.document is not None
        self._document = (STDIN if path is None else path.name) if task.document == FILES else None

    # what is read

    def lines(self, blocks: Iterable[bytes], kind: str = ".txt") -> Iterator[Example]:
        lines = numbered_lines(_without_mark(blocks), self._name)
        first = next(lines, None)
        while self._keeps_empty and kind != ".json" and first is not None and not first[1].strip():
            yield Example("", place=f"{self._name} line {first[0]}")
            first = next(lines, None)
        if first is None:
            if self._labelled:
                raise CorpusError(f"{self._name} is empty; give a file with texts")
            return
        lines = chain([first], lines)
        if kind in _JSON or first[1].lstrip().startswith(b"{"):
            is_list = kind == ".json" and first[1].lstrip().startswith(b"[")
            yield from self._objects(self._listed(lines) if is_list else self._parsed(lines))
        elif self._kind == "tokens":
            texts = self._texts(lines)
            if self._is_conll(first[1], kind):
                if self._in_documents and self._document is None:
                    raise CorpusError(
                        f"{self._name} is read as CoNLL, columns of words and labels, which name no documents; give JSON lines "
                        f"with a {shown(self._task.document)} beside tokens and labels, or --document {FILES}: each file is one"
                    )
                how = {"labelled": self._labelled, "reads_labels": self._reads_labels}
                sentences = read_sentences(texts, self._name, self._task, **how)
                yield from (self._checked(replace(sentence, document=self._document)) for sentence in sentences)
            else:
                yield from self._table(((number, [text.rstrip("\r\n")]) for number, text in texts), ".txt")
        else:
            rows = self._csv(lines) if kind == ".csv" else self._tsv(lines)
            yield from self._scored_choices(rows) if self._kind == "choice" and self._for_scores else self._table(rows, kind)

    def _is_conll(self, first: bytes, kind: str) -> bool:
        """Return whether a file's first line, or its ending, shows columns of words rather than texts."""
        cells = first.decode("utf-8", "replace").split()
        is_known = len(cells) > 1 and cells[-1] in self._known_labels
        return self._labelled or kind in _CONLL or is_known or cells[:1] == [DOCUMENT]

    def race(self, files: Sequence[Path]) -> Iterator[Example]:
        """Yield the examples of files of one JSON object each, as RACE has them."""

        def objects() -> Iterator[tuple[str, Any]]:
            for file in files:
                yield f"'{file}'", self._json(_whole(file), f"'{file}'")

        yield from self._objects(objects())

    def directories(self, path: Path) -> Iterator[Example]:
        for folder in class_directories(path):
            for file in filter(Path.is_file, entries(folder)):
                place = f"'{file}'"
                text = _decoded(_whole(file), place)
                yield self._checked(Example(text, label=self._label_of(folder.name, place), place=place, id=file.stem))

    def files(self, path: Path) -> Iterator[Example]:
        """Yield all files in a directory and those in it, each as one text; its name is its id."""
        for file in files_below(path):
            place = f"'{file}'"
            yield self._checked(Example(_decoded(_whole(file), place), place=place, id=str(file.relative_to(path))))

    def _texts(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
        for number, line in lines:
            yield number, _decoded(line, f"{self._name} line {number}")

    # tables

    def _tsv(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, list[str]]]:
        for number, text in self._texts(lines):
            yield number, text.rstrip("\r\n").split("\t")

    def _csv(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, list[str]]]:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        texts = self._texts(lines)
        first = number, _ = next(texts)
        rows = csv.reader((text for _, text in chain([first], texts)), strict=True)
        try:
            for row in rows:
                yield number, row or [""]
                number = first[0] + rows.line_num
        except csv.Error as error:
            raise CorpusError(
                f"{self._name} line {number}: the row that begins here is not CSV ({error}); double the quotation marks inside "
                "of texts, or give a .tsv file, in which they are text"
            ) from None

    def _table(self, rows: Iterator[tuple[int, list[str]]], kind: str) -> Iterator[Example]:
        first = next(rows)
        if first[1] == [""]:
            self._refuse_row(f"{self._name} line 1", 0, 0)
        names, columns, has_names = self._finder.in_table(first[1], kind)
        blank = None
        for number, row in rows if has_names else chain([first], rows):
            if row == [""] or (self._keeps_empty and not "".join(row).strip()):
                if self._keeps_empty:
                    yield Example("", place=f"{self._name} line {number}")
                else:
                    blank = blank or number
                continue
            place = f"{self._name} line {blank or number}"
            if blank or len(row) != len(names):
                self._refuse_row(place, 0 if blank else len(row), len(names))
            yield self._example(dict(zip(names, row, strict=True)), columns, place)

    def _scored_choices(self, rows: Iterator[tuple[int, list[str]]]) -> Iterator[Example]:
        for number, (text, *choices) in rows:
            place = f"{self._name} line {number}"
            if number == 1 and text.strip().lower() in _HEADS:
                raise CorpusError(f"{place} holds names of columns; leave it out, or give JSON lines, which have names")
            yield from self._objects([(place, {"text": text, "choices": choices})])

    def _refuse_row(self, place: str, n: int, n_name: int) -> None:
        if n == 0:
            raise CorpusError(f"{place}: it is empty; give a text, or leave the line out")
        why = "is a tab missing?" if n < n_name else "is there a tab or comma inside of a text?"
        raise CorpusError(f"{place}: it has {counted(n, 'column')}, but line 1 has {n_name}; {why}")

    # JSON

    def _json(self, data: bytes, place: str) -> Any:
        _decoded(data, place)
        return parse_texts(data, place)

    def _parsed(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[str, Any]]:
        for number, line in lines:
            if line.strip() or self._keeps_empty:
                place = f"{self._name} line {number}"
                yield place, self._json(line, place) if line.strip() else _EMPTY

    def _listed(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[str, Any]]:
        for number, item in enumerate(self._json(b"".join(line for _, line in lines), self._name), 1):
            yield f"{self._name} item {number}", item

    def _objects(self, objects: Iterable[tuple[str, Any]]) -> Iterator[Example]:
        columns = None
        for place, value in objects:
            if value is _EMPTY:
                yield Example("", place=place)
                continue
            if not isinstance(value, dict):
                raise CorpusError(f"{place}: {shown(value)} is not a JSON object with a text and a label")
            for where, fields in _questions(value, place):
                columns = columns or self._finder.named(list(fields))
                yield self._example(fields, columns, where)

    # examples

    def _example(self, fields: Fields, columns: Columns, place: str) -> Example:
        name = fields.get(columns.id) if columns.id else None
        name = None if name is None else str(name)
        document = self._document if columns.document is None else _document(fields, columns.document, place)
        if self._kind == "tokens" and not isinstance(fields.get(columns.text), str):
            return self._checked(replace(self._with_words(fields, columns, place), id=name, document=document))
        text = self._text(fields, columns.text, place)
        pair = None if columns.pair is None else self._text(fields, columns.pair, place)
        example = Example(text, pair, place=place, id=name, document=document)
        if columns.choices:
            return self._checked(self._with_choices(example, fields, columns))
        return self._checked(replace(example, label=self._label(fields, columns.label, place)))

    def _with_words(self, fields: Fields, columns: Columns, place: str) -> Example:
        words = fields.get(columns.text)
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word.strip() for word in words):
            raise CorpusError(f"{place}: {shown(columns.text)} is {shown(words)}, not a list of words")
        labels = fields.get(columns.label[0]) if columns.label and self._reads_labels else None
        if labels is not None and (not isinstance(labels, list) or len(labels) != len(words)):
            n = counted(len(labels), "label") if isinstance(labels, list) else "no list of labels"
            raise CorpusError(f"{place}: it has {counted(len(words), 'word')}, but {n}; give each word one")
        label = None if labels is None else tuple(self._class_name(each, place) for each in labels)
        if label is not None and not all(map(str.strip, label)):
            raise CorpusError(f"{place}: the label of a word is empty; give one (O if it belongs to nothing)")
        return Example(join_words(words), label=label, place=place, words=tuple(words))

    def _text(self, fields: Fields, name: str, place: str) -> str:
        value = fields.get(name)
        if value is None:
            raise CorpusError(f"{place}: it has no {shown(name)}; give a text, or leave it out")
        if not isinstance(value, str):
            raise CorpusError(f"{place}: {shown(name)} is {shown(value)}, not a text")
        if not value.strip():
            raise CorpusError(f"{place}: {shown(name)} is an empty text; give one, or leave the line out")
        return value

    def _checked(self, example: Example) -> Example:
        if not example.text.strip():
            raise CorpusError(f"{example.place}: the text is empty; give one, or leave it out")
        if self._labelled and example.label is None:
            raise CorpusError(f"{example.place}: it has no label; give one, or leave it out")
        if self._in_documents and example.document is None:
            raise CorpusError(
                f"{example.place}: it belongs to no document; give a table with them, or --document {FILES} if each file is one"
            )
        return example

    def _label(self, fields: Fields, names: tuple[str, ...], place: str) -> Label | None:
        if not self._reads_labels:
            return None
        if self._kind == "multilabel" and len(names) > 1:
            values = [fields.get(name) for name in names]
            if all(value in (None, "") for value in values):
                return None
            return tuple(name for name, value in zip(names, values, strict=True) if _is_true(value, name, place))
        return self._label_of(fields.get(names[0]), place) if names else None

    def _label_of(self, value: Any, place: str) -> Label | None:
        if self._kind == "multilabel" and value is not None:
            values = value if isinstance(value, list) else self._class_name(value, place).split(",")
            return tuple(dict.fromkeys(name for each in values if (name := self._class_name(each, place))))
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        return label_number(value, place) if self._kind == "regression" else self._class_name(value, place)

    def _class_name(self, value: Any, place: str) -> str:
        """Return the name of a label: of 1 and 1.0 the one that a model's classes know; else JSON's numbers are both 1."""
        if isinstance(value, bool):
            return str(value).lower()
        if not isinstance(value, str | int | float):
            raise CorpusError(f"{place}: label {shown(value)} is neither a name nor a number; give one")
        name = str(value).strip()
        whole = str(int(value)) if not isinstance(value, str) and value % 1 == 0 else name.removesuffix(".0")
        if whole.removeprefix("-").isdecimal():
            unknown = name if isinstance(value, str) else whole
            name = next((each for each in (name, whole, f"{whole}.0") if each in self._known_labels), unknown)
        if not is_unicode(name):
            raise CorpusError(f"{place}: label {shown(name)} has half of a character (a lone surrogate); write it in UTF-8")
        return name

    def _with_choices(self, example: Example, fields: Fields, columns: Columns) -> Example:
        assert columns.choices is not None
        place, choices = example.place, fields.get(columns.choices)
        if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
            raise CorpusError(f"{place}: {shown(columns.choices)} is not a list of texts to choose from")
        if empty := [number for number, each in enumerate(choices, start=1) if not each.strip()]:
            raise CorpusError(f"{place}: choice {empty[0]} is empty; give it some text")
        self._n_choice = (0 if self._for_scores else self._n_choice) or len(choices)
        if len(choices) != self._n_choice or len(choices) < 2:
            least = f"; those before have {self._n_choice}" if len(choices) != self._n_choice else ", not two or more"
            raise CorpusError(f"{place}: it has {counted(len(choices), 'choice')}{least}")
        if columns.question is not None:
            question = self._text(fields, columns.question, place)
            choices = [answered(question, choice) for choice in choices]
        if self._for_scores:
            choices = [join_words([example.text, each]) for each in choices] if columns.question else _filled(example, choices)
        answer = fields.get(columns.label[0]) if columns.label and self._reads_labels else None
        text = "" if answer is None else self._class_name(answer, place)
        return replace(example, choices=tuple(choices), label=_chosen(text, len(choices), place))


def answered(question: str, answer: str) -> str:
    """Return a question with its answer: in place of `_`, or else after it. XLNet's `run_race.py` does the same.

    Example:
        >>> answered("Tom is _ .", "ill"), answered("Who is ill?", "Tom")
        ('Tom is ill .', 'Who is ill? Tom')
    """
    return question.replace("_", answer) if "_" in question else join_words([question, answer])


def _filled(example: Example, choices: Sequence[str]) -> list[str]:
    """Return a text with each choice in its gap, or else at its end."""
    begin, *others = _GAP.split(example.text)
    if len(others) > 1:
        raise CorpusError(f"{example.place}: it has {len(others)} gaps _; give one, and leave out lines that are none")
    return [begin + each + others[0] if others else join_words([begin, each]) for each in choices]


def _chosen(text: str, n_choice: int, place: str) -> int | None:
    """Return the index of the choice that is right, written as an index from 0, or as a letter from A."""
    if not text:
        return None
    if text in map(str, range(n_choice)):
        return int(text)
    letters = string.ascii_uppercase[:n_choice]
    if len(text) == 1 and (place_of := letters.find(text.upper())) >= 0:
        return place_of
    raise CorpusError(
        f"{place}: label {shown(text)} is none of its {n_choice} choices; they are 0 to {n_choice - 1}, or A to {letters[-1]}"
    )


def _questions(value: dict[str, Any], place: str) -> Iterator[tuple[str, Fields]]:
    """Yield the questions of a passage of RACE as objects of their own; what has no list of questions is one."""
    questions = value.get("questions")
    if not isinstance(questions, list):
        yield place, value
        return
    options, answers = value.get("options"), value.get("answers") or [None] * len(questions)
    if not isinstance(options, list) or not isinstance(answers, list) or not len(options) == len(answers) == len(questions):
        n = counted(len(questions), "question")
        raise CorpusError(f"{place}: it has {n}, but not as many lists of options, and answers")
    name = str(value.get("id", ""))
    for i, (question, option, answer) in enumerate(zip(questions, options, answers, strict=True), 1):
        fields = {"article": value.get("article"), "question": question, "options": option, "answer": answer}
        yield f"{place} question {i}", fields | ({"id": f"{name}/{i}"} if name else {})


def _document(fields: Fields, column: str, place: str) -> str:
    value = fields.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int) or not (name := str(value).strip()):
        raise CorpusError(f"{place}: {shown(column)} is {shown(value)}, and names no document; give the name or number of one")
    return name


def _is_true(value: Any, name: str, place: str) -> bool:
    text = str(value).strip().lower()
    if text not in (*_TRUE, *_FALSE):
        raise CorpusError(f"{place}: label {shown(name)} is {shown(value)}; a column of one label holds 0 or 1")
    return text in _TRUE


def _decoded(data: bytes, place: str) -> str:
    if b"\0" in data:
        raise CorpusError(f"{place}: it is binary, not text: give another file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{place}: {not_utf8(error)}") from None


def _without_mark(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks without the byte order mark that some programs write first."""
    blocks = iter(blocks)
    yield next(blocks, b"").removeprefix(b"\xef\xbb\xbf")
    yield from blocks


def _whole(file: Path) -> bytes:
    return b"".join(read_blocks(FileRange(file))).removeprefix(b"\xef\xbb\xbf")


def class_directories(path: Path) -> list[Path]:
    """Return the directories of classes in a directory, sorted; without that of texts without labels."""
    folders = [each for each in subdirectories(path) if each.name not in UNLABELLED]
    if len(folders) < 2:
        raise CorpusError(f"'{path}' has {len(folders)} directories of classes; give a file, or a directory with two or more")
    return folders


def subdirectories(path: Path) -> list[Path]:
    """Return the directories in a directory, sorted, without hidden ones."""
    return [each for each in entries(path) if each.is_dir()]


def entries(path: Path) -> list[Path]:
    """Return what is in a directory, sorted, without what is hidden."""
    return sorted(each for each in path.iterdir() if not each.name.startswith("."))


def _race_files(path: Path) -> list[Path]:
    folders = [each for each in subdirectories(path) if each.name in _RACE] or [path]
    return [file for folder in folders for file in entries(folder) if suffix_of(file) == ".txt" and file.is_file()]


def is_race(path: Path) -> bool:
    """Return whether a directory, or its high and middle, holds files of JSON objects, as RACE does."""
    files = _race_files(path)
    return bool(files) and next(read_blocks(FileRange(files[0])), b"").lstrip().startswith(b"{")
