"""Finds the entries of an uncompressed zip file, as `torch.save` writes it since version 1.6.

Reference: PKWARE's APPNOTE 6.3.9, sections 4.3 and 4.5.3 (zip64).
Known deviation: the `zipfile` module is not used. It reads a directory before its size can be checked, keeps a kilobyte per
entry, and does not tell where the bytes of an entry start or whether entries overlap.
"""

import itertools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transformer_xl.errors import CheckpointError
from transformer_xl.untrusted import read_at

SIGNATURE = b"PK\x03\x04"  # such a file starts with it
MAX_ENTRIES = 100_000  # see `pickle_child.MAX_STORAGES`
MAX_DIRECTORY_BYTES = 16 * 2**20  # 160 per entry: 46 are fixed, and PyTorch's names take 20

_END = struct.Struct("<4s4H2LH")  # signature, disks (2), entries here, entries, size, offset, comment
_LOCATOR = struct.Struct("<4sLQL")  # signature, disk, offset, disks
_END64 = struct.Struct("<4sQ2H2L4Q")  # signature, size, versions (2), disks (2), entries here, entries, size, offset
_CENTRAL = struct.Struct("<4s6H3L5H2L")  # signature, ..., CRC, sizes (2), lengths (3), ..., offset
_LOCAL = struct.Struct("<4s5H3L2H")  # signature, ..., lengths (2)


@dataclass(frozen=True)
class ZipEntry:
    """A run of bytes with a name; `crc` is their CRC-32."""

    offset: int
    size: int
    crc: int


def read_directory(path: Path, file: BinaryIO, size: int) -> dict[str, ZipEntry]:
    """Return the entries of a zip file of `size` bytes, by name; they lie within the file and do not overlap.

    Names are relative and never lead upwards, although no file is ever made from one.

    Raises:
        CheckpointError: the directory is too large or damaged; an entry is compressed or encrypted, has an unsafe name or one
            that occurs twice, overlaps another, or is not where the directory says.
    """
    n_entries, length, offset = _find(path, file, size)
    if n_entries > MAX_ENTRIES or length > MAX_DIRECTORY_BYTES:
        raise CheckpointError(
            f"'{path}' claims {n_entries} entries in a directory of {length} bytes; {MAX_ENTRIES} and {MAX_DIRECTORY_BYTES} "
            "is the most accepted"
        )
    if offset + length > size:
        raise _damaged(path, "its directory lies outside of it")
    data = read_at(path, file, offset, length)
    found: dict[str, ZipEntry] = {}
    spans: list[tuple[int, int]] = []
    at = 0
    for _ in range(n_entries):
        name, start, n_bytes, crc, at = _central(path, data, at)
        if name in found:
            raise _damaged(path, f"it has two entries {name!r}")
        first = _data_offset(path, file, name, start)
        found[name] = ZipEntry(first, n_bytes, crc)
        spans.append((start, first + n_bytes))
    if at != length:
        raise _damaged(path, "its directory has another size than it says")
    spans = [*sorted(spans), (offset, size)]
    if any(end > following for (_, end), (following, _) in itertools.pairwise(spans)):
        raise _damaged(path, "its entries overlap")
    return found


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"'{path}' is not a valid zip file: {what}; copy or download it again")


def _find(path: Path, file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Return number of entries, size and offset of the directory. No comment may follow it, and PyTorch writes none."""
    if size < _END.size:
        raise _damaged(path, "it ends early")
    end = _END.unpack(read_at(path, file, size - _END.size, _END.size))
    if end[0] != b"PK\x05\x06" or end[7]:
        raise _damaged(path, "it does not end with a directory")
    n_entries, length, offset = end[4:7]
    if n_entries < 0xFFFF and length < 0xFFFFFFFF and offset < 0xFFFFFFFF:
        return n_entries, length, offset
    at = size - _END.size - _LOCATOR.size
    locator = _LOCATOR.unpack(read_at(path, file, max(at, 0), _LOCATOR.size))
    if at < 0 or locator[0] != b"PK\x06\x07" or locator[2] + _END64.size > size:
        raise _damaged(path, "the end of its directory lies outside of it")
    end64 = _END64.unpack(read_at(path, file, locator[2], _END64.size))
    if end64[0] != b"PK\x06\x06":
        raise _damaged(path, "it does not end with a directory")
    return end64[7:10]


def _central(path: Path, data: bytes, at: int) -> tuple[str, int, int, int, int]:
    """Return name, offset, size and CRC-32 of the entry at a place of the directory, and the place of the next entry."""
    if at + _CENTRAL.size > len(data):
        raise _damaged(path, "its directory ends early")
    fields = _CENTRAL.unpack_from(data, at)
    flags, method, crc, packed, n_bytes, n_name, n_extra, n_comment = fields[3], fields[4], *fields[7:13]
    start = fields[16]
    after_name = at + _CENTRAL.size + n_name
    following = after_name + n_extra + n_comment
    if fields[0] != b"PK\x01\x02" or following > len(data):
        raise _damaged(path, "its directory is cut off")
    name = _checked_name(path, data[at + _CENTRAL.size : after_name])
    wide = _wide(path, data[after_name : after_name + n_extra], (n_bytes, packed, start))
    n_bytes, packed, start = wide
    if method or flags & 1 or packed != n_bytes:
        raise CheckpointError(f"'{path}' has a compressed or encrypted entry {name!r}; torch.save writes none, save it again")
    return name, start, n_bytes, crc, following


def _wide(path: Path, extra: bytes, fields: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return three 4-byte fields, or instead of those that are too small the 8-byte values of the zip64 extra field."""
    n = fields.count(0xFFFFFFFF)
    at = 0
    while n and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1 and 8 * n <= length <= len(extra) - at - 4:
            values = iter(struct.unpack_from(f"<{n}Q", extra, at + 4))
            size, packed, start = (next(values) if field == 0xFFFFFFFF else field for field in fields)
            return size, packed, start
        at += 4 + length
    if n:
        raise _damaged(path, "the size of an entry is missing")
    return fields


def _checked_name(path: Path, data: bytes) -> str:
    try:
        name = data.decode()
    except UnicodeDecodeError as error:
        raise _damaged(path, f"an entry has the name {data[:40]!r}, which is not text") from error
    if not name or not name.isprintable() or name.startswith("/") or "\\" in name or ":" in name or ".." in name.split("/"):
        raise CheckpointError(f"'{path}' has an entry {name[:100]!a}, a name that leads elsewhere; torch.save writes none such")
    return name


def _data_offset(path: Path, file: BinaryIO, name: str, start: int) -> int:
    """Return where the bytes of an entry start; only the header in front of them says that."""
    encoded = name.encode()
    header = read_at(path, file, start, _LOCAL.size + len(encoded))
    fields = _LOCAL.unpack_from(header)
    if fields[0] != SIGNATURE or fields[2] & 1 or fields[3] or fields[9] != len(encoded) or header[_LOCAL.size :] != encoded:
        raise _damaged(path, f"entry {name!r} is not where its directory says")
    return start + _LOCAL.size + fields[9] + fields[10]
