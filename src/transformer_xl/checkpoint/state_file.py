"""The part of a checkpoint that is not tensors: JSON that reads back exactly as it was given."""

import json
import math
from typing import Any

from transformer_xl.checkpoint.sealed_json import canonical
from transformer_xl.errors import CheckpointError

MAX_STATE_BYTES = 16 * 2**20


def encode_state(state: dict[str, Any]) -> bytes:
    """Serialize the state.

    Args:
        state: JSON scalars, lists and dicts with text keys. What JSON would silently change (tuples, number keys) is refused.

    Returns:
        Canonical JSON.

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

    Args:
        data: JSON.

    Returns:
        A state equal to the one that was saved.

    Raises:
        ValueError: if it is no JSON object, or holds what `encode_state` refuses.
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
