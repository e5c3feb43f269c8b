"""Files of ids, read in bounded memory: arrays of numpy (.npy, .npz), and lines of JSON (.jsonl).

A row of a 2-D array is a document, and so is a 1-D array, and a line. A `Piece` counts bytes: of a .npy or .jsonl, those of the
file; of a .npz, those of its arrays one after another, unpacked. An id belongs to the piece in which its first byte lies.
"""

import math
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from transformer_xl.data.ids import MOST_IDS
from transformer_xl.data.text_files import BLOCK_BYTES, COMPRESSED, Piece, content_size, read_blocks, readable_errors
from transformer_xl.errors import CorpusError, one_line, shown
from transformer_xl.untrusted import parse_json

_MOST_LINE_BYTES = 1 << 24
_BEGINS_WITH_IDS = re.compile(rb'\s*(\{[^\n]*"ids"\s*:\s*)?\[\s*-?[0-9]')


class _Array(NamedTuple):
    """The header of an array, and where its ids lie."""

    name: str  # in a .npz
    start: int  # of its first id, in bytes of the content
    dtype: np.dtype
    n_row: int
    n_column: int
    is_table: bool  # has two axes

    def place(self, index: int) -> str:
        """Return where an id is, as Python writes it."""
        return f"{self.name}[{', '.join(map(str, divmod(index, self.n_column) if self.is_table else [index]))}]"


class IdChunk(NamedTuple):
    """Consecutive ids of one document as a file has them, and their place in it; what `Chunk` is for text."""

    data: bytes
    starts_document: bool
    path: Path
    offset: int  # in an array: ids before these; of a line: bytes before it in the file
    array: _Array | None = None  # None: a line of JSON

    def ids(self, vocab_size: int | None = None) -> np.ndarray:
        """Return the ids, shape (n,), int64.

        Raises:
            CorpusError: they are not integers from 0 on, below `vocab_size` if it is known.
        """
        ids = self._of_line() if self.array is None else np.frombuffer(self.data, self.array.dtype)
        low, high = (min(ids), max(ids)) if isinstance(ids, list) else (ids.min(), ids.max())
        most = MOST_IDS if vocab_size is None else vocab_size
        if low < 0 or high >= most:
            place, wrong = next((self._place(index), int(each)) for index, each in enumerate(ids) if not 0 <= each < most)
            remedy = "" if wrong < 0 or vocab_size is None else f", or train with tokenizer.vocab_size={wrong + 1}"
            raise self._error(f"{place} is {shown(wrong)}, and ids are from 0 to {most - 1:,} here; correct it{remedy}")
        return np.asarray(ids, np.int64)

    def _of_line(self) -> list[int]:
        try:
            value = parse_json(self.data, most_parts=len(self.data))
        except ValueError as error:
            raise self._error(f"{self._place()} is not JSON: {one_line(error)}") from None
        ids = value.get("ids") if isinstance(value, dict) else value
        if not isinstance(ids, list) or not ids:
            raise self._error(f'{self._place()} holds no ids; write [3, 1, 2] or {{"ids": [3, 1, 2]}}, or leave the line out')
        if set(map(type, ids)) != {int}:
            place, wrong = next((self._place(index), each) for index, each in enumerate(ids) if type(each) is not int)
            raise self._error(f"{place} is {shown(wrong)}, not an integer")
        return ids

    def _place(self, index: int | None = None) -> str:
        if self.array is not None:
            return self.array.place(self.offset + (index or 0))
        n_before = sum(block.count(b"\n") for block in read_blocks(Piece(self.path, 0, self.offset))) if self.offset else 0
        return f"line {n_before + 1}" + ("" if index is None else f", [{index}]")

    def _error(self, what: str) -> CorpusError:
        return CorpusError(f"'{self.path}': {what}")


def is_array_file(path: Path) -> bool:
    """Return whether a file has the name of arrays, which cannot be text."""
    return path.suffix in (".npy", ".npz")


