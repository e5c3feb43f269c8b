"""TensorFlow checkpoints of the second format ("tensor bundles"), read without TensorFlow.

`PREFIX.index` is a sorted string table of LevelDB: blocks of key-value pairs, each with a checksum, and a footer that says
where the blocks lie. The value of the empty key is a `BundleHeaderProto`. Every other key is the name of a variable, and its
value is a `BundleEntryProto`: type, shape, checksum and place in one of the files `PREFIX.data-0000i-of-0000N`.

Reference: `tensorflow/core/util/tensor_bundle/tensor_bundle.cc`, `tensorflow/core/protobuf/tensor_bundle.proto`, and
https://github.com/google/leveldb/blob/main/doc/table_format.md.
Compressed tables, partitioned variables and text are refused, because `tf.train.Saver` never wrote them for a Transformer-XL.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch

from transformer_xl.conversion.readers.tensors import MAX_DIMENSIONS, Storage, TensorRef, contiguous, place
from transformer_xl.errors import CheckpointError
from transformer_xl.untrusted import open_regular

MAX_INDEX_BYTES = 2**20
"""The largest index; that of the authors' largest model, with its Adam slots, has 30 kB. It may take 200 times its size."""

MAX_NAME_BYTES = 1024
"""The longest name; a name is stored as what differs from the one before, so few bytes could make many long ones."""

_FOOTER_BYTES = 48
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FORMAT_VERSION = 1
# tensorflow/core/framework/types.proto
_DTYPES = {1: torch.float32, 2: torch.float64, 14: torch.bfloat16, 19: torch.float16, 10: torch.bool}
_DTYPES |= {6: torch.int8, 5: torch.int16, 3: torch.int32, 9: torch.int64}
_DTYPES |= {4: torch.uint8, 17: torch.uint16, 22: torch.uint32, 23: torch.uint64}
_PART = re.compile(r"\.(index|meta|data-\d+-of-\d+)$")
_LATEST = re.compile(r'^\s*model_checkpoint_path\s*:\s*"((?:[^"\\\n]|\\.)*)"', re.MULTILINE)

_T = TypeVar("_T", int, bytes)


def read_bundle(prefix: Path) -> dict[str, TensorRef]:
    """Return the variables of a TensorFlow checkpoint by name, in the order of the index; slots and counters too.

    This reads only the index and verifies its checksums. `TensorRef.load` verifies the checksum of a variable.

    Args:
        prefix: the beginning of the names of the checkpoint's files, such as `model.ckpt-123`; or one of these files; or their
            directory. In a directory, the file `checkpoint` names the checkpoint; without that file there must be only one.

    Raises:
        CheckpointError: it is damaged, incomplete, or of a kind that cannot be read.
        OSError: a file is missing.
    """
    index = _index_in_directory(prefix) if prefix.is_dir() else _index_of_prefix(prefix)
    try:
        return _read_entries(index)
    except ValueError as error:
        raise CheckpointError(
            f"{str(index)!r} cannot be read: {error}; copy or download it again, or load it with TensorFlow and save it again "
            "with tf.compat.v1.train.Saver()"
        ) from None


def refuse_first_format(source: Path) -> None:
    """Refuse what TensorFlow wrote before bundles: one table in a file, or a few, that has the name which prefixes have today.

    Args:
        source: such a file, its `.meta`, the beginning of their names, or the directory that holds them.

    Raises:
        CheckpointError: there is one.
    """
    folder, stem = (source, "") if source.is_dir() else (source.parent, source.name.removesuffix(".meta"))
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(stem) and path.suffix != ".index" and path.is_file() and _ends_as_table(path):
            raise CheckpointError(
                f"{str(path)!r} is a TensorFlow checkpoint of the first format, V1, which is not read; load it with TensorFlow "
                "and save it again with tf.compat.v1.train.Saver()"
            )


def _ends_as_table(path: Path) -> bool:
    file, size = open_regular(path)
    with file:
        file.seek(max(size - len(_MAGIC), 0))
        return file.read(len(_MAGIC)) == _MAGIC


# Where the files lie


def _index_of_prefix(path: Path) -> Path:
    return path.parent / f"{_PART.sub('', path.name)}.index"


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


def _data_file(prefix: Path, shard: int, n_shards: int) -> tuple[Path, int]:
    """Return path and size of a data file; that of a pipe or device is 0."""
    path = prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{n_shards:05d}")
    return path, path.stat().st_size


# The table


