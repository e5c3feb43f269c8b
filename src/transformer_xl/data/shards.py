"""Splits as shards, written and read. After an interruption only unfinished shards are written.

A shard holds the ids of the next `SHARD_BYTES` of text, in three files:

    train.bin            train.1.bin            …   ids, raw and little-endian
    documents.train.npy  documents.train.1.npy  …   offsets in the shard at which documents start, int64
    train.json           train.1.json           …   counts, and sizes and hashes of the other two files; written last
"""

import hashlib
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

from transformer_xl.data.encoding import EncodedBatch
from transformer_xl.data.text_files import Chunk
from transformer_xl.errors import CheckpointError, CorpusError, one_line
from transformer_xl.files import replace_file, whole_file
from transformer_xl.untrusted import read_json

SHARD_BYTES = 1 << 30
"""Bytes of text in a shard; a shard ends with the chunk that reaches this size."""

_OFFSETS_AT_ONCE = 1 << 20

OPEN_SHARDS = 128
"""The most files that are mapped at a time, because a process may open fewer than a large corpus has (on macOS 256 in all)."""


class DamagedError(Exception):
    """A file that is missing or not as it was written; `what` completes a sentence about it, such as "is missing"."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path.name} {what}")
        self.path, self.what = path, what


@dataclass(frozen=True)
class Shard:
    """The record of a finished shard."""

    tokenizer: str  # fingerprint
    text_bytes: int  # `SHARD_BYTES` when it was written
    n_tokens: int
    n_bytes: int  # of the text
    n_characters: int  # code points of the text
    files: dict[str, dict[str, Any]]  # size and SHA-256 by name: the ids, then the documents


def write_shards(
    directory: Path,
    split: str,
    chunks: Iterable[Chunk],
    encode: Callable[[Iterable[Chunk]], Iterator[EncodedBatch]],
    *,
    tokenizer: str,
    on_bytes: Callable[[int], object],
) -> list[Shard]:
    """Write the shards of a split that are not finished and intact, and return all of them in order, at least one.

    Args:
        directory: for the files.
        split: name of the split.
        chunks: its text.
        encode: turns chunks into ids, in order.
        tokenizer: fingerprint of the tokenizer that `encode` uses.
        on_bytes: called with the number of bytes just encoded.
    """
    shards = []
    for index, portion in enumerate(_portions(iter(chunks))):
        name = shard_names(split, index + 1)[index]
        shard = _finished_shard(directory, name, tokenizer)
        if shard is None:
            shard = _write(directory, name, encode(portion), tokenizer, on_bytes)
        else:
            deque(portion, maxlen=0)
            on_bytes(shard.n_bytes)
        shards.append(shard)
    return shards


def shard_names(split: str, n_shards: int) -> list[str]:
    """Return the names of a split's shards, which begin the names of their files.

    Example:
        >>> shard_names("train", 3)
        ['train', 'train.1', 'train.2']
    """
    return [split, *(f"{split}.{index}" for index in range(1, n_shards))]


def split_files(split: str, n_shards: int) -> set[str]:
    """Return the names of all files of a split.

    Example:
        >>> sorted(split_files("test", 1))
        ['documents.test.npy', 'test.bin', 'test.json']
    """
    names = shard_names(split, n_shards)
    patterns = ("{}.bin", "documents.{}.npy", "{}.json")
    return {pattern.format(name) for pattern in patterns for name in names} | {_documents_file(split, n_shards)}


def join_documents(directory: Path, split: str, shards: list[Shard]) -> None:
    """Write the offsets in the split at which the documents of all shards start, unless there is only one shard."""
    if len(shards) == 1:
        return
    n_tokens = 0
    with whole_file(directory / _documents_file(split, len(shards))) as stray, stray.open("wb") as file:
        offsets = _OffsetFile(file)
        for name, shard in zip(shard_names(split, len(shards)), shards, strict=True):
            starts = np.load(directory / f"documents.{name}.npy", mmap_mode="r", allow_pickle=False)
            for begin in range(0, len(starts), _OFFSETS_AT_ONCE):
                offsets.add(starts[begin : begin + _OFFSETS_AT_ONCE] + n_tokens)
            n_tokens += shard.n_tokens
        offsets.finish()


def open_documents(directory: Path, split: str, *, n_tokens: int, n_shards: int) -> np.ndarray:
    """Return the token offsets at which the documents of a split start, mapped from disk."""
    starts = np.load(directory / _documents_file(split, n_shards), mmap_mode="r", allow_pickle=False)
    return np.asarray(starts)[: np.searchsorted(starts, n_tokens)]  # the last document may have no token


def _documents_file(split: str, n_shards: int) -> str:
    return f"documents.{split}.npy" if n_shards == 1 else f"documents.{split}.all.npy"


def _finished_shard(directory: Path, name: str, tokenizer: str) -> Shard | None:
    """Return a shard that the same tokenizer encoded from a portion of the same size, if it is intact."""
    try:
        shard = Shard(**read_json(directory / f"{name}.json"))
        if (shard.tokenizer, shard.text_bytes) != (tokenizer, SHARD_BYTES):
            return None
        for file, expected in shard.files.items():
            check_file(directory / file, expected, thorough=True)
    except (CheckpointError, OSError, ValueError, TypeError, DamagedError):
        return None
    return shard


def check_file(path: Path, expected: dict[str, Any], *, thorough: bool, finished_ns: int | None = None) -> int:
    """Compare a file with its recorded size, and with its hash if `thorough` or if it was written after `finished_ns`.

    Args:
        path: the file.
        expected: what `size_and_hash` returned.
        thorough: always compare the hash.
        finished_ns: the time of the last regular write, in nanoseconds since the epoch; None if unknown.

    Returns:
        The time of the last write, in nanoseconds since the epoch.

    Raises:
        DamagedError: the file is missing or has other content.
    """
    try:
        status = path.stat()
        if status.st_size != expected["size"]:
            raise DamagedError(path, f"has {status.st_size:,} bytes instead of {expected['size']:,}")
        is_newer = finished_ns is not None and status.st_mtime_ns > finished_ns
        if (thorough or is_newer) and size_and_hash(path) != expected:
            raise DamagedError(path, "has another sha256")
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    return status.st_mtime_ns


def size_and_hash(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file, for `check_file`."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


class _OffsetFile:
    """Writes increasing offsets as an int64 array in numpy's format before their number is known; drops repeated ones."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._n, self._last = file, 0, -1
        self._write_header()

    def add(self, offsets: np.ndarray) -> None:
        new = offsets[np.diff(offsets, prepend=self._last) > 0]
        if len(new):
            self._file.write(new.astype("<i8").tobytes())
            self._n, self._last = self._n + len(new), int(new[-1])

    def finish(self) -> None:
        self._file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        """Write the header; its length does not depend on the number of offsets."""
        header = {"descr": "<i8", "fortran_order": False, "shape": (self._n,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _portions(chunks: Iterator[Chunk]) -> Iterator[Iterator[Chunk]]:
    """Yield the chunks of each shard; the caller must use them up first. No chunks make one empty shard."""
    first = next(chunks, None)
    yield iter(()) if first is None else _portion(first, chunks)
    for first in chunks:
        yield _portion(first, chunks)


def _portion(first: Chunk, following: Iterator[Chunk]) -> Iterator[Chunk]:
    n_bytes = 0
    for chunk in chain([first], following):
        yield chunk
        n_bytes += len(chunk.data)
        if n_bytes >= SHARD_BYTES:
            return


def _write(
    directory: Path, name: str, batches: Iterator[EncodedBatch], tokenizer: str, on_bytes: Callable[[int], object]
) -> Shard:
    counts = dict.fromkeys(("n_tokens", "n_bytes", "n_characters"), 0)
    ids_file, documents_file = directory / f"{name}.bin", directory / f"documents.{name}.npy"
    with (
        whole_file(ids_file) as new_ids,
        whole_file(documents_file) as new_documents,
        new_ids.open("wb") as file,
        new_documents.open("wb") as documents,
    ):
        offsets = _OffsetFile(documents)
        for batch in batches:
            offsets.add(batch.document_starts + counts["n_tokens"])
            for count in counts:
                counts[count] += getattr(batch, count)
            file.write(batch.ids)
            on_bytes(batch.n_bytes)
        offsets.finish()
    files = {path.name: size_and_hash(path) for path in (ids_file, documents_file)}
    shard = Shard(tokenizer, SHARD_BYTES, **counts, files=files)
    replace_file(directory / f"{name}.json", json.dumps(asdict(shard), indent=2).encode())
    return shard


class ShardedIds:
    """An array of ids over several memory-mapped files; only ids that are asked for are read.

    A slice inside one shard is a view; a slice across a border is a copy. `np.asarray` copies everything.

    Args:
        paths: files of raw ids, in order.
        lengths: number of ids in each; empty files are not opened.
        dtype: of the ids.

    Attributes:
        borders: shape (n_shards + 1,), int64; where the shards begin, and where the last one ends.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name, ids in (("a", [0, 1, 2]), ("b", [3, 4])):
        ...     np.array(ids, "<u2").tofile(folder / name)
        >>> ShardedIds([folder / "a", folder / "b"], [3, 2], np.dtype("<u2"))[1:4].tolist()
        [1, 2, 3]
    """

    def __init__(self, paths: Sequence[Path], lengths: Sequence[int], dtype: np.dtype) -> None:
        self._paths = [path for path, length in zip(paths, lengths, strict=True) if length]
        self.borders = np.cumsum([0, *(length for length in lengths if length)], dtype=np.int64)
        self._borders: list[int] = self.borders.tolist()  # for slices: a list is faster to search
        self.dtype = dtype
        self._shard = lru_cache(OPEN_SHARDS)(self._map)

    def __len__(self) -> int:
        return int(self.borders[-1])

    @property
    def shape(self) -> tuple[int]:
        """(n_tokens,)."""
        return (len(self),)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> Any:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            return self._slice(begin, end) if step == 1 else self._gather(np.arange(begin, end, step))
        places = np.asarray(index)
        found = self._gather(places.reshape(-1)).reshape(places.shape)
        return found if places.ndim else found[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all ids by numpy's rules for `copy`; False is refused if there are several shards."""
        if copy is False and len(self.borders) > 2:
            raise ValueError(f"{len(self.borders) - 1} shards make one array only by copying")
        return np.array(self[:], dtype, copy=copy)

    def _slice(self, begin: int, end: int) -> np.ndarray:
        if begin >= end:
            return np.empty(0, self.dtype)
        first = bisect_right(self._borders, begin) - 1
        if end <= self._borders[first + 1]:
            return self._shard(first)[begin - self._borders[first] : end - self._borders[first]]
        last = bisect_right(self._borders, end - 1) - 1
        spans = [(shard, self._borders[shard]) for shard in range(first, last + 1)]
        return np.concatenate([self._shard(shard)[max(begin - start, 0) : end - start] for shard, start in spans])

    def _gather(self, places: np.ndarray) -> np.ndarray:
        if places.size and not (-len(self) <= places.min() and places.max() < len(self)):
            raise IndexError(f"index outside {len(self):,} ids")
        places = np.where(places < 0, places + len(self), places)
        shards = np.searchsorted(self.borders, places, "right") - 1
        found = np.empty(places.shape, self.dtype)
        for shard in np.unique(shards).tolist():
            inside = shards == shard
            found[inside] = self._shard(shard)[places[inside] - self.borders[shard]]
        return found

    def _map(self, shard: int) -> np.ndarray:
        path = self._paths[shard]
        try:
            return np.asarray(np.memmap(path, self.dtype, "r", shape=(self._borders[shard + 1] - self._borders[shard],)))
        except (OSError, ValueError) as error:
            raise CorpusError(
                f"shard '{path}' cannot be read ({one_line(error)}); restore it, or encode it again with txl corpus prepare"
            ) from None
