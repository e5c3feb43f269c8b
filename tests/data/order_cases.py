"""Texts of many documents."""

import numpy as np


def documents(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids that encode their document and their place in it, and the offsets at which documents start."""
    starts = np.cumsum([0, *lengths[:-1]])
    return np.concatenate([100 * i + np.arange(n) for i, n in enumerate(lengths)]), starts
