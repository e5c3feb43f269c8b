"""Draw a token: from scores that are all known, or from scores that are mostly not computed, exactly as if all of them were.

Between the steps of a model, each function of numpy takes ten times what it takes alone, because its code has left the
processor's caches. So there are few of them.

Shapes: V vocabulary.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np

from transformer_xl.errors import ConfigError
from transformer_xl.generation.scores import ROUNDING, RowScores

_BLOCK = 512
"""Tokens whose lengths are summed one after another."""

infinite_beyond_fp32 = np.errstate(over="ignore", invalid="ignore")
"""A penalty, a bias or a bound may be beyond fp32; what counts is that no token can be drawn then, not that numpy warns."""


def require_drawable(drawable: bool) -> None:
    """Raise a `ConfigError` unless some token can be drawn."""
    if not drawable:
        raise ConfigError(
            "no token can be drawn: the best score is not a finite number; read a token first, leave one unbanned, "
            "or look for NaN"
        )


def draw_known(
    scores: np.ndarray,
    generator: np.random.Generator,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> int:
    """Return the id of a token, of scores fp32 (V,); for the settings see `RejectionSampler`, for top_p also its rejections."""
    best = float(scores[scores.argmax()])
    require_drawable(math.isfinite(best))
    nats = scores.astype(np.float64)
    nats -= best
    nats *= 1 / temperature
    lengths = np.exp(nats)
    if top_k is not None and top_k < len(scores):
        least = np.partition(scores, -top_k)[-top_k]
        kept = scores >= least
        if n_excess := np.count_nonzero(kept) - top_k:
            kept[np.flatnonzero(scores == least)[-n_excess:]] = False
        lengths *= kept
    drawable = lengths if not min_p else lengths * (nats >= math.log(min_p))
    while True:
        place = _place(drawable, generator.random())
        if place is None:  # rounded up to the end of the line
            continue
        if top_p is None:
            return place
        ranked = scores > scores[place]
        ranked[:place] |= scores[:place] == scores[place]
        if np.add.reduce(lengths * ranked) < top_p * np.add.reduce(lengths):
            return place
        drawable = drawable * ranked


class RejectionSampler:
    """Draws one token of a row of scores by rejection, and opens (looks at) only the tails that can matter.

    A proposal is a uniform random point on a line. Each token of an open cluster has a length there, its probability up to a
    common factor. A closed tail has an upper bound of the total length of its tokens. If the point falls in a closed tail, the
    tail is opened: its tokens take the beginning of its part, and a point beyond them is rejected. From then on that part is as
    long as its tokens. A token that the filters remove is rejected, too. From then on the line is without all tokens of lower
    rank, because the filters remove these as well. So among accepted points the share of each token is in proportion to its
    length, whatever the bounds were.

    Which tails are opened depends only on bounds and random numbers, not on what happens to be computed already, and so does
    the token.

    Args:
        row: scores.
        temperature: above 0.
        top_k: as in `Sampling`.
        top_p: as in `Sampling`, but below 1.
        min_p: as in `Sampling`.
    """

    def __init__(
        self, row: RowScores, *, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
    ) -> None:
        self._row = row
        self._temperature = temperature
        self._top_k, self._top_p, self._min_p = top_k, top_p, min_p or None
        # n probabilities of sum P have powers 1/temperature between P^(1/temperature) and that times n^(1 - 1/temperature)
        self._spread = 1 - 1 / temperature
        self._opened = set(row.opened)
        self._weights: dict[int, np.ndarray] = {}
        self._best, self._reference = self._highest()
        # the last token in rank, by score and id, that may be drawn: at first, by what is known without any tail
        self._last_score, self._last_id = self._least(self._best), row.borders[-1]
        self._kth = -math.inf
        if top_k is not None and top_k <= row.size(0):
            self._kth = float(np.partition(row.cluster(0), -top_k)[-top_k])
        self._last_score = max(self._last_score, self._kth)

    @infinite_beyond_fp32
    def draw(self, generator: np.random.Generator) -> int:
        """Return the id of a token."""
        while True:
            proposed = self._propose(generator.random())
            if proposed is not None:
                i, place = proposed
                score, token = float(self._row.cluster(i)[place]), self._row.borders[i] + place
                if self._is_kept(score, token):
                    return token
                self._last_score, self._last_id = score, token - 1

    def _propose(self, uniform: float) -> tuple[int, int] | None:
        """Return cluster and place of the token at a point in [0, 1) of the line; None: no token."""
        drawable = {i: self._drawable(i) for i in self._opened}
        lengths = [float(drawable[i].sum()) if i in drawable else self._longest(i) for i in range(self._row.n_cluster)]
        borders = list(itertools.accumulate(lengths, initial=0.0))
        point = uniform * borders[-1]
        i = next((i for i, end in enumerate(borders[1:]) if point < end), None)
        if i is None:  # rounded up to the end of the line
            return None
        if i not in drawable:
            drawable[i] = self._drawable(i)  # measured as the line is, which opening may change
            self._open(i)
        place = _place(drawable[i], point - borders[i], whole=1.0)
        return None if place is None else (i, place)

    def _is_kept(self, score: float, token: int) -> bool:
        """Return whether all filters keep a token; open tails until that is certain."""
        return (
            (self._min_p is None or self._is_near(score))
            and (self._top_k is None or self._is_negative(lambda i: self._rank_excess(i, score, token)))
            and (self._top_p is None or self._is_negative(lambda i: self._mass_excess(i, score, token)))
        )

    def _is_near(self, score: float) -> bool:
        while not score < self._least(self._best):
            if score >= self._least(self._reference):
                return True
            closed = [i for i in range(self._row.n_cluster) if i not in self._opened]
            self._open(max(closed, key=self._row.bound))
        return False

    def _is_negative(self, excess: Callable[[int], tuple[float, float]]) -> bool:
        """Return whether a sum over clusters is negative, given the least and the greatest value of each term."""
        while True:
            ranges = [excess(i) for i in range(self._row.n_cluster)]
            least, greatest = (sum(ends) for ends in zip(*ranges, strict=True))
            if greatest < 0:
                return True
            if least >= 0:
                return False
            self._open(max(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][0]))

    def _rank_excess(self, i: int, score: float, token: int) -> tuple[float, float]:
        """Return the fewest and the most tokens of a cluster that rank before one; top_k is subtracted in the head."""
        assert self._top_k is not None
        if i in self._opened:
            n = float(np.count_nonzero(self._ranked_until(i, score, token - 1))) - (self._top_k if i == 0 else 0)
            return n, n
        # the tail's total probability limits how many of its tokens can be as likely as that one
        n_log, size = self._row.bound(i) - score, self._row.size(i)
        return 0.0, float(size if n_log >= math.log(size) else math.floor(math.exp(n_log)))

    def _mass_excess(self, i: int, score: float, token: int) -> tuple[float, float]:
        """Return the least and the greatest length of a cluster before a token, minus top_p times the cluster's whole length.

        The head stands for all open clusters when the whole length is subtracted.
        """
        assert self._top_p is not None
        if i in self._opened:
            before = float((self._weights_of(i) * self._ranked_until(i, score, token - 1)).sum())
            before -= self._top_p * self._total() if i == 0 else 0.0
            return before, before
        row, bound = self._row, self._row.bound(i)
        if bound < self._kth:
            return 0.0, 0.0
        most = self._length(bound) * row.size(i) ** max(0.0, self._spread)
        least = self._length(row.totals[i] - ROUNDING) * row.size(i) ** min(0.0, self._spread)
        if self._top_k is not None or i in row.lowered:
            least = 0.0
        # without top_k: before ≤ most, whole ≥ before, so before - top_p · whole ≤ (1 - top_p) · most. With top_k, what comes
        # before displaces as much of the whole, which then need not grow with it: only before ≤ most is certain
        greatest = most if self._top_k is not None else (1 - self._top_p) * most
        return -self._top_p * most, greatest if bound >= score else -self._top_p * least

    def _total(self) -> float:
        """Return the length of all open clusters, with top_k only that of the k best tokens in them."""
        weights = [self._weights_of(i) for i in sorted(self._opened)]
        if self._top_k is None:
            return sum(float(w.sum()) for w in weights)
        return float(np.sort(np.concatenate(weights))[-self._top_k :].sum())

    def _longest(self, i: int) -> float:
        """Return an upper bound of the length of a tail's tokens."""
        bound = self._row.bound(i)
        return 0.0 if bound < self._last_score else self._length(bound) * self._row.size(i) ** max(0.0, self._spread)

    def _drawable(self, i: int) -> np.ndarray:
        weights = self._weights_of(i)
        if self._last_score == -math.inf:
            return weights
        return weights * self._ranked_until(i, self._last_score, self._last_id)

    def _ranked_until(self, i: int, score: float, token: int) -> np.ndarray:
        """Return which tokens (size,) of a cluster have a higher score, or the same and no higher id."""
        scores = self._row.cluster(i)
        ranked = scores > score
        n = max(0, token + 1 - self._row.borders[i])
        ranked[:n] |= scores[:n] == score
        return ranked

    def _weights_of(self, i: int) -> np.ndarray:
        if i not in self._weights:
            nats = self._row.cluster(i).astype(np.float64)
            nats -= self._reference
            nats *= 1 / self._temperature
            self._weights[i] = np.exp(nats, out=nats)
        return self._weights[i]

    def _length(self, score: float) -> float:
        return math.exp((score - self._reference) / self._temperature)

    def _least(self, best: float) -> float:
        return -math.inf if self._min_p is None else best + self._temperature * math.log(self._min_p)

    def _open(self, i: int) -> None:
        """Look at a tail, and measure lengths by the highest score still possible, lest all vanish at low temperatures."""
        self._opened.add(i)
        self._best, highest = self._highest()
        if highest != self._reference:
            self._reference = highest
            self._weights.clear()

    def _highest(self) -> tuple[float, float]:
        """Return the best score in open clusters, and the highest that is possible."""
        row = self._row
        seen = [float(row.cluster(i).max()) for i in self._opened]
        possible = [row.bound(i) for i in range(row.n_cluster) if i not in self._opened]
        highest = max([*seen, *possible])
        require_drawable(math.isfinite(highest) and not any(math.isnan(score) for score in [*seen, *possible]))
        return max(seen), highest


def _place(lengths: np.ndarray, share: float, *, whole: float | None = None) -> int | None:
    """Return which of some lengths, one after another, holds the point at a share of a line; None if it lies beyond them.

    The whole line is as long as all of them together (None), or has its own length.
    """
    first = 0
    # a sum in blocks is ten times as fast as one that goes from token to token
    ends = np.add.accumulate(lengths if len(lengths) <= _BLOCK else np.add.reduceat(lengths, range(0, len(lengths), _BLOCK)))
    point = share * float(ends[-1] if whole is None else whole)
    place = int(ends.searchsorted(point, side="right"))
    if len(lengths) > _BLOCK:
        first = place * _BLOCK
        lengths = lengths[first : first + _BLOCK]
        place = int(np.add.accumulate(lengths).searchsorted(point - (ends[place - 1] if place else 0.0), side="right"))
    return first + place if place < len(lengths) else None
