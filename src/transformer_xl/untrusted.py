"""The one way in which files that others may have written are opened, and JSON in them is read.

A file is a regular one of limited size, opened without waiting. JSON is UTF-8. Every key occurs in it once, and every number is
finite.
"""

import json
import math
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from transformer_xl.errors import CheckpointError, one_line

MAX_SETTINGS_BYTES = 2**20
"""The largest JSON file that holds no vocabulary."""

REMEDY = "restore it from a copy"

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def open_regular(path: Path) -> tuple[FileIO, int]:
    """Open a regular file for reading; return it and its size (bytes).

    A link is followed, because the cache of Hugging Face consists of links. Only the user names files: a name inside of a file
    never leads to another file. A pipe or device is refused without waiting for its other end.

    Raises:
        CheckpointError: it cannot be opened, or is not a regular file.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"'{path}' cannot be read: {reason}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"'{path}' is not a regular file, but a directory, pipe or device; give the path of a file")
    # unbuffered, because whoever reads more than a few places buffers it
    return FileIO(descriptor, "rb"), status.st_size


def read_at(path: Path, file: BinaryIO, offset: int, n: int) -> bytes:
    """Return exactly `n` bytes from an offset; the caller has limited `n`."""
    try:
        file.seek(offset)
        data = file.read(n)
    except (OSError, ValueError, OverflowError) as error:
        raise CheckpointError(f"'{path}' cannot be read at byte {offset}: {error}") from error
    if len(data) != n:
        raise CheckpointError(f"'{path}' ends {n - len(data)} bytes too early; copy or download it again")
    return data


def read_small(path: Path, *, most_bytes: int, remedy: str = REMEDY) -> bytes:
    """Return the content of a regular file of limited size.

    Raises:
        CheckpointError: the file cannot be read or is too large.
    """
    file, size = open_regular(path)
    with file:
        if size > most_bytes:
            raise CheckpointError(f"'{path}' has {size:,} bytes; {most_bytes:,} is the most accepted; {remedy}")
        return read_at(path, file, 0, size)


def read_json(path: Path, *, most_bytes: int = MAX_SETTINGS_BYTES, remedy: str = REMEDY) -> Any:
    """Read a JSON file of limited size; see `parse_json` for what is refused, and `remedy` ends the error's message.

    Raises:
        CheckpointError: the file cannot be read, is too large, or holds no such JSON.
    """
    data = read_small(path, most_bytes=most_bytes, remedy=remedy)
    try:
        return parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not valid JSON: {one_line(error)}; {remedy}") from None


def read_json_object(path: Path, *, remedy: str = REMEDY) -> dict[str, Any]:
    """Read a JSON file of settings, an object; see `read_json`."""
    values = read_json(path, remedy=remedy)
    if not isinstance(values, dict):
        raise CheckpointError(f"'{path}' is not a JSON object; {remedy}")
    return values


def parse_json(data: bytes) -> Any:
    """Parse JSON in UTF-8.

    Refused is what programs read in different ways: keys that occur twice, NaN, Infinity, and numbers that become infinite.

    Raises:
        ValueError: it is not such JSON.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_repeats, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(one_line(error)) from None


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can hold a text; it cannot hold half of a character (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"key {twice[:100]!a} occurs twice")
    return values


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number
