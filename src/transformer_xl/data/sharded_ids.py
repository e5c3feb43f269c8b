"""Ids that lie in several files, read as one array."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np

from transformer_xl.errors import CorpusError

OPEN_SHARDS = 128
"""At most so many files are mapped at a time: a process may not hold as many as a large corpus has (on macOS 256, of all)."""


class ShardedIds:
    """What an array of ids can do, over memory-mapped files; nothing is read before it is asked for.

    A slice inside one shard is a view; only a slice across a border is copied. `np.asarray` copies all of it.

    Args:
        paths: files of raw ids, in order.
        lengths: number of ids in each; those with none are not opened.
        dtype: of the ids.

    Attributes:
        borders: shape (n_shards + 1,), int64; where the shards begin, and where the last one ends.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name, ids in (("a", [0, 1, 2]), ("b", [3, 4])):
        ...     np.array(ids, "<u2").tofile(folder / name)
        >>> ShardedIds([folder / "a", folder / "b"], [3, 2], np.dtype("<u2"))[1:4].tolist()
        [1, 2, 3]
    """

    def __init__(self, paths: Sequence[Path], lengths: Sequence[int], dtype: np.dtype) -> None:
        self._paths = [path for path, length in zip(paths, lengths, strict=True) if length]
        self.borders = np.cumsum([0, *(length for length in lengths if length)], dtype=np.int64)
        self._borders: list[int] = self.borders.tolist()  # looked up in every slice, which a list does faster
        self.dtype = dtype
        self._shard = lru_cache(OPEN_SHARDS)(self._map)

    def __len__(self) -> int:
        return int(self.borders[-1])

    @property
    def shape(self) -> tuple[int]:
        """(n_tokens,)."""
        return (len(self),)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> Any:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            return self._slice(begin, end) if step == 1 else self._gather(np.arange(begin, end, step))
        places = np.asarray(index)
        found = self._gather(places.reshape(-1)).reshape(places.shape)
        return found if places.ndim else found[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all ids as numpy asks for them: `copy` True is a copy, False is refused unless there is one shard."""
        if copy is False and len(self.borders) > 2:
            raise ValueError(f"{len(self.borders) - 1} shards make one array only by copying")
        return np.array(self[:], dtype, copy=copy)

    def _slice(self, begin: int, end: int) -> np.ndarray:
        if begin >= end:
            return np.empty(0, self.dtype)
        first = bisect_right(self._borders, begin) - 1
        if end <= self._borders[first + 1]:
            return self._shard(first)[begin - self._borders[first] : end - self._borders[first]]
        last = bisect_right(self._borders, end - 1) - 1
        spans = [(shard, self._borders[shard]) for shard in range(first, last + 1)]
        return np.concatenate([self._shard(shard)[max(begin - start, 0) : end - start] for shard, start in spans])

    def _gather(self, places: np.ndarray) -> np.ndarray:
        if places.size and not (-len(self) <= places.min() and places.max() < len(self)):
            raise IndexError(f"index outside {len(self):,} ids")
        places = np.where(places < 0, places + len(self), places)
        shards = np.searchsorted(self.borders, places, "right") - 1
        found = np.empty(places.shape, self.dtype)
        for shard in np.unique(shards).tolist():
            inside = shards == shard
            found[inside] = self._shard(shard)[places[inside] - self.borders[shard]]
        return found

    def _map(self, shard: int) -> np.ndarray:
        path = self._paths[shard]
        try:
            return np.asarray(np.memmap(path, self.dtype, "r", shape=(self._borders[shard + 1] - self._borders[shard],)))
        except (OSError, ValueError) as error:
            raise CorpusError(
                f"shard '{path}' cannot be read ({' '.join(str(error).split())}); restore it, or encode it again with "
                "txl corpus prepare"
            ) from None
