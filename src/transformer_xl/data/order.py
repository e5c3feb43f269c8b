"""In which order a text is read: as it lies, or its documents in an order of their own for each epoch.

A shuffled text is the documents one after another in their new order. It is never written: where a document comes is computed
in blocks of documents, of which only the tokens before each block are kept in memory.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from transformer_xl.data.permutation import GroupedPermutation, Permutation
from transformer_xl.data.sharded_ids import ShardedIds

TokenIds = np.ndarray | ShardedIds
Shuffle = Literal["none", "documents", "shards"]

BLOCK = 1024
"""Documents whose places are computed together, and kept while a lane reads them."""

_BLOCKS_AT_ONCE = 256


class Text(Protocol):
    """Tokens in the order in which they are read."""

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids at places begin … end - 1, and at which of these documents start, counted from `begin`."""
        ...


class PlainText:
    """A text as it lies.

    Args:
        ids: shape (n_tokens,).
        document_starts: token offsets, increasing.
    """

    def __init__(self, ids: TokenIds, document_starts: np.ndarray) -> None:
        self._ids, self._starts = _fast(ids), document_starts

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids at places begin … end - 1, and at which of these documents start, counted from `begin`."""
        first, last = np.searchsorted(self._starts, (begin, end))
        return self._ids[begin:end], self._starts[first:last] - begin


class ShuffledText:
    """The documents of a text in a random order, the same whenever it is drawn from the same key.

    Args:
        ids: shape (n_tokens,).
        document_starts: token offsets, increasing; what precedes the first one is a document too, and those beyond `ids` are
            none.
        shuffle: documents: all of them; shards: shards, and the documents inside each, so that a lane reads in one file at a
            time.
        key: of the order: seed and epoch.
        n_lanes: places that are read side by side.
    """

    def __init__(
        self,
        ids: TokenIds,
        document_starts: np.ndarray,
        *,
        shuffle: Literal["documents", "shards"],
        key: tuple[int, ...],
        n_lanes: int = 1,
    ) -> None:
        self._ids = _fast(ids)
        starts = document_starts[: np.searchsorted(document_starts, len(ids))]
        self._starts = starts if starts[:1].tolist() == [0] else np.concatenate([[0], starts])  # a view, if it can be
        n_documents = len(self._starts)
        if shuffle == "shards" and isinstance(ids, ShardedIds):
            self._order = GroupedPermutation(np.searchsorted(self._starts, ids.borders), *key)
        else:
            self._order = Permutation(n_documents, *key)
        self._borders = np.concatenate([[0], np.cumsum(list(self._block_sizes(n_documents)))])  # tokens before each block
        self._block = lru_cache(2 * n_lanes + 1)(self._make_block)

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids at places begin … end - 1, and at which of these documents start, counted from `begin`."""
        parts, starts = [], []
        for place, source, length in self._documents(begin, end):
            parts.append(self._ids[source + max(begin - place, 0) : source + min(length, end - place)])
            if place >= begin:
                starts.append(place - begin)
        return np.concatenate(parts), np.array(starts, np.int64)

    def _documents(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the documents that have a token at places begin … end - 1: their place here, their place in the ids, length."""
        while begin < end:
            index = int(np.searchsorted(self._borders, begin, "right")) - 1
            places, sources = self._block(index)
            first, last = np.searchsorted(places, begin, "right") - 1, np.searchsorted(places, end)
            last = min(int(last), len(sources))
            lengths = np.diff(places[first : last + 1])
            yield from zip(places[first:last].tolist(), sources[first:last].tolist(), lengths.tolist(), strict=True)
            begin = int(self._borders[index + 1])

    def _make_block(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the documents of a block begin, here (and where the last one ends) and in the ids."""
        sources, lengths = self._found(index * BLOCK, min((index + 1) * BLOCK, len(self._starts)))
        return self._borders[index] + np.cumsum([0, *lengths]), sources

    def _block_sizes(self, n_documents: int) -> Iterator[int]:
        for begin in range(0, n_documents, BLOCK * _BLOCKS_AT_ONCE):
            _, lengths = self._found(begin, min(begin + BLOCK * _BLOCKS_AT_ONCE, n_documents))
            yield from np.add.reduceat(lengths, range(0, len(lengths), BLOCK)).tolist()

    def _found(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return places in the ids, and lengths, of the documents that come as numbers begin … end - 1."""
        documents = self._order(np.arange(begin, end))
        sources = self._starts[documents]
        following = np.minimum(documents + 1, len(self._starts) - 1)
        ends = np.where(documents + 1 < len(self._starts), self._starts[following], len(self._ids))
        return sources, ends - sources


def _fast(ids: TokenIds) -> TokenIds:
    """Return plain arrays for memory maps: their slices are made ten times faster."""
    return ids if isinstance(ids, ShardedIds) else np.asarray(ids)
