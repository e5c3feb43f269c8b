"""The JSON files of checkpoints: small sealed ones, which carry a checksum of themselves, and the state of a run.

A sealed file notices any change to its bytes, because only one spelling of it is accepted. The state reads back
exactly as it was given.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from transformer_xl.errors import CheckpointError
from transformer_xl.files import regular_size

MAX_STATE_BYTES = 16 * 2**20

_MAX_BYTES = 64 * 2**10  # ours take a few hundred; a huge file must not be read before it is known to be ours


def canonical(value: Any) -> bytes:
    """Serialize to the one spelling that this package writes: sorted keys, no spaces, ASCII; floats keep every bit.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot spell, or `value` contains itself.
        TypeError: something in `value` is not JSON.

    Example:
        >>> canonical({"b": 1, "a": [0.1, None]})
        b'{"a":[0.1,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal(content: dict[str, Any]) -> bytes:
    """Serialize `content` together with a checksum of it, under the key "checksum"."""
    checksum = hashlib.sha256(canonical(content)).hexdigest()
    return canonical({**content, "checksum": checksum})


def unseal(data: bytes) -> dict[str, Any]:
    """Return the content that `seal` wrote, without the checksum.

    Raises:
        ValueError: `data` is not, byte for byte, what `seal` writes.
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
    """Read the content of a small sealed file, without the checksum.

    Raises:
        ValueError: it is not what `seal` writes.
        OSError: it cannot be read.
    """
    if regular_size(path) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    return unseal(path.read_bytes())


def encode_state(state: dict[str, Any]) -> bytes:
    """Serialize the state; refuse what JSON would silently change (tuples, number keys).

    Raises:
        CheckpointError: naming the value that JSON cannot hold.
    """
    try:
        _check_json(state, "state")
        data = canonical(state)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; a list that contains itself
        raise CheckpointError(f"state cannot be stored: {error}; keep to small, plain values") from error
    if len(data) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"state takes {len(data)} bytes as JSON, more than {MAX_STATE_BYTES}; put arrays into `training` as tensors"
        )
    return data


def decode_state(data: bytes) -> dict[str, Any]:
    """Read what `encode_state` wrote.

    Raises:
        ValueError: it is no JSON object, or holds what `encode_state` refuses.
    """
    try:
        state = json.loads(data)
        if not isinstance(state, dict):
            raise ValueError("it holds no JSON object")
        _check_json(state, "state")
    except (CheckpointError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return state


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}, and JSON keys are text; write it as {str(key)!r}")
            _check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(f"{where} is {value}, which JSON cannot hold; store None or a finite number")
    elif value is not None and not isinstance(value, str | int):
        raise CheckpointError(f"{where} is a {type(value).__name__}, which JSON cannot hold; use a list, number or text")
