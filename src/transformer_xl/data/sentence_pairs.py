"""Pairs of sentences of which one is better, and texts whose last word is asked for: what `txl score` compares."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from transformer_xl.config.run import TaskConfig
from transformer_xl.data.examples import STDIN, read_examples, suffix_of
from transformer_xl.data.labels import Example
from transformer_xl.data.text_files import Piece, check_readable, read_blocks
from transformer_xl.errors import CorpusError

_PAIRS = (("sentence_good", "sentence_bad"), ("good", "bad"))


def read_pairs(source: Path | Iterable[bytes]) -> Iterator[Example]:
    """Yield pairs of sentences, the better one first: of JSON lines, TSV or CSV with the names of BLiMP, or of two columns.

    Raises:
        CorpusError: what cannot be read or has other columns, with its line.
    """
    if isinstance(source, Path):
        check_readable(source)
        name, first = f"'{source}'", next(read_blocks(Piece(source)), b"")
    else:
        source = iter(source)
        name, first = STDIN, next(source, b"")
        source = chain([first], source)
    line = first.partition(b"\n")[0].decode("utf-8-sig", "replace").rstrip("\r")
    is_csv = isinstance(source, Path) and suffix_of(source) == ".csv"
    names = line.split("," if is_csv else "\t")
    if is_json := line.lstrip().startswith("{"):
        try:
            names = list(json.loads(line))
        except ValueError:  # the reader says what is wrong
            names = list(_PAIRS[0])
    told = next((pair for pair in _PAIRS if set(pair) <= set(names)), None)
    if not told and (is_json or len(names) != 2):
        has = "no pairs" if not line.strip() else f"{len(names)} {'field' if is_json else 'column'}{'s' * (len(names) != 1)}"
        raise CorpusError(
            f"{name} has {has}; give two sentences a line, the better first, or name them {' and '.join(_PAIRS[0])}"
        )
    text, pair = told or ("1", "2")
    return read_examples(source, TaskConfig(kind="classification", text=text, pair=pair), labelled=False, reads_labels=False)


def read_last_words(path: Path) -> Iterator[Example]:
    """Yield the texts of LAMBADA: JSON lines with a `text`."""
    return read_examples(path, TaskConfig(kind="classification"), labelled=False, reads_labels=False)