def is_id_file(path: Path) -> bool:
    """Return whether a file holds ids, by its name, and of lines of JSON by the beginning of the first."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    if name.suffix != ".jsonl":
        return is_array_file(path)
    return _BEGINS_WITH_IDS.match(next(read_blocks(Piece(path)), b"")) is not None


def id_file_size(path: Path) -> int:
    """Return the size of a file of ids in the bytes that a `Piece` counts."""
    with _readable(path):
        return sum(size for _, size, _ in _members(path)) if path.suffix == ".npz" else content_size(path)


def read_ids(piece: Piece) -> Iterator[IdChunk]:
    """Yield the ids of a piece in chunks of bounded size; the first begins a document.

    Raises:
        CorpusError: the file is damaged, or holds something else than documents of ids.
    """
    if not is_array_file(piece.path):
        for offset, line in _lines(piece):
            yield IdChunk(line, True, piece.path, offset)
        return
    with _readable(piece.path):
        for array, file in _arrays(piece.path):
            width, n = array.dtype.itemsize, array.n_row * array.n_column
            at, stop = (min(max(0, -((array.start - place) // width)), n) for place in (piece.start, piece.stop or sys.maxsize))
            file.seek(at * width, os.SEEK_CUR)
            begins = True
            while at < stop:
                column = at % array.n_column
                n_id = min(stop - at, array.n_column - column, BLOCK_BYTES // width)
                data = file.read(n_id * width)
                if len(data) < n_id * width:
                    raise CorpusError(f"'{piece.path}' ends at {array.place(at)}; it was cut while it was read")
                yield IdChunk(data, begins or column == 0, piece.path, at, array)
                at, begins = at + n_id, False


def document_border(path: Path, position: int, low: int, limit: int) -> int:
    """Return where to cut a file near a byte position.

    That is where the first document from there on begins if it is before `limit`, else where the last one before there does if
    another lies between `low` and it, else where the next one begins. An array that is alone in its file is cut at `position`.
    """
    first, before, after, n_seen = None, low, None, 0
    for start, n_byte, n in _documents(path):
        if first is None and (from_low := max(0, -((start - low) // n_byte))) < n:
            first = start + from_low * n_byte
            position = max(position, first + 1)  # a piece has at least one id
        from_position = max(0, -((start - position) // n_byte))
        if from_position:
            before = start + (min(from_position, n) - 1) * n_byte
        n_seen += n
        if from_position < n:
            after = start + from_position * n_byte
            break
    if after is not None and after < limit:
        return after
    if first is not None and before > first:
        return before
    return position if n_seen == 1 and is_array_file(path) else after or id_file_size(path)


def _documents(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield runs of documents of the same size: where the first begins, bytes of each, and how many there are."""
    if not is_array_file(path):
        yield from ((offset, len(line), 1) for offset, line in _lines(Piece(path)))
        return
    with _readable(path):
        for array, _ in _arrays(path):
            yield array.start, array.n_column * array.dtype.itemsize, array.n_row


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not blank, and where in the file each begins."""
    offset, rest = piece.start, b""
    for block in read_blocks(piece):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.strip():
                yield offset, line
            offset += len(line) + 1
        if len(rest) > _MOST_LINE_BYTES:
            raise CorpusError(f"'{piece.path}': a line has more than {_MOST_LINE_BYTES:,} bytes; save long documents as .npy")
    if rest.strip():
        yield offset, rest


def _arrays(path: Path) -> Iterator[tuple[_Array, IO[bytes]]]:
    """Yield the arrays of a file, each with the file at its first id."""
    before = 0
    for name, size, file in _members(path):
        yield _read_header(path, name, file, before, size), file
        before += size


def _members(path: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield the name, size in bytes and content of each array."""
    if path.suffix == ".npy":
        with path.open("rb") as file:
            yield "", path.stat().st_size, file
        return
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                yield member.filename.removesuffix(".npy"), member.file_size, file


def _read_header(path: Path, name: str, file: IO[bytes], before: int, size: int) -> _Array:
    """Read the header of an array that has `size` bytes after `before` others, and compare it with these."""
    what = f"'{path}'{name and f', array {name}'}"
    try:
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, by_columns, dtype = read[np.lib.format.read_magic(file)](file)
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError) as error:
        raise CorpusError(f"{what} is no array that numpy has saved ({one_line(error)}); save it with np.save") from None
    if dtype.kind not in "iu":
        raise CorpusError(f"{what} holds {dtype}, not integers; save ids with a type such as np.int32")
    if len(shape) not in (1, 2) or 0 in shape:
        raise CorpusError(f"{what} has the shape {shape}; give (n,) for one document or (documents, n), with n of at least 1")
    if by_columns:
        raise CorpusError(f"{what} is stored by columns; save np.ascontiguousarray of it")
    n_id, start = math.prod(shape), file.tell()
    if start + n_id * dtype.itemsize != size:
        has = f"has {size - start:,} bytes of ids instead of {n_id * dtype.itemsize:,}"
        raise CorpusError(f"{what} {has}, as its header says; it was cut or altered: copy or save it again")
    return _Array(name, before + start, dtype, n_id // shape[-1], shape[-1], len(shape) == 2)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what archives raise into one line."""
    with readable_errors(path):
        try:
            yield
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise CorpusError(f"'{path}' cannot be read ({one_line(error)}); save it again with np.savez") from None
