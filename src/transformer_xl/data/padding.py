"""Padding in files of ids: what rows of one length end in because they were filled up."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

from transformer_xl.console import warn
from transformer_xl.data.ids import tables, text_end

_TABLES, _ROWS = 64, 256  # looked at first: so many tables, and so many rows of each


def find_padding(paths: Sequence[Path], name: str, *, can_leave_out: bool, quiet: bool = False) -> int | None:
    """Return the id that fills up rows and is left out as padding; None if there is none. What becomes of it is said.

    Most rows of arrays of two axes, or of lines of one length, end in it at least twice, and some in more of it than others. If
    it also stands before their ends, or nothing can be left out any more, it is text.
    """
    votes, n_row = Counter[int](), 0
    for rows in islice(chain.from_iterable(map(tables, paths)), _TABLES):
        ends = [(len(row), row[-2:].tolist()) for row in islice(rows, _ROWS)]
        if len(ends) > 1 and len({n for n, _ in ends}) == 1:
            n_row += len(ends)
            votes.update(end[0] for _, end in ends if end == end[:1] * 2)
    pad_id, n = next(iter(votes.most_common(1)), (0, 0))
    if 2 * n <= n_row:
        return None
    n_pads, n_id, leaves_out = Counter[int](), 0, can_leave_out
    for row in chain.from_iterable(chain.from_iterable(map(tables, paths))):
        end = text_end(row, pad_id)
        n_pads[len(row) - end] += 1
        n_id, leaves_out = n_id + len(row), leaves_out and not (row[:end] == pad_id).any()
    n_pad = sum(n * rows for n, rows in n_pads.items())
    if len(n_pads) == 1 or n_pad == n_id:
        return None
    why = "left out" if leaves_out else "read as text"
    other = "none keeps them" if leaves_out else f"{pad_id}, set for a training, leaves them out"
    found = f"{n_pad:,} of the {n_id:,} ids of '{name}' are {pad_id} at the ends of rows"
    warn(f"{found}, as padding is, and {why}; tokenizer.pad_id={other}", quiet=quiet)
    return pad_id if leaves_out else None
