"""TensorFlow checkpoints of the second format ("tensor bundles"), read without TensorFlow.

`PREFIX.index` is a sorted string table of LevelDB: blocks of key-value pairs, each with a checksum, and a footer that says
where the blocks lie. The value of the empty key is a `BundleHeaderProto`. Every other key is the name of a variable, and its
value is a `BundleEntryProto`: type, shape, checksum and place in one of the files `PREFIX.data-0000i-of-0000N`.

Reference: `tensorflow/core/util/tensor_bundle/tensor_bundle.cc`, `tensorflow/core/protobuf/tensor_bundle.proto`, and
https://github.com/google/leveldb/blob/main/doc/table_format.md.
Compressed tables, partitioned variables and text are refused, because `tf.train.Saver` never wrote them for a Transformer-XL.
"""

import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch

from transformer_xl.conversion.readers.tensors import Storage, TensorRef, contiguous
from transformer_xl.errors import CheckpointError
from transformer_xl.untrusted import open_regular

# The largest model of the authors, with its Adam slots, has about 850 variables in an index of 30 kB.
MAX_INDEX_BYTES = 2**20
MAX_TENSORS = 10_000
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 64

_FOOTER_BYTES = 48
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FORMAT_VERSION = 1
_TEXT = 7
# tensorflow/core/framework/types.proto
_DTYPES = {1: torch.float32, 2: torch.float64, 14: torch.bfloat16, 19: torch.float16, 10: torch.bool}
_DTYPES |= {6: torch.int8, 5: torch.int16, 3: torch.int32, 9: torch.int64}
_DTYPES |= {4: torch.uint8, 17: torch.uint16, 22: torch.uint32, 23: torch.uint64}
_PART = re.compile(r"\.(index|meta|data-\d+-of-\d+)$")
_LATEST = re.compile(r'^\s*model_checkpoint_path\s*:\s*"((?:[^"\\\n]|\\.)*)"', re.MULTILINE)
_SAVE_AGAIN = "load it with TensorFlow and save it again with tf.compat.v1.train.Saver()"

_T = TypeVar("_T", int, bytes)


def read_bundle(prefix: Path) -> dict[str, TensorRef]:
    """Return the variables of a TensorFlow checkpoint by name, in the order of the index; slots and counters too.

    This reads only the index and verifies its checksums. `TensorRef.load` verifies the checksum of a variable.

    Args:
        prefix: the beginning of the names of the checkpoint's files, such as `model.ckpt-123`; or one of these files; or their
            directory. In a directory, the file `checkpoint` names the checkpoint; without that file there must be only one.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, incomplete, or of a kind that cannot be read.
    """
    try:
        index = _index_in_directory(prefix) if prefix.is_dir() else _index_of_prefix(prefix)
    except OSError as error:
        raise CheckpointError(
            f"{str(prefix)!r} cannot be read: {error.strerror}; give a checkpoint that you may read"
        ) from error
    try:
        return _read_entries(index)
    except _Unreadable as error:
        raise CheckpointError(f"{str(index)!r} {error.reason}; {error.remedy}") from None


class _Unreadable(Exception):  # noqa: N818 (it becomes an error where the file's name is known)
    """The index cannot be read: the reason, and the remedy."""

    def __init__(self, reason: str, remedy: str = "copy or download it again"):
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


# Where the files lie


def _index_of_prefix(path: Path) -> Path:
    prefix = path.parent / _PART.sub("", path.name)
    index = path.parent / f"{_PART.sub('', path.name)}.index"
    if os.path.lexists(index):
        return index
    if _is_first_format(prefix):
        raise CheckpointError(f"{str(prefix)!r} is a TensorFlow checkpoint of the first format (V1); {_SAVE_AGAIN}")
    raise CheckpointError(
        f"{str(index)!r} is missing; give what the names of the checkpoint's files begin with, such as 'model.ckpt-0'"
    )


def _index_in_directory(directory: Path) -> Path:
    latest = directory / "checkpoint"
    if latest.is_file():
        with latest.open("rb") as file:
            text = file.read(2**16).decode(errors="replace")  # the newest name comes first; thousands of older ones may follow
        found = _LATEST.search(text)
        if not found:
            raise CheckpointError(f"{str(latest)!r} names no checkpoint; delete it, or give the checkpoint's prefix")
        # Only the last part of the path counts: the directory may have moved, and the name must not lead out of it.
        return _index_of_prefix(directory / (re.split(r"/|\\\\", found[1])[-1] or "checkpoint"))
    indexes = sorted(path for path in directory.iterdir() if path.suffix == ".index")
    if len(indexes) != 1:
        names = ", ".join(repr(path.name) for path in indexes[:5]) or "none"
        raise CheckpointError(f"{str(directory)!r} has {len(indexes)} checkpoints ({names}); give the prefix of one")
    return indexes[0]


