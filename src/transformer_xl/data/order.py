"""The order in which a text is read: as stored, or with its documents in another random order in each epoch.

A shuffled text is never written. The order takes no memory, because each place of a permutation is computed when it is needed.
Places in the text are computed in blocks of documents, and only the number of tokens before each block is kept.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import numpy as np

Shuffle = Literal["none", "documents"]

BLOCK = 1024
"""The number of documents whose places are computed together and kept while a lane reads them."""

_BLOCKS_AT_ONCE = 256

_ROUNDS = 6
_MULTIPLIERS = np.array([0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53], np.uint64)
_SHIFT = np.uint64(33)


class PlainText:
    """A text in the order in which it is stored."""

    def __init__(self, ids: np.ndarray, document_starts: np.ndarray) -> None:
        self._ids, self._starts = _fast(ids), document_starts

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids at places begin … end - 1, and the offsets from `begin` at which documents start."""
        first, last = np.searchsorted(self._starts, (begin, end))
        return self._ids[begin:end], self._starts[first:last] - begin


class ShuffledText:
    """The documents of a text in a random order, which depends only on the key.

    Args:
        ids: shape (n_tokens,).
        document_starts: token offsets, increasing; text before the first one is a document too, and offsets beyond `ids` are
            ignored.
        key: seed and epoch.
        n_lanes: number of places that are read in parallel.
    """

    def __init__(
        self,
        ids: np.ndarray,
        document_starts: np.ndarray,
        *,
        key: tuple[int, ...],
        n_lanes: int = 1,
    ) -> None:
        self._ids = _fast(ids)
        starts = document_starts[: np.searchsorted(document_starts, len(ids))]
        self._starts = starts if starts[:1].tolist() == [0] else np.concatenate([[0], starts])  # a view if possible
        n_documents = len(self._starts)
        self._order = Permutation(n_documents, *key)
        self._borders = np.concatenate([[0], np.cumsum(list(self._block_sizes(n_documents)))])  # tokens before each block
        self._block = lru_cache(2 * n_lanes + 1)(self._make_block)

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
            places, sources = self._block(index)
            first, last = np.searchsorted(places, begin, "right") - 1, np.searchsorted(places, end)
            last = min(int(last), len(sources))
            lengths = np.diff(places[first : last + 1])
            yield from zip(places[first:last].tolist(), sources[first:last].tolist(), lengths.tolist(), strict=True)
            begin = int(self._borders[index + 1])

    def _make_block(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the documents of a block begin in this text (and where the last one ends), and where in the ids."""
        sources, lengths = self._look_up(index * BLOCK, min((index + 1) * BLOCK, len(self._starts)))
        return self._borders[index] + np.cumsum([0, *lengths]), sources

    def _block_sizes(self, n_documents: int) -> Iterator[int]:
        for begin in range(0, n_documents, BLOCK * _BLOCKS_AT_ONCE):
            _, lengths = self._look_up(begin, min(begin + BLOCK * _BLOCKS_AT_ONCE, n_documents))
            yield from np.add.reduceat(lengths, range(0, len(lengths), BLOCK)).tolist()

    def _look_up(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return places in the ids, and lengths, of documents number begin … end - 1 in the new order."""
        documents = self._order(np.arange(begin, end))
        sources = self._starts[documents]
        following = np.minimum(documents + 1, len(self._starts) - 1)
        ends = np.where(documents + 1 < len(self._starts), self._starts[following], len(self._ids))
        return sources, ends - sources


def _fast(ids: np.ndarray) -> np.ndarray:
    """Return a plain array for a memory map, because it is sliced ten times faster."""
    return np.asarray(ids)


class Permutation:
    """A permutation of 0 … n - 1, drawn from a key of numbers of at least 0.

    It does not use a library's generator, because a run that is resumed years later must read on in the same order.

    A Feistel network permutes the numbers of an even number of bits: in every round, a hash of one half is added to the
    other, which can be undone for any hash. It is applied until the result is below n: up to four times on average.

    Example:
        >>> sorted(Permutation(5, 42)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self._half = np.uint64(max(1, (max(n - 1, 0).bit_length() + 1) // 2))
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at `places`, int64; both are in 0 … n - 1."""
        values = self._once(places.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self.n)):
            values[outside] = self._once(values[outside])
        return values.astype(np.int64)

    def _once(self, values: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> self._half, values & mask
        for key in self._keys:
            left, right = right, left ^ (_hash(right ^ key) & mask)
        return (left << self._half) | right


def _hash(values: np.ndarray) -> np.ndarray:
    for multiplier in _MULTIPLIERS:
        values = (values ^ (values >> _SHIFT)) * multiplier
    return values ^ (values >> _SHIFT)
