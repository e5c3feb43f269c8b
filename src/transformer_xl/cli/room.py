"""Memory that a command asks for and cannot have, as one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_xl.errors import ConfigError


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
        if not _is_of_memory(error):
            raise
        raise ConfigError(f"memory for {what} cannot be had here; {remedy}") from None


def _is_of_memory(error: Exception) -> bool:
    """Say whether an error is of memory; torch has a class of its own for that of a GPU only."""
    signs = ("allocate", "out of memory", "verflow")  # sizes overflow before memory does
    return isinstance(error, (MemoryError, OverflowError)) or any(sign in str(error) for sign in signs)
