"""Files that others may have written: weights and pickles that are opened, and JSON that is read."""

import json
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from transformer_xl.errors import CheckpointError, one_line

REMEDY = "restore it from a copy"


def open_regular(path: Path) -> tuple[FileIO, int]:
    """Open a regular file for reading; return it and its size (bytes).

    A link is followed, because the cache of Hugging Face consists of links. Only the user names files: a name inside of a file
    never leads to another file. A pipe or device is refused without waiting for its other end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"'{path}' is not a regular file, but a directory, pipe or device; give the path of a file")
    return FileIO(descriptor, "rb"), status.st_size  # whoever reads often buffers it


def read_json(path: Path, *, remedy: str = REMEDY) -> Any:
    """Read a JSON file; see `parse_json` for what is refused, and `remedy` ends the error's message."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not valid JSON: {one_line(error)}; {remedy}") from None


def read_json_object(path: Path, *, remedy: str = REMEDY) -> dict[str, Any]:
    """Read a JSON file of settings, an object; see `read_json`."""
    values = read_json(path, remedy=remedy)
    if not isinstance(values, dict):
        raise CheckpointError(f"'{path}' is not a JSON object; {remedy}")
    return values


def parse_json(data: bytes) -> Any:
    """Parse JSON in UTF-8; NaN and Infinity, which it lacks, are no numbers.

    Raises:
        ValueError: it is not such JSON.
    """
    try:
        return json.loads(data.decode(), parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can hold a text; it cannot hold half of a character (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
