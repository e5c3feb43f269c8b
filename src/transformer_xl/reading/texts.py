"""Many texts, read side by side: in windows that are sorted by length, so that little of what is read is padding."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from transformer_xl.data.labels import Example

WINDOW = 16
"""Batches whose texts are sorted by length: enough to save most of the padding, few enough that answers come soon."""

_T = TypeVar("_T")
_MOST_CHARACTERS = 1 << 24  # of a window's texts, so that long ones do not fill the memory


def n_characters(example: Example) -> int:
    """Return how many characters the texts of an example have."""
    return sum(map(len, (example.text, example.pair or "", *example.choices)))


def windows(
    examples: Iterable[_T],
    batch_size: int,
    is_ready: Callable[[], bool] | None = None,
    *,
    size: Callable[[Any], int] = n_characters,
) -> Iterator[list[_T]]:
    """Yield texts in lists: the first of one batch, each of the next twice as long, up to `WINDOW` batches.

    So the first answers come soon. Where the lists end follows from the texts alone, unless some are waited for (`is_ready`).
    """
    source, n_most = iter(examples), batch_size
    while True:
        window: list[_T] = []
        n_character = 0
        while len(window) < n_most and n_character < _MOST_CHARACTERS and (not window or is_ready is None or is_ready()):
            example = next(source, None)
            if example is None:
                break
            window.append(example)
            n_character += size(example)
        if not window:
            return
        yield window
        n_most = min(2 * n_most, WINDOW * batch_size)