class _Cursor:
    """Reads numbers and byte strings, one after another."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def __bool__(self) -> bool:
        return self.at < len(self.data)

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > len(self.data) - self.at:
            raise ValueError("an entry ends too early")
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
        raise ValueError("a number has no end")


def _read_table(index: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs of the table. Keys must ascend, so no name occurs twice."""
    file, n_bytes = open_regular(index)
    with file:
        if n_bytes > MAX_INDEX_BYTES:
            raise ValueError(f"it is larger than any index ({MAX_INDEX_BYTES} bytes)")
        table = file.read(n_bytes)
    if len(table) < _FOOTER_BYTES or not table.endswith(_MAGIC):
        raise ValueError("it does not end as the index of a TensorFlow checkpoint does")
    footer = _Cursor(table[-_FOOTER_BYTES:])
    _read_block(table, footer)  # the block of metadata, which TensorFlow leaves empty
    blocks, _ = _read_block(table, footer)
    last_key, last_end = None, 0
    for _, handle in _pairs(blocks):
        block, start = _read_block(table, _Cursor(handle))
        if start < last_end:
            raise ValueError("its blocks overlap")
        last_end = start + len(block) + 5
        for key, value in _pairs(block):
            if last_key is not None and key <= last_key:
                raise ValueError("its names are not in order")
            last_key = key
            yield key, value


def _read_block(table: bytes, handle: _Cursor) -> tuple[bytes, int]:
    """Return the content of the block that a handle (offset, size) points to, and where it begins."""
    start, size = handle.varint(), handle.varint()
    end = start + size + 5  # the content, the kind of compression (1), and the checksum of both (4)
    if end > len(table) - _FOOTER_BYTES:
        raise ValueError("a block lies outside the file")
    if _masked_crc32c(table[start : end - 4]) != int.from_bytes(table[end - 4 : end], "little"):
        raise ValueError("a block does not match its checksum")
    if table[end - 5]:
        raise ValueError("it is compressed")
    return table[start : end - 5], start


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs of a block. A key is stored as a part that it shares with the key before, and a new part."""
    n_bytes = len(block) - 4 * (1 + int.from_bytes(block[-4:], "little"))  # the rest lists the keys that are stored whole
    cursor, key = _Cursor(block[: max(n_bytes, 0)]), b""
    while cursor:
        n_shared, n_added, n_value = cursor.varint(), cursor.varint(), cursor.varint()
        if n_shared > len(key) or n_shared + n_added > MAX_NAME_BYTES:
            raise ValueError(f"a name continues a shorter one, or is longer than {MAX_NAME_BYTES} bytes")
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
                    raise ValueError("a field has no known kind")
            self.fields.setdefault(tag >> 3, []).append(value)

    def all(self, number: int, kind: type[_T]) -> list[_T]:
        values = self.fields.get(number, [])
        checked = [value for value in values if isinstance(value, kind)]
        if len(checked) != len(values):
            raise ValueError("a field is of the wrong kind")
        return checked

    def last(self, number: int, kind: type[_T]) -> _T:
        return [kind(), *self.all(number, kind)][-1]


def _read_entries(index: Path) -> dict[str, TensorRef]:
    table = _read_table(index)
    key, value = next(table, (None, b""))
    if key != b"":
        raise ValueError("it has no header")
    header = _Message(value)
    if header.last(2, int) or _Message(header.last(3, bytes)).last(2, int) > _FORMAT_VERSION:
        raise ValueError("it is of a newer format, or was written on a big-endian machine")
    data_file = cache(partial(_data_file, index.with_suffix(""), n_shards=header.last(1, int)))
    tensors: dict[str, TensorRef] = {}
    for key, value in table:
        name = key.decode()
        tensors[name] = _tensor_ref(name, _Message(value), data_file)
    spans = sorted((str(ref.path), ref.offset, ref.offset + ref.n_bytes, name) for name, ref in tensors.items() if ref.n_bytes)
    for (path, _, end, name), (next_path, start, _, next_name) in pairwise(spans):
        if path == next_path and start < end:  # without overlaps, all tensors together are no larger than their files
            raise ValueError(f"{name!r} and {next_name!r} share bytes")
    return tensors


def _tensor_ref(name: str, entry: _Message, data_file: Callable[[int], tuple[Path, int]]) -> TensorRef:
    if name.startswith("\0") or entry.all(7, bytes):
        raise ValueError(f"it holds {name!r} in slices (partitioned)")
    code = entry.last(1, int)
    if code not in _DTYPES:
        what = "text, as checkpoints of TensorFlow 2 do" if code == 7 else f"TensorFlow's data type number {code}"
        raise ValueError(f"it holds {name!r} as {what}")
    dtype = _DTYPES[code]
    dimensions = _Message(b"".join(entry.all(2, bytes))).all(2, bytes)  # repeated messages merge as their bytes do
    shape = tuple(_Message(dimension).last(1, int) for dimension in dimensions[: MAX_DIMENSIONS + 1])
    shard, offset, n_bytes = (entry.last(number, int) for number in (3, 4, 5))
    path, size = data_file(shard)
    checksum = entry.last(6, int)

    def verify(parts: Iterable[bytes | bytearray]) -> str | None:
        return None if _masked_crc32c(*parts) == checksum else f"{name!r} does not match its checksum"

    tensor = place(Storage(path, n_bytes, offset, verify), dtype, 0, n_bytes, shape, contiguous(shape))
    if tensor is None or n_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has {n_bytes} bytes, which is not the size of {dtype} {list(shape)}")
    if offset + n_bytes > size:
        raise CheckpointError(f"{str(path)!r} has {size} bytes, and {name!r} should end at {offset + n_bytes}; copy it again")
    return tensor
