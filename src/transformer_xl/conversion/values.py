"""Reads foreign settings strictly: from sound JSON, and each value of the type that it must have."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_xl.conversion.readers.files import open_regular, parse_json, read_at
from transformer_xl.errors import CheckpointError, ConfigError

MAX_BYTES = 2**20
MAX_INTEGER = 2**63
MAX_CLUSTERS = 100

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 100


def shown(value: object) -> str:
    """Return a foreign name or value for a message: quoted, short, and on one line."""
    return "an enormous integer" if _is_enormous(value) else _short.repr(value)


def integer(values: Mapping[str, Any], name: str) -> int:
    """Return an integer setting. This and the functions below raise `ConfigError` for a value of another type."""
    value = _given(values, name)
    if type(value) is not int or _is_enormous(value):
        raise ConfigError(f"{name} ({shown(value)}) must be an integer below 2**63")
    return value


def number(values: Mapping[str, Any], name: str) -> float:
    """Return a number."""
    value = _given(values, name)
    if type(value) not in (int, float) or _is_enormous(value):
        raise ConfigError(f"{name} ({shown(value)}) must be a number")
    return float(value)


def truth(values: Mapping[str, Any], name: str) -> bool:
    """Return a boolean, which some programs write as 1 or 0."""
    value = _given(values, name)
    if type(value) not in (int, bool) or value not in (0, 1):
        raise ConfigError(f"{name} ({shown(value)}) must be true or false")
    return bool(value)


def one_of(values: Mapping[str, Any], name: str, choices: tuple[Any, ...]) -> Any:
    """Return one of a few values."""
    value = _given(values, name)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(f"{name} ({shown(value)}) must be {' or '.join(map(repr, choices))}")
    return value


def integers(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a short list of integers."""
    return tuple(integer({name: value}, name) for value in _listed(values, name))


def truths(values: Mapping[str, Any], name: str, *, length: int) -> tuple[bool, ...]:
    """Return booleans, cut to a length. In a shorter list the rest is false, as in the original programs."""
    given = tuple(truth({name: value}, name) for value in _listed(values, name))
    return (given + (False,) * length)[:length]


def _given(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise ConfigError(f"{name} is missing")
    return values[name]


def _listed(values: Mapping[str, Any], name: str) -> list[Any] | tuple[Any, ...]:
    value = _given(values, name)
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} ({shown(value)}) must be a list")
    if len(value) > MAX_CLUSTERS:
        raise ConfigError(f"{name} has {len(value):,} values; {MAX_CLUSTERS} clusters are the most that are converted")
    return value


def _is_enormous(value: object) -> bool:
    return isinstance(value, int) and not -MAX_INTEGER <= value < MAX_INTEGER


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of moderate size; see `parse_json` for what is refused."""
    file, size = open_regular(path)
    with file:
        if size > MAX_BYTES:
            raise CheckpointError(f"'{path}' has {size} bytes; {MAX_BYTES} is the most that settings may take")
        data = read_at(path, file, 0, size)
    try:
        values = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' is no sound JSON: {' '.join(str(error).split())}; restore the file") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"'{path}' is no JSON object; restore the file")
    return values
