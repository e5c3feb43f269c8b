"""Draw a token from scores of which most are not computed, exactly as if all of them were.

Shapes: V vocabulary.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from transformer_xl.errors import ConfigError
from transformer_xl.generation.scores import ROUNDING, Row


def require_drawable(drawable: bool) -> None:
    """Raise a `ConfigError` unless some token can be drawn."""
    if not drawable:
        raise ConfigError(
            "no token can be drawn: the best score is not a finite number; read a token first, leave one unbanned, "
            "or look for NaN"
        )


class Line:
    """A row of scores as lengths on a line, at which darts are thrown until one hits a token that may be drawn.

    Each token has a length in proportion to its probability. A tail that was not looked at has the room that its tokens take at
    most. A dart that falls there has the tail looked at: its tokens take the beginning of the room, and if the dart is beyond
    them it missed, the room shrinks to what the tokens take, and another is thrown. Of the darts that hit, the share of each
    token is in proportion to its length, whatever the room was. In the same way a token that the filters do not keep is a miss;
    they keep none that is ranked below it either, so these are taken off the line as well.

    What is looked at depends on bounds and darts alone, not on what happens to be computed, and so does the outcome.

    Args:
        row: scores.
        temperature: above 0.
        top_k: as in `Sampling`.
        top_p: as in `Sampling`, but below 1.
        min_p: as in `Sampling`.

    Raises:
        ConfigError: no token can be drawn.
    """

    def __init__(self, row: Row, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
        self._row = row
        self._temperature = temperature
        self._top_k, self._top_p, self._min_p = top_k, top_p, min_p or None
        # n probabilities of sum P have powers 1/temperature between P^(1/temperature) and that times n^(1 - 1/temperature)
        self._spread = 1 - 1 / temperature
        self._open = set(row.known)
        self._weights: dict[int, Tensor] = {}
        self._best, self._reference = self._highest()
        # the last token in rank, by score and id, that may be drawn: at first, by what is known without any tail
        self._last_score, self._last_id = self._least(self._best), row.borders[-1]
        self._kth = -math.inf
        if top_k is not None and top_k <= row.size(0):
            self._kth = float(row.cluster(0).topk(top_k).values[-1])
        self._last_score = max(self._last_score, self._kth)

    def draw(self, generator: torch.Generator) -> int:
        """Return the id of a token."""
        while True:
            hit = self._throw(float(torch.rand((), dtype=torch.float64, generator=generator)))
            if hit is not None:
                score, token = float(self._row.cluster(hit[0])[hit[1]]), self._row.borders[hit[0]] + hit[1]
                if self._is_kept(score, token):
                    return token
                self._last_score, self._last_id = score, token - 1

    def _throw(self, dart: float) -> tuple[int, int] | None:
        """Return cluster and place of the token that a dart in [0, 1) hits."""
        ends = {i: self._drawable(i).cumsum(0) for i in self._open}
        lengths = [float(ends[i][-1]) if i in ends else self._room(i) for i in range(self._row.n_cluster)]
        borders = list(itertools.accumulate(lengths, initial=0.0))
        at = dart * borders[-1]
        i = next((i for i, end in enumerate(borders[1:]) if at < end), None)
        if i is None:  # rounded up to the end of the line
            return None
        if i not in ends:
            self._open.add(i)
            ends[i] = self._drawable(i).cumsum(0)
            self._refer()
        place = int(torch.searchsorted(ends[i], at - borders[i], right=True))
        return (i, place) if place < len(ends[i]) else None

    def _is_kept(self, score: float, token: int) -> bool:
        """Say whether all filters keep a token; look at tails until it is sure."""
        return (
            (self._min_p is None or self._is_near(score))
            and (self._top_k is None or self._is_negative(lambda i: self._rank_excess(i, score, token)))
            and (self._top_p is None or self._is_negative(lambda i: self._mass_excess(i, score, token)))
        )

    def _is_near(self, score: float) -> bool:
        """Say whether min-p keeps a score."""
        while not score < self._least(self._best):
            if score >= self._least(self._reference):
                return True
            unsure = [i for i in range(self._row.n_cluster) if i not in self._open]
            self._look_at(max(unsure, key=self._row.ceiling))
        return False

    def _is_negative(self, excess: Callable[[int], tuple[float, float]]) -> bool:
        """Say whether a sum over clusters is negative; of each, the least and the greatest value is known."""
        while True:
            ranges = [excess(i) for i in range(self._row.n_cluster)]
            least, greatest = (sum(ends) for ends in zip(*ranges, strict=True))
            if greatest < 0:
                return True
            if least >= 0:
                return False
            self._look_at(max(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][0]))

    def _rank_excess(self, i: int, score: float, token: int) -> tuple[float, float]:
        """Return the least and the most tokens of a cluster before one; those of the head less top_k."""
        assert self._top_k is not None
        if i in self._open:
            n = float(self._ranked_until(i, score, token - 1).sum()) - (self._top_k if i == 0 else 0)
            return n, n
        # tokens that are as likely as that one: no more than the tail as a whole has probability for
        n_log, size = self._row.ceiling(i) - score, self._row.size(i)
        return 0.0, float(size if n_log >= math.log(size) else math.floor(math.exp(n_log)))

    def _mass_excess(self, i: int, score: float, token: int) -> tuple[float, float]:
        """Return the least and the greatest length of a cluster before a token, less top_p of what the cluster adds to all."""
        assert self._top_p is not None
        if i in self._open:
            before = float(self._weights_of(i)[self._ranked_until(i, score, token - 1)].sum())
            before -= self._top_p * self._total() if i == 0 else 0.0  # the head stands for all that was looked at
            return before, before
        row, ceiling = self._row, self._row.ceiling(i)
        if ceiling < self._kth:
            return 0.0, 0.0
        most = self._length(ceiling) * row.size(i) ** max(0.0, self._spread)
        least = self._length(row.wholes[i] - ROUNDING) * row.size(i) ** min(0.0, self._spread)
        if self._top_k is not None or i in row.lowered:
            least = 0.0
        # what precedes the token is part of all, but with top_k it may displace as much that was
        greatest = most if self._top_k is not None else (1 - self._top_p) * most
        return -self._top_p * most, greatest if ceiling >= score else -self._top_p * least

    def _total(self) -> float:
        """Return the length of the clusters that were looked at, with top_k of the k best in them."""
        weights = [self._weights_of(i) for i in sorted(self._open)]
        if self._top_k is None:
            return sum(float(w.sum()) for w in weights)
        best = torch.cat([w.topk(min(self._top_k, len(w))).values for w in weights])
        return float(best.topk(min(self._top_k, len(best))).values.sum())

    def _room(self, i: int) -> float:
        """Return the most that the tokens of a tail take."""
        ceiling = self._row.ceiling(i)
        return 0.0 if ceiling < self._last_score else self._length(ceiling) * self._row.size(i) ** max(0.0, self._spread)

    def _drawable(self, i: int) -> Tensor:
        weights = self._weights_of(i)
        if self._last_score == -math.inf:
            return weights
        return weights * self._ranked_until(i, self._last_score, self._last_id)

    def _ranked_until(self, i: int, score: float, token: int) -> Tensor:
        """Return which tokens (size,) of a cluster have a higher score, or the same and no higher id."""
        scores = self._row.cluster(i)
        ranked = scores > score
        n = max(0, token + 1 - self._row.borders[i])
        ranked[:n] |= scores[:n] == score
        return ranked

    def _weights_of(self, i: int) -> Tensor:
        if i not in self._weights:
            self._weights[i] = ((self._row.cluster(i).double() - self._reference) / self._temperature).exp()
        return self._weights[i]

    def _length(self, score: float) -> float:
        return math.exp((score - self._reference) / self._temperature)

    def _least(self, best: float) -> float:
        """Return the least score that min-p keeps."""
        return -math.inf if self._min_p is None else best + self._temperature * math.log(self._min_p)

    def _look_at(self, i: int) -> None:
        self._open.add(i)
        self._refer()

    def _refer(self) -> None:
        """Measure lengths by the highest score that is possible still, so that they do not all vanish at low temperatures."""
        self._best, highest = self._highest()
        if highest != self._reference:
            self._reference = highest
            self._weights.clear()

    def _highest(self) -> tuple[float, float]:
        """Return the best score that was seen, and the highest that is possible."""
        row = self._row
        seen = [float(row.cluster(i).max()) for i in self._open]
        possible = [row.ceiling(i) for i in range(row.n_cluster) if i not in self._open]
        highest = max([*seen, *possible])
        require_drawable(math.isfinite(highest) and not any(math.isnan(score) for score in [*seen, *possible]))
        return max(seen), highest
