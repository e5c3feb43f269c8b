"""JSON that notices any change to its bytes: it carries a checksum of itself, and only one spelling of it is accepted."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformer_xl.files import regular_size

_MAX_BYTES = 64 * 2**10  # ours take a few hundred; a huge file must not be read before it is known to be ours


def canonical(value: Any) -> bytes:
    """Serialize to the one spelling that this package writes: sorted keys, no spaces, ASCII.

    Args:
        value: JSON scalars, lists and dicts with text keys.

    Returns:
        The bytes; floats keep every bit (Python writes the shortest text that reads back equal).

    Raises:
        ValueError: if a number is NaN or infinite, which JSON cannot spell, or `value` contains itself.
        TypeError: if something in `value` is not JSON.

    Example:
        >>> canonical({"b": 1, "a": [0.1, None]})
        b'{"a":[0.1,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal(content: dict[str, Any]) -> bytes:
    """Serialize `content` together with a checksum of it.

    Args:
        content: what to write; the key "checksum" is ours.

    Returns:
        Canonical JSON that `unseal` accepts.
    """
    checksum = hashlib.sha256(canonical(content)).hexdigest()
    return canonical({**content, "checksum": checksum})


def unseal(data: bytes) -> dict[str, Any]:
    """Read what `seal` wrote.

    Args:
        data: the bytes of a sealed file.

    Returns:
        The content, without the checksum.

    Raises:
        ValueError: if `data` is not, byte for byte, what `seal` writes.
    """
    try:
        content = json.loads(data)
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        content.pop("checksum", None)
        # Sealing again compares the checksum and, in the same breath, every byte that a checksum of parsed values would
        # forgive: spaces, escapes, repeated keys, another spelling of a number.
        if data != seal(content):
            raise ValueError("its checksum does not match its content")
    except (ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return content


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a sealed file.

    Args:
        path: a small regular file.

    Returns:
        The content, without the checksum.

    Raises:
        ValueError: if it is not what `seal` writes.
        OSError: if it cannot be read.
    """
    if regular_size(path) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    return unseal(path.read_bytes())