def _is_first_format(prefix: Path) -> bool:
    """Return whether there is a table, or shards of one, under a name that only the first format uses."""
    if prefix.is_file():
        with prefix.open("rb") as file:
            file.seek(max(0, prefix.stat().st_size - len(_MAGIC)))
            return file.read(len(_MAGIC)) == _MAGIC
    shard = re.compile(re.escape(prefix.name) + r"-\d{5}-of-\d{5}")
    return prefix.parent.is_dir() and any(shard.fullmatch(path.name) for path in prefix.parent.iterdir())


def _data_file(prefix: Path, shard: int, n_shards: int) -> tuple[Path, int]:
    """Return path and size of a data file that is neither a link (it could lead anywhere) nor a pipe (it could have no end)."""
    if shard >= n_shards:
        raise _Unreadable(f"is damaged: it speaks of a data file {shard:05d}-of-{n_shards:05d}")
    path = prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{n_shards:05d}")
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{str(path)!r} is missing; copy all files of the checkpoint to one place") from None
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}; copy the checkpoint again") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no plain file"
        raise CheckpointError(f"{str(path)!r} is {kind}; put the file itself in its place")
    return path, status.st_size


# The table


class _Cursor:
    """Reads numbers and byte strings, one after another."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def __bool__(self) -> bool:
        return self.at < len(self.data)

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > len(self.data) - self.at:
            raise _Unreadable("is damaged: an entry ends too early")
        self.at += n_bytes
        return self.data[self.at - n_bytes : self.at]

    def varint(self) -> int:
        """Read a number in groups of 7 bits, the lowest first; the top bit of a byte says that more follow."""
        value = 0
        for shift in range(0, 64, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80 and value < 2**64:
                return value
        raise _Unreadable("is damaged: a number has no end")


def _read_table(index: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs of the table. Keys must ascend, so no name occurs twice."""
    file, n_bytes = open_regular(index)
    with file:
        if n_bytes > MAX_INDEX_BYTES:
            raise _Unreadable(f"is larger than any index ({MAX_INDEX_BYTES} bytes)", "give the index of a model's checkpoint")
        table = file.read(n_bytes)
    if len(table) < _FOOTER_BYTES or not table.endswith(_MAGIC):
        raise _Unreadable("does not end as the index of a TensorFlow checkpoint does")
    footer = _Cursor(table[-_FOOTER_BYTES:])
    _read_block(table, footer)  # the block of metadata, which TensorFlow leaves empty
    blocks, _ = _read_block(table, footer)
    last_key, last_end = None, 0
    for _, handle in _pairs(blocks):
        block, start = _read_block(table, _Cursor(handle))
        if start < last_end:
            raise _Unreadable("is damaged: its blocks overlap")
        last_end = start + len(block) + 5
        for key, value in _pairs(block):
            if last_key is not None and key <= last_key:
                raise _Unreadable("is damaged: its names are not in order")
            last_key = key
            yield key, value


