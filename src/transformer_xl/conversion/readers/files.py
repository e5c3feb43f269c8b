"""Opens files that others made (regular files only, without waiting), and parses JSON strictly."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from transformer_xl.errors import CheckpointError

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """Open a regular file for reading; return it and its size (bytes).

    A link is followed, because the cache of Hugging Face consists of links. Only the user names files: a name inside of a file
    never leads to another file. A pipe or device is refused without waiting for its other end.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"'{path}' cannot be read: {reason}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"'{path}' is no regular file; give the path of a checkpoint")
    # unbuffered, because a child process may read the same open file and move its position
    return os.fdopen(descriptor, "rb", buffering=0), status.st_size


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


def parse_json(data: bytes) -> Any:
    """Parse JSON as UTF-8; refuse NaN, Infinity and keys that occur twice, which programs read in different ways.

    Raises:
        ValueError: it is no such JSON.
        RecursionError: it is nested too deep.
    """
    return json.loads(data.decode(), object_pairs_hook=_without_repeats, parse_constant=_no_constant)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"key {name[:100]!a} occurs twice")
        values[name] = value
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
