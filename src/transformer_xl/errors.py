"""The errors that users see: one line that names the value and the remedy.

Every error that the package raises on purpose derives from `TxlError`. The command line prints its message on one line and
exits with status 1, so a traceback always means a bug in the package.
"""

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class TxlError(Exception):
    """Base class of all errors that a user can fix."""


class ConfigError(TxlError, ValueError):
    """A recipe, key or value that cannot work."""


class CorpusError(TxlError):
    """A text that is missing, empty, unreadable or not what its name promises."""


class TokenizerError(TxlError, ValueError):
    """Text or ids that the tokenizer cannot represent, or a tokenizer that does not fit."""


class CheckpointError(TxlError):
    """A run, model or checkpoint that is missing, damaged or does not fit, or a file that cannot be written."""


class TrainingError(TxlError):
    """Training that cannot continue, for example after too many steps without a finite gradient."""


class LostContactError(TrainingError):
    """Another process died or did not answer in time."""


class ToldElsewhereError(TxlError):
    """An error that ends this process and that the first process reports."""


def one_line(error: Exception) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split())


def shown(value: object) -> str:
    """Return a name or value of unknown origin for a message: quoted, short, and on one line.

    Example:
        >>> print(shown(10**5000), shown("a" * 1000)[:9], shown([1] * 1000))
        an enormous integer 'aaaaaaaa [1, 1, 1, 1, 1, 1, ...]
    """
    return "an enormous integer" if is_enormous(value) else _short.repr(value)


def is_enormous(value: object) -> bool:
    """Return whether a value is an integer of more than 64 bits."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 100


def did_you_mean(name: str, known: Iterable[str], *, most: int | None = None) -> str:
    """Return a clause for an error message that names the nearest known name, or else all of them (`most` at most).

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
    listed = options[:most]
    more = f" and {len(options) - len(listed)} more" if len(listed) < len(options) else ""
    return f"known: {', '.join(listed)}{more}"


@contextmanager
def room_for(what: str, remedy: str) -> Iterator[None]:
    """Turn a lack of memory inside the block into a `ConfigError`.

    Args:
        what: what needs the memory, such as "a text".
        remedy: what to do, such as "lower --mem-len".

    Example:
        >>> with room_for("all of it", "take less"):
        ...     raise MemoryError
        Traceback (most recent call last):
        transformer_xl.errors.ConfigError: not enough memory for all of it; take less
    """
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        # torch has its own error class for GPU memory only, and a size may overflow before memory runs out
        signs = ("allocate", "out of memory", "verflow")
        if not (isinstance(error, (MemoryError, OverflowError)) or any(sign in str(error) for sign in signs)):
            raise
        raise ConfigError(f"not enough memory for {what}; {remedy}") from None
