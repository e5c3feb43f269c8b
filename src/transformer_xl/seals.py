"""Sealed JSON: small files that contain their own checksum, and what differs from sealed values."""

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformer_xl.errors import one_line, shown
from transformer_xl.files import canonical_json, regular_size
from transformer_xl.untrusted import parse_json

_MOST_BYTES = 4 * 2**20


def seal(content: dict[str, Any]) -> bytes:
    """Serialize `content` with a checksum of it under the key "checksum"."""
    return canonical_json({**content, "checksum": json_sha256(content)})


def unseal(data: bytes) -> dict[str, Any]:
    """Return the content of sealed bytes, without the checksum.

    Raises:
        ValueError: `data` is not, byte for byte, what `seal` returns.
    """
    try:
        content = parse_json(data)
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        content.pop("checksum", None)
        # Sealing again compares the checksum, and also what a checksum of parsed values would not notice: spaces, escapes,
        # another spelling of a number.
        if data != seal(content):
            raise ValueError("its checksum does not match its content")
    except ValueError as error:
        raise ValueError(one_line(error)) from error
    return content


def read_sealed(path: Path) -> dict[str, Any]:
    """Read the content of a small sealed file, without the checksum.

    Raises:
        ValueError: it is not what `seal` returns.
        OSError: it cannot be read.
    """
    if regular_size(path) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return unseal(path.read_bytes())


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value, as hex; spaces and the order of keys do not matter.

    Example:
        >>> json_sha256({"a": 1, "b": 2}) == json_sha256({"b": 2, "a": 1}) != json_sha256({"a": 1.0, "b": 2})
        True
    """
    return hashlib.sha256(canonical_json(value)).hexdigest()


def seal_command(path: Path) -> str:
    """Return the command that seals a run or a model as it is, for messages."""
    return f"txl seal {shlex.quote(str(path))}"


def summary(found: Sequence[str]) -> str:
    """Return the first of some differences, and how many more there are."""
    return found[0] + (f" and {len(found) - 1} more" if len(found) > 1 else "")


_NOTHING = object()


def differences(sealed: Any, found: Any, name: str = "") -> Iterator[str]:
    """Yield in words what differs between two JSON values.

    Example:
        >>> print(*differences({"optim": {"lr": 0.1}, "n": 1}, {"optim": {"lr": 0.2}, "m": True}), sep=", ")
        m is True (sealed: nothing), n is nothing (sealed: 1), optim.lr is 0.2 (sealed: 0.1)
    """
    if isinstance(sealed, dict) and isinstance(found, dict):
        for key in sorted(sealed.keys() | found.keys()):
            inner = f"{name}.{key[:100]}" if name else key[:100]
            yield from differences(sealed.get(key, _NOTHING), found.get(key, _NOTHING), inner)
    elif sealed is _NOTHING or found is _NOTHING or canonical_json(sealed) != canonical_json(found):
        old, new = ("nothing" if value is _NOTHING else shown(value) for value in (sealed, found))
        yield f"{name} is {new} (sealed: {old})"
