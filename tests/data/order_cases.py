"""Texts of many documents, in one file or in several."""

import itertools
from pathlib import Path

import numpy as np

from transformer_xl.data.shards import ShardedIds


def documents(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids that encode their document and their place in it, and the offsets at which documents start."""
    starts = np.cumsum([0, *lengths[:-1]])
    return np.concatenate([100 * i + np.arange(n) for i, n in enumerate(lengths)]), starts


def in_shards(folder: Path, ids: np.ndarray, cuts: list[int]) -> ShardedIds:
    """Return the same ids in several files that end at `cuts`."""
    borders = [0, *sorted(cuts), len(ids)]
    paths = [folder / f"{i}.bin" for i in range(len(borders) - 1)]
    for path, (begin, end) in zip(paths, itertools.pairwise(borders), strict=True):
        ids[begin:end].astype("<u2").tofile(path)
    return ShardedIds(paths, np.diff(borders).tolist(), np.dtype("<u2"))
