"""Scores of the next token, of a softmax that computes those of rare tokens only on demand.

An adaptive softmax has a head of frequent tokens and tails of rarer ones (`model/adaptive.py`). The head gives the total
log-probability of each tail, and no token is likelier than the tail that it belongs to. So it is often possible to find the
likeliest tokens, or to draw one, without multiplying by the vectors of any tail, which are most of the vocabulary.

Shapes: B rows, V vocabulary.
"""

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer_xl.errors import ConfigError
from transformer_xl.generation.inputs import Ids, one_id_per_row
from transformer_xl.model.softmax import check_ids

ROUNDING = 1e-3
"""Nats by which the tokens of a tail, together or alone, may exceed the tail's total, because that is rounded to fp32."""

_DRAWING = ("cuda",)
"""Devices that draw tokens themselves."""

_WORTH_DRAWING = 4096
"""From so many tokens on. A dozen small kernels draw; to copy fewer scores, and to draw on the CPU, takes less time."""


@dataclass(frozen=True, eq=False)
class RowScores:
    """The scores of one row, in clusters: 0 is the head, the others are tails.

    Attributes:
        borders: first id of each cluster, then V.
        totals: log-probability of each cluster as a whole; that of the head is not used.
        cluster: the scores, fp32 (size,), of a cluster, not to be written to; the first call for a tail computes them. They
            are arrays of numpy, because small operations of torch take longer than the step of a small model.
        opened: clusters that are looked at in any case, such as the head.
        lowered: tails with tokens made less likely than the model says, so that the total is only an upper bound.
    """

    borders: tuple[int, ...]
    totals: tuple[float, ...]
    cluster: Callable[[int], np.ndarray]
    opened: frozenset[int] = frozenset({0})
    lowered: frozenset[int] = frozenset()

    @property
    def n_cluster(self) -> int:
        """Number of clusters, the head included."""
        return len(self.totals)

    def size(self, i: int) -> int:
        """Return the number of tokens of a cluster."""
        return self.borders[i + 1] - self.borders[i]

    def bound(self, i: int) -> float:
        """Return an upper bound of the scores of a cluster; this computes no tail that is not in `opened`."""
        return float(self.cluster(i).max()) if i in self.opened else self.totals[i] + ROUNDING


