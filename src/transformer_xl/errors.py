"""The errors that users see: one line that names the value and the remedy.

Every error the package raises on purpose derives from `TxlError`; the command line prints its message on one line and exits
with status 1, so a traceback always means a defect of ours.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class TxlError(Exception):
    """Base of all errors that a user can mend."""


class ConfigError(TxlError, ValueError):
    """A recipe, key or value that cannot work."""


class CorpusError(TxlError):
    """A text source that is missing, empty, unreadable or not what its name promises."""


class TokenizerError(TxlError, ValueError):
    """Text or ids that the tokenizer cannot represent, or a tokenizer that does not fit."""


class CheckpointError(TxlError):
    """A run directory or checkpoint that is missing, damaged or of another run."""


class TrainingError(TxlError):
    """Training that cannot go on, for example after too many steps without a finite gradient."""


class LostContactError(TrainingError):
    """Another process died, or did not answer in time."""


class ToldElsewhereError(TxlError):
    """Why this process ends is told by the first one."""


def did_you_mean(name: str, known: Iterable[str], *, most: int | None = None) -> str:
    """Return a hint that names the nearest known name, else all of them.

    Args:
        name: what the user wrote.
        known: the names that exist.
        most: how many of them are told; None: all.

    Returns:
        A clause to append to an error message.

    Example:
        >>> did_you_mean("quickstrat", ["quickstart", "shakespeare-char"])
        "did you mean 'quickstart'?"
        >>> did_you_mean("zzz", ["b", "a"])
        'known: a, b'
    """
    options = sorted(known)
    nearest = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if nearest:
        return f"did you mean '{nearest[0]}'?"
    told = options[:most]
    more = f" and {len(options) - len(told)} more" if len(told) < len(options) else ""
    return f"known: {', '.join(told)}{more}"


@contextmanager
def room_for(what: str, remedy: str) -> Iterator[None]:
    """Turn memory that cannot be had inside the block into an error that a user can mend.

    Args:
        what: needs it, such as "a text".
        remedy: what to do, such as "lower --mem-len".

    Raises:
        ConfigError: it cannot be had.

    Example:
        >>> with room_for("all of it", "take less"):
        ...     raise MemoryError
        Traceback (most recent call last):
        transformer_xl.errors.ConfigError: memory for all of it cannot be had here; take less
    """
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        # torch has a class of its own for the memory of a GPU only, and sizes overflow before memory does
        signs = ("allocate", "out of memory", "verflow")
        if not (isinstance(error, (MemoryError, OverflowError)) or any(sign in str(error) for sign in signs)):
            raise
        raise ConfigError(f"memory for {what} cannot be had here; {remedy}") from None
