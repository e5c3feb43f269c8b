"""What an XLNet predicts in a row of tokens and in what order: random spans, a random order, and ranks in place of masks.

A row of T tokens has two halves: the first reuse_len tokens, which memory keeps, and the rest. Each half has targets and an
order of its own. Who sees whom is a comparison of two numbers:

    query t sees key s  if  rank[s] < sees[t]

Tokens that are no targets rank below all places of their half's order, and see only each other (and the half before). Targets,
and the two functional tokens <sep> and <cls>, rank at their place in the order. A target sees what ranks below its place; a
functional token sees that and itself. All numbers of the second half lie above those of the first. So the second half sees the
whole first half, and the first sees nothing of the second. A memory of rank -1 is seen by all.

    ids          the  sea  is  | calm  <sep>  and   targets: sea, calm, and; reuse_len 3
    place        2    0    1   | 1     2      0     in the order of its half
    rank        -1    0   -1   | 5     6      4     second half: 4 (= reuse_len + 1) more
    sees         0    0    0   | 5     7      4

Source: sections 2.2 and 2.3 of the XLNet paper (arXiv 1906.08237), and data_utils.py of zihangdai/xlnet.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from transformer_xl.batch import NOT_SCORED
from transformer_xl.errors import ConfigError

Spans = Literal["words", "pieces"]

_NUMBERS_AT_ONCE = 1024


class Draws:
    """Random numbers in [0, 1), which depend on nothing but their key.

    They are numbers of Philox itself, which numpy promises to keep. It does not promise that for what its methods make of them.
    """

    def __init__(self, seed: int, purpose: int, *, epoch: int, row: int, step: int) -> None:
        key, counter = np.array([seed % 2**64, purpose], np.uint64), np.array([0, epoch, row, step], np.uint64)
        self._bits = np.random.Philox(key=key, counter=counter)
        self._left = np.empty(0)

    def take(self, n: int) -> np.ndarray:
        """Return the next `n` numbers, float64."""
        if len(self._left) < n:
            more = self._bits.random_raw(max(n, _NUMBERS_AT_ONCE)) >> np.uint64(11)
            self._left = np.concatenate([self._left, more * 2.0**-53])
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def below(self, n: int) -> int:
        """Return an integer in 0 … n - 1."""
        return int(self.take(1).item() * n)


@dataclass(frozen=True)
class Targets:
    """The targets of B rows of T tokens, and who sees whom."""

    targets: np.ndarray  # (B, K) int64, places of the targets, increasing; T - 1 where a row has fewer than K
    labels: np.ndarray  # (B, K) int64, the tokens at these places; -100 where a row has fewer
    rank: np.ndarray  # (B, T) int64, of each token as a key
    sees: np.ndarray  # (B, T) int64, of each token as a query: it sees the keys of lower rank


class TargetSampler:
    """Draws targets and orders for rows of one layout.

    Of K targets, the second half has its share by length, rounded down. Some may fall on functional tokens; these are not
    predicted, so that a row may have a few targets less than K.

    Args:
        tgt_len: tokens of a row, T.
        reuse_len: tokens of its first half.
        perm_size: places of a random order; it divides both halves, whose parts of this length are all ordered alike; None:
            reuse_len.
        num_predict: targets of a row, K.
        word_starts: (V,) bool, the tokens with which a word begins; punctuation and special tokens are words.
        sep: id of <sep>.
        cls: id of <cls>.
        mask_alpha: alpha tokens of text stand around beta that are predicted.
        mask_beta: see mask_alpha.
        max_gram: the most words, or tokens, of a span.
        spans: words: a span has whole words; pieces: a span begins with a word and has 1 … max_gram tokens, as in the
            original, which meant to count words.
    """

    def __init__(
        self,
        *,
        tgt_len: int,
        reuse_len: int,
        num_predict: int,
        word_starts: np.ndarray,
        sep: int,
        cls: int,
        perm_size: int | None = None,
        mask_alpha: int = 6,
        mask_beta: int = 1,
        max_gram: int = 5,
        spans: Spans = "words",
    ) -> None:
        self.functional = np.array([sep, cls])
        if not 1 <= reuse_len < tgt_len:
            raise ConfigError(
                f"model.reuse_len ({reuse_len}) must be at least 1 and below train.tgt_len ({tgt_len}); half of it"
            )
        halves = (reuse_len, tgt_len - reuse_len)
        perm_size = reuse_len if perm_size is None else perm_size
        if perm_size < 1 or any(length % perm_size for length in halves):
            raise ConfigError(
                f"{perm_size} tokens, which are ordered together, must divide model.reuse_len ({reuse_len}) and the rest of "
                f"train.tgt_len ({halves[1]}); use train.tgt_len={2 * reuse_len}"
            )
        second = num_predict * halves[1] // tgt_len
        self.numbers = (num_predict - second, second)
        if num_predict < 1 or self.numbers[0] >= reuse_len or second > halves[1]:
            raise ConfigError(
                f"model.num_predict ({num_predict}) must be at least 1 and leave tokens to see in a row of {tgt_len} with "
                f"reuse_len {reuse_len}; about a sixth of tgt_len is usual"
            )
        self._reuse_len, self._perm_size, self._n_target = reuse_len, perm_size, num_predict
        self._halves = (slice(0, reuse_len), slice(reuse_len, tgt_len))
        self._word_starts = np.asarray(word_starts, bool)
        self._window = {"mask_alpha": mask_alpha, "mask_beta": mask_beta, "max_gram": max_gram, "whole_words": spans == "words"}

    def draw(self, ids_BT: np.ndarray, backward_B: np.ndarray, draws: Sequence[Draws]) -> Targets:
        """Return targets and ranks of rows."""
        chosen_BT, place_BT = np.zeros(ids_BT.shape, bool), np.zeros(ids_BT.shape, np.int64)
        starts_BT = self._word_starts[ids_BT]
        for row, numbers in enumerate(draws):
            order = -1 if backward_B[row] else 1
            for half, n_target in zip(self._halves, self.numbers, strict=True):
                starts = starts_BT[row, half][::order]
                chosen = draw_spans(starts, n_target, numbers, **self._window)
                chosen_BT[row, half] = fill_up(chosen, n_target, numbers)[::order]
            for half in self._halves:
                place_BT[row, half] = draw_order(half.stop - half.start, self._perm_size, numbers)
        functional_BT = np.isin(ids_BT, self.functional)
        target_BT = chosen_BT & ~functional_BT
        rank_BT, sees_BT = ranks(target_BT, functional_BT, place_BT, reuse_len=self._reuse_len)
        targets_BK = np.argsort(~target_BT, axis=1, kind="stable")[:, : self._n_target]
        missing_BK = ~np.take_along_axis(target_BT, targets_BK, 1)
        targets_BK[missing_BK] = ids_BT.shape[1] - 1
        labels_BK = np.where(missing_BK, NOT_SCORED, np.take_along_axis(ids_BT, targets_BK, 1))
        return Targets(targets_BK, labels_BK, rank_BT, sees_BT)


def draw_spans(
    starts: np.ndarray,
    n_target: int,
    draws: Draws,
    *,
    mask_alpha: int,
    mask_beta: int,
    max_gram: int,
    whole_words: bool,
) -> np.ndarray:
    """Choose spans of tokens, from left to right, with text around each.

    A span has n words (or tokens) with a probability proportional to 1/n. It begins at the first word at or after a random
    place of a window of n·alpha/beta tokens, and the next window begins where it ends or what is left of its own window ends.
    A span that would reach the end of the text ends the search, and so does a word with more tokens than may still be chosen.
    At least one token lies between two spans.

    Args:
        starts: (T,) bool, True where a word begins.
        n_target: the most tokens to choose.
        draws: its numbers: for each span, one for n and one for the place.
        mask_alpha: see `TargetSampler`.
        mask_beta: see `TargetSampler`.
        max_gram: the largest n.
        whole_words: a span has n words, or as many of them as may still be chosen; otherwise n tokens.

    Returns:
        (T,) bool, True for chosen tokens.
    """
    n_token = len(starts)
    shares = np.cumsum(1 / np.arange(1, max_gram + 1))
    shares = (shares / shares[-1]).tolist()
    begins = np.flatnonzero(starts).tolist()
    n_before = np.cumsum(starts) - starts  # words that begin before each token, so the index of the next one
    chosen = np.zeros(n_token, bool)
    place = 0
    while place < n_token and n_target:
        n = min(1 + bisect_right(shares, draws.take(1).item()), n_target)
        window = n * mask_alpha // mask_beta
        left = draws.below(window)
        if place + left >= n_token or (word := int(n_before[place + left])) == len(begins):
            break
        begin = begins[word]
        ends = begins[word + 1 : word + n + 1] if whole_words else range(begin + 1, min(begin + n + 1, n_token))
        fitting = [end for end in ends if end <= begin + n_target]
        if len(ends) < n or not fitting:
            break
        end = fitting[-1]
        chosen[begin:end] = True
        n_target -= end - begin
        place = end + window - left
    return chosen


def fill_up(chosen: np.ndarray, n_target: int, draws: Draws) -> np.ndarray:
    """Return `chosen`, (T,) bool, with single random tokens added until `n_target` are chosen."""
    chosen = chosen.copy()
    missing = n_target - int(np.count_nonzero(chosen))
    while missing > 0:
        place = draws.below(len(chosen))
        missing -= not chosen[place]
        chosen[place] = True
    return chosen


def draw_order(length: int, perm_size: int, draws: Draws) -> np.ndarray:
    """Return the places of `length` tokens in a random order, (length,) int64.

    The first `perm_size` tokens come first, in a random order, then the next in the same order, and so on.
    """
    order = np.argsort(draws.take(perm_size), kind="stable")
    return np.add.outer(np.arange(0, length, perm_size), order).reshape(-1)


def ranks(
    target_BT: np.ndarray, functional_BT: np.ndarray, place_BT: np.ndarray, *, reuse_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `rank_BT` and `sees_BT`, int64: query t sees key s if rank[s] < sees[t].

    Args:
        target_BT: bool, tokens that are predicted.
        functional_BT: bool, <sep> and <cls>.
        place_BT: int64, place of each token in the order of its half, from 0.
        reuse_len: tokens of the first half.

    Example:
        >>> target, functional = np.array([[0, 1, 0, 1, 0, 1]], bool), np.array([[0, 0, 0, 0, 1, 0]], bool)
        >>> rank, sees = ranks(target, functional, np.array([[2, 0, 1, 1, 2, 0]]), reuse_len=3)
        >>> rank.tolist(), sees.tolist()
        ([[-1, 0, -1, 5, 6, 4]], [[0, 0, 0, 5, 7, 4]])
    """
    half_T = np.where(np.arange(target_BT.shape[1]) < reuse_len, 0, reuse_len + 1)
    rank_BT = half_T + np.where(target_BT | functional_BT, place_BT, -1)
    return rank_BT, np.where(target_BT, rank_BT, np.where(functional_BT, rank_BT + 1, half_T))
