"""Small JSON files of other programs: settings, read strictly."""

import json
from pathlib import Path
from typing import Any

from transformer_xl.conversion.key_maps.values import shown
from transformer_xl.conversion.readers.files import open_regular, read_at
from transformer_xl.errors import CheckpointError

MAX_BYTES = 2**20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of moderate size; numbers that are none, and keys that come twice, are refused.

    Raises:
        CheckpointError: missing, too large, or no such object.
    """
    file, size = open_regular(path)
    with file:
        if size > MAX_BYTES:
            raise CheckpointError(f"'{path}' has {size} bytes; {MAX_BYTES} is the most that settings may take")
        data = read_at(path, file, 0, size)
    try:
        values = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' is no sound JSON: {' '.join(str(error).split())}; restore the file") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"'{path}' is no JSON object; restore the file")
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"key {shown(name)} occurs twice")
        values[name] = value
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
