"""A random order of any number of things that takes no memory: each place is computed when it is looked at.

The numbers are our own rather than a library's generator, because a run that is resumed years later must read on in the same
order.
"""

import numpy as np

_ROUNDS = 6
_MULTIPLIERS = np.array([0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53], np.uint64)
_SHIFT = np.uint64(33)


class Permutation:
    """A permutation of 0 … n - 1, drawn from a key.

    A Feistel network permutes the numbers of an even number of bits: in every round, a hash of one half is added to the
    other, which can be undone whatever the hash is. It is applied until the result is below n: up to four times on average.

    Args:
        n: how many.
        key: numbers of at least 0; each key has an order of its own.

    Example:
        >>> sorted(Permutation(5, 42)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self._half = np.uint64(max(1, (max(n - 1, 0).bit_length() + 1) // 2))
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return what comes at `places`, int64; both in 0 … n - 1."""
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


class GroupedPermutation:
    """A random order of groups, and of the things inside each.

    Args:
        borders: shape (n_groups + 1,), increasing; group g is borders[g] … borders[g + 1] - 1.
        key: numbers of at least 0; each key has an order of its own.

    Example:
        >>> found = GroupedPermutation(np.array([0, 2, 5]), 42)(np.arange(5)).tolist()
        >>> sorted(found[:2]) == [0, 1] or sorted(found[:3]) == [2, 3, 4]
        True
    """

    def __init__(self, borders: np.ndarray, *key: int) -> None:
        sizes = np.diff(borders)
        self._groups = Permutation(len(sizes), *key)(np.arange(len(sizes)))
        self._first = borders[self._groups]
        self._places = np.cumsum([0, *sizes[self._groups]])
        self._inside = [Permutation(int(sizes[group]), *key, 1 + group) for group in self._groups.tolist()]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return what comes at `places`, int64."""
        groups = np.searchsorted(self._places, places, "right") - 1
        found = np.empty(places.shape, np.int64)
        for group in np.unique(groups).tolist():
            here = groups == group
            found[here] = self._first[group] + self._inside[group](places[here] - self._places[group])
        return found


def _hash(values: np.ndarray) -> np.ndarray:
    for multiplier in _MULTIPLIERS:
        values = (values ^ (values >> _SHIFT)) * multiplier
    return values ^ (values >> _SHIFT)