class Scores:
    """The distribution of the next token of B rows. Tails are computed on demand, once.

    Args:
        head: (B, size), with an adaptive softmax the log-probabilities of the head's own tokens, with a plain one the
            unnormalized scores of all tokens. On any device; copied to the CPU when they are looked at. Not to be changed.
        tails: (B, n_tail), log-probability of each tail as a whole, normalized together with the head. None: no tails.
        compute_tail: given the index of a tail and int64 rows (R,) on the CPU, returns the log-probabilities (R, size) of its
            tokens, normalized over the vocabulary. Its inputs must not change while the scores are in use.
        borders: 0, the first id of each tail, V. None: all tokens are in the head.

    Example:
        >>> scores = Scores(torch.tensor([[2.0, 0.0]]))
        >>> scores.top(1)[1].tolist(), round(float(scores.log_probability(torch.tensor([0])).exp()), 3)
        ([[0]], 0.881)
    """

    def __init__(
        self,
        head: Tensor,
        *,
        tails: Tensor | None = None,
        compute_tail: Callable[[int, Tensor], Tensor] | None = None,
        borders: Sequence[int] | None = None,
    ) -> None:
        self.borders = (0, head.shape[1]) if borders is None else tuple(borders)
        self._given = head
        self._tails = np.zeros((len(head), 0), np.float32) if tails is None or not tails.shape[1] else _array(tails)
        self._compute_tail = compute_tail
        self._computed: dict[tuple[int, int], np.ndarray] = {}
        n_tail, size = self._tails.shape[1], self.borders[1]
        assert len(self.borders) == n_tail + 2 and size == head.shape[1], f"borders {self.borders}, head {head.shape}"
        assert n_tail == 0 or compute_tail is not None, "tails need compute_tail"

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self._given)

    @functools.cached_property
    def _head(self) -> np.ndarray:
        return _array(self._given)

    @property
    def on_device(self) -> Tensor | None:
        """The scores of all tokens (B, V) on a GPU, if there are so many that it draws faster than it copies them; else None.

        Other rows, and what is reported of a token, have no part in that: they must not change how a text is drawn.
        """
        is_worth = self._given.device.type in _DRAWING and self._given.shape[1] >= _WORTH_DRAWING
        return self._given if is_worth and not self._tails.shape[1] else None

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.borders[-1]

    @property
    def computed(self) -> frozenset[tuple[int, int]]:
        """Tail (from 0 on) and row of all tails that were computed so far."""
        return frozenset(self._computed)

    def compute(self, tail: int, rows: Iterable[int]) -> None:
        """Compute a tail for several rows together, and keep it; rows that have it already are left out."""
        missing = [row for row in rows if (tail, row) not in self._computed]
        if missing:
            assert self._compute_tail is not None
            with torch.no_grad():
                values = _array(self._compute_tail(tail, torch.tensor(missing)))
            self._computed.update(((tail, row), of_row) for row, of_row in zip(missing, values, strict=True))

    def full(self) -> Tensor:
        """Return the scores of all tokens (B, V), fp32, as the model's `logits`; computes every tail."""
        n_tail = self._tails.shape[1]
        for tail in range(n_tail):
            self.compute(tail, range(self.batch_size))
        tails = (np.stack([self._computed[tail, row] for row in range(self.batch_size)]) for tail in range(n_tail))
        return torch.from_numpy(np.concatenate([self._head, *tails], axis=1))

    def log_probability(self, ids: Ids, *, rows: Sequence[int] | None = None) -> Tensor:
        """Return the model's log-probability (R,) of one token in each row, before any sampling setting.

        Args:
            ids: integers (R,), a token of each row; this computes the tails that they belong to.
            rows: R rows, at least one; None: all.

        Raises:
            TokenizerError: an id outside the vocabulary.
            ValueError: not one id for each row, or rows that do not exist.
        """
        rows = self._checked(rows)
        tokens_R = one_id_per_row(ids, len(rows))
        check_ids(tokens_R, vocab_size=self.vocab_size)
        asked = [
            (row, token, bisect_right(self.borders, token) - 1) for row, token in zip(rows, tokens_R.tolist(), strict=True)
        ]
        for tail in range(self._tails.shape[1]):
            self.compute(tail, [row for row, _, cluster in asked if cluster == tail + 1])
        chosen = [float(self._cluster(row, cluster)[token - self.borders[cluster]]) for row, token, cluster in asked]
        return torch.tensor(chosen) - self._normalizers(rows)

    def top(self, n: int, *, rows: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the model's log-probabilities (R, n) and the ids (R, n) of each row's likeliest tokens, the likeliest first.

        Of equally likely tokens, the lowest id comes first.

        Args:
            n: how many, at most V; this computes the tails that may hold one of them.
            rows: R rows, at least one; None: all.

        Raises:
            ConfigError: fewer than 1 or more than V.
            ValueError: rows that do not exist.
        """
        if not 1 <= n <= self.vocab_size:
            raise ConfigError(f"the {n} likeliest tokens of {self.vocab_size} were asked for; ask for 1 … {self.vocab_size}")
        rows = self._checked(rows)
        found = _best_of_rows(torch.from_numpy(self._head[list(rows)]), n) if self._tails.shape[1] == 0 else None
        if found is None:
            leading = [likeliest(self.row(row), n) for row in rows]
            found = tuple(torch.from_numpy(np.stack(parts)) for parts in zip(*leading, strict=True))
        values, ids = found
        return values - self._normalizers(rows).unsqueeze(1), ids

    def known(self, row: int) -> np.ndarray | None:
        """Return the scores of a row, fp32 (V,), not to be written to, if they are all computed because there are no tails."""
        return None if self._tails.shape[1] else self._head[row]

    def row(self, row: int) -> RowScores:
        """Return the scores of one row, in clusters."""
        return RowScores(
            borders=self.borders,
            totals=(float("nan"), *self._tails[row].tolist()),
            cluster=lambda i: self._cluster(row, i),
        )

    def _cluster(self, row: int, i: int) -> np.ndarray:
        if i == 0:
            return self._head[row]
        self.compute(i - 1, [row])
        return self._computed[i - 1, row]

    def _checked(self, rows: Sequence[int] | None) -> Sequence[int]:
        if rows is None:
            return range(self.batch_size)
        if not len(rows) or not all(0 <= row < self.batch_size for row in rows):
            raise ValueError(f"rows ({list(rows)}) must be some of 0 … {self.batch_size - 1}")
        return rows

    def _normalizers(self, rows: Sequence[int]) -> Tensor:
        """Return how much (R,) scores exceed log-probabilities; 0 with an adaptive softmax, which normalizes them."""
        return torch.from_numpy(self._head[list(rows)]).logsumexp(1) if self._tails.shape[1] == 0 else torch.zeros(len(rows))


def _array(x: Tensor) -> np.ndarray:
    return x.float().numpy(force=True)


def likeliest(row: RowScores, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores (n,) and ids (n,) of the best tokens of a row, the best first, of equal ones the lowest id first.

    This computes only tails that may hold one of them. A row with fewer tokens than `n` returns all.
    """
    values, ids = _best(row.cluster(0), n)
    for bound, i in sorted(((row.bound(i), i) for i in range(1, row.n_cluster)), reverse=True):
        if len(ids) >= n and bound < values[-1]:
            break
        more, places = _best(row.cluster(i), n)
        values, ids = _ranked(np.concatenate([values, more]), np.concatenate([ids, places + row.borders[i]]), n)
    return values, ids


def _best_of_rows(scores_RV: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
    """Return what `likeliest` finds in each row, for all rows at once; None if some scores are not numbers."""
    best_Rn = scores_RV.topk(n).values  # which of equal ones topk takes is not defined, but NaN comes first
    if best_Rn[:, 0].isnan().any():
        return None
    least_R1 = best_Rn[:, -1:]
    kept_RV = scores_RV >= least_R1
    if int(kept_RV.sum()) != n * len(scores_RV):
        equal_RV = scores_RV == least_R1
        n_equal_R1 = n - (kept_RV & ~equal_RV).sum(1, keepdim=True)
        kept_RV &= ~equal_RV | (equal_RV.cumsum(1) <= n_equal_R1)
    ids_Rn = kept_RV.nonzero()[:, 1].view(-1, n)
    values_Rn, order_Rn = scores_RV.gather(1, ids_Rn).sort(dim=1, descending=True, stable=True)
    return values_Rn, ids_Rn.gather(1, order_Rn)


def by_cluster(borders: Sequence[int], ids: Iterable[int]) -> dict[int, list[int]]:
    """Return the ids of each cluster, sorted, without ids outside the vocabulary."""
    ordered = sorted(ids)
    ends = [bisect_left(ordered, border) for border in borders]
    return {i: ordered[first:end] for i, (first, end) in enumerate(itertools.pairwise(ends)) if first < end}


def _best(scores: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    if n == 1:
        place = int(scores.argmax())  # the first of equal ones
        return scores[place : place + 1], np.array([place])
    n = min(n, len(scores))
    least = np.partition(scores, len(scores) - n)[len(scores) - n]
    places = np.flatnonzero(~(scores < least))  # all of equal ones, and whatever is not a number
    return _ranked(scores[places], places, n)


def _ranked(values: np.ndarray, ids: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the n largest values and their ids, of equal values the lowest id first."""
    order = np.lexsort((-ids, values))[: -n - 1 : -1]
    return values[order], ids[order]
