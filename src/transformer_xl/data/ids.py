"""Files of ids: lines are read one by one, an array stays on the disk, and one array of an archive is held at a time.

They are arrays of numpy (.npy, .npz) and lines of JSON (.jsonl). A row of a 2-D array is a document, and so is a 1-D array or
a line. A `FileRange` counts bytes: of arrays, those of their ids one after another, without headers; of another file, its own.
An id belongs to the piece in which its first byte lies.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from transformer_xl.data.text_files import BLOCK_BYTES, COMPRESSED, Chunk, FileRange, content_size, numbered_lines, read_blocks
from transformer_xl.errors import CorpusError, one_line, shown
from transformer_xl.tokenizers.ids import MOST_IDS, IdTokenizer, PadId
from transformer_xl.untrusted import parse_json

PACKED = np.dtype("<u4")
"""How the chunks of `read_ids` hold ids."""

_BEGINS_WITH_IDS = re.compile(rb'(\xef\xbb\xbf)?\s*(\{[^\n]*"ids"\s*:\s*)?\[\s*-?[0-9]')


def is_array_file(path: Path) -> bool:
    """Return whether a file has the name of arrays, which cannot be text."""
    return path.suffix in (".npy", ".npz")


def is_id_file(path: Path) -> bool:
    """Return whether a file holds ids, by its name, and of lines of JSON by the beginning of the first."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    if name.suffix != ".jsonl":
        return is_array_file(path)
    return _BEGINS_WITH_IDS.match(next(read_blocks(FileRange(path)), b"")) is not None


def id_file_size(path: Path) -> int:
    """Return the size of a file of ids in the bytes that a `FileRange` counts."""
    return sum(array.nbytes for *_, array in _arrays(path)) if is_array_file(path) else content_size(path)


def read_ids(piece: FileRange, tokenizer: IdTokenizer | None = None) -> Iterator[Chunk]:
    """Yield the ids of a piece in chunks of bounded size, as `PACKED`, without the tokenizer's padding at the ends of rows."""
    tokenizer = tokenizer or IdTokenizer(MOST_IDS)
    if is_array_file(piece.path):
        for name, begin, array in _arrays(piece.path):
            yield from _of_array(piece, name, begin, array, tokenizer)
        return
    for offset, line in _lines(piece):
        ids = _of_line(piece.path, offset, line)
        ids = ids[: text_end(ids, tokenizer.pad_id)]
        packed = _packed(ids, tokenizer.vocab_size, lambda index, offset=offset: f"{_line(piece.path, offset)}, [{index}]")
        if packed:
            yield Chunk(packed, True, piece.path, offset)


def text_end(row: np.ndarray, pad_id: PadId) -> int:
    """Return how many ids of a row, (n,), stand before the padding at its end."""
    if not isinstance(pad_id, int):
        return len(row)
    for stop in range(len(row), 0, -BLOCK_BYTES):
        begin = max(0, stop - BLOCK_BYTES)
        if (places := np.flatnonzero(row[begin:stop] != pad_id)).size:
            return begin + int(places[-1]) + 1
    return 0


def tables(path: Path) -> Iterator[Iterator[Callable[[], np.ndarray]]]:
    """Yield of each array of a file, or of its lines, what returns each row."""
    if is_array_file(path):
        yield from ((partial(array.__getitem__, i) for i in range(len(array))) for *_, array in _arrays(path))
    else:
        yield (partial(_of_line, path, offset, line) for offset, line in _lines(FileRange(path)))


