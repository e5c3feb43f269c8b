"""Reads foreign settings strictly: each value has the type that it must have."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from transformer_xl.errors import ConfigError, did_you_mean, is_enormous, shown

MAX_CLUSTERS = 100


def integer(values: Mapping[str, Any], name: str) -> int:
    """Return an integer setting. This and the functions below raise `ConfigError` for a value of another type."""
    value = _given(values, name)
    if type(value) is not int or is_enormous(value):
        raise ConfigError(f"{name} ({shown(value)}) must be an integer below 2**63")
    return value


def number(values: Mapping[str, Any], name: str) -> float:
    """Return a number."""
    value = _given(values, name)
    if type(value) not in (int, float) or is_enormous(value):
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


def known(
    values: Mapping[str, Any],
    names: Collection[str],
    *,
    without_effect: Collection[str] = (),
    old_names: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the settings that matter, under their newest names; refuse unknown settings.

    Args:
        values: what a file holds.
        names: of the settings that matter.
        without_effect: names of settings that are left out.
        old_names: the newest name of each old one.
    """
    found: dict[str, Any] = {}
    for old, value in values.items():
        name = old_names.get(old, old)
        if name in without_effect:
            continue
        if name not in names:
            raise ConfigError(f"unknown key {shown(old)}; {did_you_mean(old[:100], names)}")
        if name in found and found[name] != value:
            raise ConfigError(f"{name} is {shown(found[name])} and, under another name, {shown(value)}; keep one of them")
        found[name] = value
    return found


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
