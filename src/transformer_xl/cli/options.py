"""What several commands make of their options: lists, limits, and warnings."""

import sys
from collections.abc import Sequence

from transformer_xl.errors import ConfigError, did_you_mean


def numbers_of(option: str, text: str, *, least: int = 1) -> list[int]:
    """Return the numbers that an option lists, each once.

    Raises:
        ConfigError: anything else than numbers of at least `least` with commas between.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ConfigError(f"--{option} '{text}' must be numbers of at least {least} with commas between, such as 1,4,16")
    return list(dict.fromkeys(map(int, parts)))


def names_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names that an option lists, each once.

    Raises:
        ConfigError: a name that is not among the known ones.
    """
    chosen = [part.strip() for part in text.split(",")]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"unknown --{option} '{name}'; {did_you_mean(name, known)}")
    return list(dict.fromkeys(chosen))


def check_least(limits: dict[str, tuple[int | None, int]]) -> None:
    """Refuse options below their least values.

    Args:
        limits: value and least value by option; None is not checked.

    Raises:
        ConfigError: one is below.
    """
    for option, (value, least) in limits.items():
        if value is not None and value < least:
            raise ConfigError(f"--{option} ({value}) must be at least {least}")


def warn(message: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {message}", file=sys.stderr)
