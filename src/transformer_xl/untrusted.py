"""What others may have written: weights and pickles that are opened, JSON that is read, and bytes that should be text."""

import codecs
import json
import os
import re
import stat
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from transformer_xl.errors import CheckpointError, CorpusError, one_line

REMEDY = "restore it from a copy"

CONVERT = "convert it (Latin-1: iconv -f LATIN1 -t UTF-8; Chinese: iconv -f GB18030 -t UTF-8)"
"""The remedy for text in another encoding than UTF-8."""

_LOOKED_AT = 1 << 12  # bytes that show what a file is
_HALF = re.compile('[^"]{0,20}[\ud800-\udfff]')
_CONTROL = bytes({*range(0x20), 0x7F} - {*b"\t\n\v\f\r\x1b"})


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


def parse_texts(data: bytes, place: str) -> Any:
    """Parse JSON that holds texts, from a `place`; see `parse_json`. What stands for half of a character is no text.

    Raises:
        CorpusError: it is not such JSON.
    """
    try:
        value = parse_json(data)
        half = _HALF.search(json.dumps(value, ensure_ascii=False)) if b"\\u" in data else None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{place}: it is not JSON: {one_line(error)}") from None
    if half:
        raise CorpusError(f"{place}: {half[0]!a} ends in half of a character (a lone surrogate); write the whole one")
    return value


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can hold a text; it cannot hold half of a character (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of_bytes(data: bytes) -> Literal["UTF-8", "another encoding", "binary"]:
    r"""Tell by its beginning whether a file is text.

    Text of any encoding but UTF-16 and UTF-32 has no NUL bytes and hardly any other control bytes. One byte in ten is one where
    all are equally likely, as in compressed data.

    Example:
        >>> [kind_of_bytes(data) for data in (b"caf\xc3\xa9", b"caf\xe9 noir", b"\x1f\x8b\x08\x02\xff", b"a\0")]
        ['UTF-8', 'another encoding', 'binary', 'binary']
    """
    data = data[:_LOOKED_AT]
    if b"\0" in data:
        return "binary"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)  # a character that is cut at the end is no error
    except UnicodeDecodeError:
        return "binary" if len(data) - len(data.translate(None, _CONTROL)) > len(data) // 50 else "another encoding"
    return "UTF-8"


def where_cut(data: bytes) -> Literal["begins", "ends", ""]:
    r"""Return whether a text in UTF-8 begins or ends in the middle of a character.

    Example:
        >>> [where_cut(data) for data in ("龘龘".encode(), "龘龘".encode()[1:], "龘龘".encode()[:-1], b"caf\xe9 noir")]
        ['', 'begins', 'ends', '']
    """
    whole = data[:4].lstrip(bytes(range(0x80, 0xC0))) + data[4:]
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(whole)
    except UnicodeDecodeError:
        return ""
    return "begins" if len(whole) < len(data) else "ends" if decoder.getstate()[0] else ""


def not_utf8(error: UnicodeDecodeError, *, offset: int = 0) -> str:
    """Return where bytes are not UTF-8, and what to do about it; `offset` bytes stand before them."""
    data = error.object[error.start :]
    remedy = "it is binary, not text: give another file" if kind_of_bytes(data) == "binary" else CONVERT
    others = error.object[: error.start] + error.object[error.start + 1 :]  # one such byte alone is more likely Latin-1
    if not others.isascii() and (where := where_cut(error.object)):
        remedy = f"the text {where} inside a character; cut it between two"
    return f"byte {offset + error.start} (0x{data[0]:02x}) is not UTF-8; {remedy}"


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
