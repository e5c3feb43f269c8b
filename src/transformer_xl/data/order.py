"""The order in which a text is read: as stored, or with its documents in another random order in each epoch.

A shuffled text is never written. Its order takes eight bytes a document; places in it are found by the number of tokens before
each block of documents.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import numpy as np

Shuffle = Literal["none", "documents"]

ORDER = f"Generator(PCG64).permutation of numpy {np.__version__}"
"""What decides a random order besides its key; numpy may draw others in another version."""

BLOCK = 64
"""The number of documents whose tokens are counted together."""

_KEPT = 1024  # blocks; each lane of a batch reads one or two


def permutation(n: int, *key: int) -> np.ndarray:
    """Return the numbers 0 … n - 1 in a random order, int64, drawn from a key of numbers of at least 0."""
    return np.random.Generator(np.random.PCG64(key)).permutation(n)


class PlainText:
    """A text in the order in which it is stored."""

    def __init__(self, ids: np.ndarray, document_starts: np.ndarray) -> None:
        self._ids, self._starts = np.asarray(ids), document_starts  # a memory map is sliced ten times more slowly

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids at places begin … end - 1, and the offsets from `begin` at which documents start."""
        first, last = np.searchsorted(self._starts, (begin, end))
        return self._ids[begin:end], self._starts[first:last] - begin


class ShuffledText:
    """The documents of a text in a random order, which depends only on the key and on `ORDER`.

    Args:
        ids: shape (n_tokens,).
        document_starts: token offsets, increasing; text before the first one is a document too, and offsets beyond `ids` are
            ignored.
        key: seed and epoch.
    """

    def __init__(self, ids: np.ndarray, document_starts: np.ndarray, *, key: tuple[int, ...]) -> None:
        self._ids = np.asarray(ids)
        starts = document_starts[: np.searchsorted(document_starts, len(ids))]
        self._starts = starts if starts[:1].tolist() == [0] else np.concatenate([[0], starts])  # a view if possible
        self._order = permutation(len(self._starts), *key)
        sizes = [self._look_up(index)[1].sum() for index in range(-(-len(self._order) // BLOCK))]
        self._borders = np.concatenate([[0], np.cumsum(sizes)])  # tokens before each block
        self._block = lru_cache(_KEPT)(self._make_block)

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids at places begin … end - 1, and the offsets from `begin` at which documents start."""
        parts, starts = [], []
        for place, source, length in self._documents(begin, end):
            parts.append(self._ids[source + max(begin - place, 0) : source + min(length, end - place)])
            if place >= begin:
                starts.append(place - begin)
        return np.concatenate(parts), np.array(starts, np.int64)

    def _documents(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield place in this text, place in the ids, and length of each document with a token at begin … end - 1."""
        while begin < end:
            index = int(np.searchsorted(self._borders, begin, "right")) - 1
            places, sources, lengths = self._block(index)
            chosen = slice(np.searchsorted(places, begin, "right") - 1, np.searchsorted(places, end))
            yield from zip(places[chosen].tolist(), sources[chosen].tolist(), lengths[chosen].tolist(), strict=True)
            begin = int(self._borders[index + 1])

    def _make_block(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return places in this text, places in the ids, and lengths, of the documents of a block."""
        sources, lengths = self._look_up(index)
        return self._borders[index] + np.cumsum(lengths) - lengths, sources, lengths

    def _look_up(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return places in the ids, and lengths, of the documents of a block."""
        documents = self._order[index * BLOCK : (index + 1) * BLOCK]
        sources = self._starts[documents]
        following = np.minimum(documents + 1, len(self._starts) - 1)
        ends = np.where(documents + 1 < len(self._starts), self._starts[following], len(self._ids))
        return sources, ends - sources
