"""Padding in files of ids: what rows of one length end in because they were filled up."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from transformer_xl.console import warn
from transformer_xl.data.ids import tables, text_end
from transformer_xl.tokenizers.ids import PadId

_TABLES, _ROWS = 64, 256  # looked at first: so many tables, and of each all of so many rows, half of as many more, and so on


def find_padding(paths: Sequence[Path], name: str, *, can_leave_out: bool, quiet: bool = False) -> PadId:
    """Return the id that fills up rows and is left out as padding; auto if there is none. What becomes of it is said.

    Most rows of arrays of two axes, or of lines of one length, end in it at least twice, and some in more of it than others. If
    it also stands before their ends, or nothing can be left out any more, it is text. An end mark of this id goes with it.
    """
    votes = Counter[int | None]()
    for rows in islice(chain.from_iterable(map(tables, paths)), _TABLES):
        votes.update(_ends(rows))
    (pad_id, n), *_ = *votes.most_common(1), (None, 0)
    if pad_id is None or 2 * n <= votes.total():
        return "auto"
    n_pads, n_id, leaves_out = Counter[int](), 0, can_leave_out
    for row in (read() for path in paths for rows in tables(path) for read in rows):
        end = text_end(row, pad_id)
        n_pads[len(row) - end] += 1
        n_id, leaves_out = n_id + len(row), leaves_out and not (row[:end] == pad_id).any()
    n_pad = sum(n * rows for n, rows in n_pads.items())
    if len(n_pads) == 1 or n_pad == n_id:
        return "auto"
    why = "left out, an end mark of the same id, too" if leaves_out else "read as text"
    other = "none keeps them" if leaves_out else f"{pad_id}, set for a training, leaves them out"
    found = f"{n_pad:,} of the {n_id:,} ids of '{name}' are {pad_id} at the ends of rows"
    warn(f"{found}, as padding is, and {why}; tokenizer.pad_id={other}", quiet=quiet)
    return pad_id if leaves_out else "auto"


def _ends(rows: Iterable[Callable[[], np.ndarray]]) -> Counter[int | None]:
    """Count the ids in which rows of one length end twice; None: in none. Rows are drawn, and weigh what they stand for."""
    ends, lengths = Counter[int | None](), set[int]()
    for i, read in enumerate(rows):
        if i % (weight := 1 + i // _ROWS) == 0:
            lengths.add(len(row := read()))
            ends[int(row[-1]) if len(row) > 1 and row[-1] == row[-2] else None] += weight
        if len(lengths) > 1:
            return Counter()
    return ends if ends.total() > 1 else Counter()