def _of_array(piece: FileRange, name: str, begin: int, array: np.ndarray, tokenizer: IdTokenizer) -> Iterator[Chunk]:
    width, (n_row, n_column) = array.dtype.itemsize, array.shape
    at, stop = (min(max(0, -((begin - place) // width)), array.size) for place in (piece.start, piece.stop or sys.maxsize))
    begins = True
    while at < stop:
        row, column = divmod(at, n_column)
        n_id = min(stop - at, n_column - column, BLOCK_BYTES // width)
        place = f"'{piece.path}': {name}[{f'{row}, ' if n_row > 1 else ''}"
        ids = array[row, column : min(column + n_id, text_end(array[row], tokenizer.pad_id))]
        packed = _packed(ids, tokenizer.vocab_size, lambda index, place=place, column=column: f"{place}{column + index}]")
        if packed:
            yield Chunk(packed, begins or column == 0, piece.path, at)
            begins = False
        at += n_id


def _of_line(path: Path, offset: int, line: bytes) -> np.ndarray:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise CorpusError(f"{_line(path, offset)} is not JSON: {one_line(error)}") from None
    ids = value.get("ids") if isinstance(value, dict) else value
    if not isinstance(ids, list) or not ids:
        raise CorpusError(f'{_line(path, offset)} has no ids; write [3, 1, 2] or {{"ids": [3, 1, 2]}}, or leave the line out')
    if set(map(type, ids)) != {int}:
        index, wrong = next((index, value) for index, value in enumerate(ids) if type(value) is not int)
        raise CorpusError(f"{_line(path, offset)}, [{index}] is {shown(wrong)}, not an integer")
    return np.array(ids)


def _line(path: Path, offset: int) -> str:
    n_before = sum(block.count(b"\n") for block in read_blocks(FileRange(path, 0, offset))) if offset else 0
    return f"'{path}': line {n_before + 1}"


def _packed(ids: np.ndarray, vocab_size: int, place: Callable[[int], str]) -> bytes:
    """Return ids as bytes; refuse one outside the vocabulary, and say its `place`."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        where, wrong = place(int(outside[0])), int(ids[outside[0]])
        more = f", or train with tokenizer.vocab_size={wrong + 1}" if vocab_size <= wrong < MOST_IDS else ""
        raise CorpusError(f"{where} is {shown(wrong)}, and ids are from 0 to {vocab_size - 1:,} here; correct it{more}")
    return ids.astype(PACKED).tobytes()


def document_border(path: Path, position: int, low: int) -> int:
    """Return where to cut a file near a byte position.

    That is where the last document up to there begins, but after the first from `low` on. An array that is alone in its file is
    cut at `position`.
    """
    starts = (start for start in _document_starts(path) if start >= low)
    first, border = next(starts, None), None
    for start in starts:
        if border is None or start <= position:
            border = start
        if start >= position:
            return border
    is_alone = is_array_file(path) and border is None and (low == 0 or first is None)
    return position if is_alone else border or id_file_size(path)


def _document_starts(path: Path) -> Iterator[int]:
    if not is_array_file(path):
        yield from (offset for offset, _ in _lines(FileRange(path)))
        return
    for _, begin, array in _arrays(path):
        yield from range(begin, begin + array.nbytes, array.shape[1] * array.dtype.itemsize)


def _lines(piece: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not blank, and where in the file each begins."""
    offset = piece.start
    for _, line in numbered_lines(read_blocks(piece), f"'{piece.path}'"):
        if line.strip():
            yield offset, line
        offset += len(line)


def _arrays(path: Path) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield the arrays of a file as rows, with their names and the bytes of ids before them."""
    loaded, begin = _loaded(path), 0
    while True:
        try:
            name, array = next(loaded)
        except StopIteration:
            return
        except Exception as error:  # what is no array can raise nearly anything
            reason = one_line(error).partition(". ")[0]  # what numpy advises then, to trust the file, is no advice here
            raise CorpusError(f"numpy cannot read '{path}' ({reason}); copy it or save it again") from None
        what = f"'{path}'{name and f', array {name}'}"
        if array.dtype.kind not in "iu":
            raise CorpusError(f"{what} holds {array.dtype}, not integers; save ids with a type such as np.int32")
        if array.ndim not in (1, 2) or not array.size:
            shape = f"has the shape {array.shape}; save rows, of the shape (n,) for one document or (documents, n)"
            raise CorpusError(f"{what} {shape}")
        if isinstance(array, np.memmap) and array.offset + array.nbytes != path.stat().st_size:
            raise CorpusError(f"{what} goes on behind the ids that its header counts; copy or save it again")
        yield name, begin, np.atleast_2d(np.asarray(array))  # slices of a memmap itself take long
        begin += array.nbytes


def _loaded(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays and their names: one that stays on the disk, or those of an archive, one at a time."""
    loaded = np.load(path, mmap_mode="r")  # executes nothing: a pickle is an error
    if isinstance(loaded, np.ndarray):
        yield "", loaded
        return
    with loaded:
        for name in loaded.files:
            yield name, np.asanyarray(loaded[name])