def _read_block(table: bytes, handle: _Cursor) -> tuple[bytes, int]:
    """Return the content of the block that a handle (offset, size) points to, and where it begins."""
    start, size = handle.varint(), handle.varint()
    end = start + size + 5  # the content, the kind of compression (1), and the checksum of both (4)
    if end > len(table) - _FOOTER_BYTES:
        raise _Unreadable("is damaged: a block lies outside the file")
    if _masked_crc32c(table[start : end - 4]) != int.from_bytes(table[end - 4 : end], "little"):
        raise _Unreadable("is damaged: a block does not match its checksum")
    if table[end - 5]:
        raise _Unreadable("is compressed", _SAVE_AGAIN)
    return table[start : end - 5], start


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs of a block. A key is stored as a part that it shares with the key before, and a new part."""
    n_bytes = len(block) - 4 * (1 + int.from_bytes(block[-4:], "little"))  # the rest lists the keys that are stored whole
    if n_bytes < 0:
        raise _Unreadable("is damaged: a block is too short")
    cursor, key = _Cursor(block[:n_bytes]), b""
    while cursor:
        n_shared, n_added, n_value = cursor.varint(), cursor.varint(), cursor.varint()
        if n_shared > len(key) or n_shared + n_added > MAX_NAME_BYTES:
            raise _Unreadable(f"is damaged: a name continues a shorter one, or is longer than {MAX_NAME_BYTES} bytes")
        key = key[:n_shared] + cursor.take(n_added)
        yield key, cursor.take(n_value)


def _masked_crc32c(*parts: bytes | bytearray) -> int:
    """Return the CRC-32C as tables store it: rotated by 15 bits, plus a constant."""
    try:
        import google_crc32c
    except ImportError:
        raise CheckpointError(
            "TensorFlow checkpoints are read only with the package that verifies their checksums: "
            "in a clone: pip install -e '.[tensorflow]'"
        ) from None
    crc, step = 0, 2**20
    for view in map(memoryview, parts):
        for start in range(0, len(view), step):
            crc = google_crc32c.extend(crc, bytes(view[start : start + step]))  # it accepts only bytes
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# The entries


class _Message:
    """The fields of a protocol buffer message: all values of each number."""

    def __init__(self, data: bytes):
        self.fields: dict[int, list[int | bytes]] = {}
        cursor = _Cursor(data)
        while cursor:
            tag = cursor.varint()
            match tag & 7:
                case 0:
                    value = cursor.varint()
                case 2:
                    value = cursor.take(cursor.varint())
                case (1 | 5) as kind:
                    value = int.from_bytes(cursor.take(8 if kind == 1 else 4), "little")
                case _:
                    raise _Unreadable("is damaged: a field has no known kind")
            self.fields.setdefault(tag >> 3, []).append(value)

    def all(self, number: int, kind: type[_T]) -> list[_T]:
        values = self.fields.get(number, [])
        checked = [value for value in values if isinstance(value, kind)]
        if len(checked) != len(values):
            raise _Unreadable("is damaged: a field is of the wrong kind")
        return checked

    def last(self, number: int, kind: type[_T]) -> _T:
        return [kind(), *self.all(number, kind)][-1]


def _read_entries(index: Path) -> dict[str, TensorRef]:
    table = _read_table(index)
    key, value = next(table, (None, b""))
    if key != b"":
        raise _Unreadable("is damaged: it has no header")
    header = _Message(value)
    if header.last(2, int):
        raise _Unreadable("was written on a big-endian machine", f"{_SAVE_AGAIN} on a little-endian one")
    if _Message(header.last(3, bytes)).last(2, int) > _FORMAT_VERSION:
        raise _Unreadable("is of a newer format", _SAVE_AGAIN)
    data_file = cache(partial(_data_file, index.with_suffix(""), n_shards=header.last(1, int)))  # each file is checked once
    tensors: dict[str, TensorRef] = {}
    for key, value in table:
        if len(tensors) == MAX_TENSORS:
            raise _Unreadable(f"lists more than {MAX_TENSORS} variables", "give the index of a model's checkpoint")
        if key.startswith(b"\0"):  # the keys of slices begin like this
            raise _Unreadable("holds variables in slices (partitioned)", f"{_SAVE_AGAIN}, without a partitioner")
        name = key.decode(errors="replace")
        if name.encode() != key or not name.isprintable():
            raise _Unreadable(f"is damaged: {key!r} is not the name of a variable")
        tensors[name] = _tensor_ref(name, _Message(value), data_file)
    spans = sorted((str(ref.path), ref.offset, ref.offset + ref.n_bytes, name) for name, ref in tensors.items() if ref.n_bytes)
    for (path, _, end, name), (next_path, start, _, next_name) in pairwise(spans):
        if path == next_path and start < end:  # without overlaps, all tensors together are no larger than their files
            raise _Unreadable(f"is damaged: {name!r} and {next_name!r} share bytes")
    return tensors


def _tensor_ref(name: str, entry: _Message, data_file: Callable[[int], tuple[Path, int]]) -> TensorRef:
    if entry.all(7, bytes):
        raise _Unreadable(f"holds {name!r} in slices (partitioned)", f"{_SAVE_AGAIN}, without a partitioner")
    code = entry.last(1, int)
    if code == _TEXT:
        raise _Unreadable(f"holds text ({name!r}), as checkpoints of TensorFlow 2 do", _SAVE_AGAIN)
    if code not in _DTYPES:
        raise _Unreadable(
            f"holds {name!r} in TensorFlow's data type number {code}, which is not read", f"cast it to float32: {_SAVE_AGAIN}"
        )
    dtype = _DTYPES[code]
    dimensions = _Message(b"".join(entry.all(2, bytes)))  # repeated messages merge as their bytes do
    if dimensions.last(3, int) or len(dimensions.all(2, bytes)) > MAX_DIMENSIONS:
        raise _Unreadable(f"is damaged: {name!r} has no shape, or more than {MAX_DIMENSIONS} dimensions")
    shape = tuple(_Message(dimension).last(1, int) for dimension in dimensions.all(2, bytes))
    shard, offset, n_bytes = (entry.last(number, int) for number in (3, 4, 5))
    if n_bytes != math.prod(shape) * dtype.itemsize:
        raise _Unreadable(f"is damaged: {name!r} has {n_bytes} bytes, which is not the size of {dtype} {list(shape)}")
    # A size of zero counts as one, because strides must fit into 64 bits even without any bytes.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise _Unreadable(f"is damaged: {name!r} has the impossible shape {list(shape)}")
    path, size = data_file(shard)
    if offset + n_bytes > size:
        raise CheckpointError(
            f"{str(path)!r} has {size} bytes, and {name!r} should end at {offset + n_bytes}; copy or download it again"
        )
    checksum = entry.last(6, int)

    def verify(parts: Iterable[bytes | bytearray]) -> str | None:
        return None if _masked_crc32c(*parts) == checksum else f"{name!r} does not match its checksum"

    return TensorRef(Storage(path, n_bytes, offset, verify), 0, shape, contiguous(shape), dtype)
