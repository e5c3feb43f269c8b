import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.order_cases import documents
from transformer_xl.data import order as order_module
from transformer_xl.data.order import Permutation, ShuffledText

KEYS = st.tuples(st.integers(0, 2**40), st.integers(0, 1000))


@given(st.integers(1, 300), KEYS)
def test_everything_comes_once(n: int, key) -> None:
    whole = Permutation(n, *key)(np.arange(n))
    assert sorted(whole.tolist()) == list(range(n))
    assert [int(Permutation(n, *key)(np.array([i]))[0]) for i in range(0, n, 7)] == whole[::7].tolist()


def test_the_order_is_the_same_for_ever() -> None:
    """These numbers may never change, because a resumed run must continue in the same order."""
    assert Permutation(10, 1, 2)(np.arange(10)).tolist() == [1, 6, 3, 9, 0, 5, 4, 7, 2, 8]
    assert Permutation(10**9, 1, 2)(np.array([0, 123_456_789])).tolist() == [788589452, 416318512]


@pytest.mark.parametrize("n", [24, 1000])
def test_every_place_is_as_likely(n: int) -> None:
    """The place of the first number: chi-squared over keys, within five standard deviations."""
    n_keys, n_bins = 1200, 24
    firsts = np.array([int(Permutation(n, 7, key)(np.zeros(1, np.int64))[0]) for key in range(n_keys)])
    counts = np.bincount(firsts * n_bins // n, minlength=n_bins)
    expected = np.bincount(np.arange(n) * n_bins // n, minlength=n_bins) * n_keys / n
    statistic = float((((counts - expected) ** 2) / expected).sum())
    assert abs(statistic - (n_bins - 1)) < 5 * (2 * (n_bins - 1)) ** 0.5


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_is_as_likely(n: int) -> None:
    """Chi-squared over keys, within five standard deviations."""
    n_keys, n_orders = 1200, math.factorial(n)
    counts = Counter(tuple(Permutation(n, 7, key)(np.arange(n)).tolist()) for key in range(n_keys))
    statistic = sum((counts[order] - n_keys / n_orders) ** 2 for order in permutations(range(n))) * n_orders / n_keys
    assert abs(statistic - (n_orders - 1)) < 5 * (2 * (n_orders - 1)) ** 0.5


def test_neighbors_are_torn_apart() -> None:
    order = Permutation(10_000, 3)(np.arange(10_000))
    assert np.abs(np.diff(order)).mean() == pytest.approx(10_000 / 3, rel=0.05)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    other = Permutation(10_000, 4)(np.arange(10_000))
    assert np.count_nonzero(order == other) < 10


@pytest.mark.parametrize("starts", [[], [0, 4], [4], [4, 10, 12], [0, 4, 11]])
def test_shuffled_documents_are_those_of_the_ids(starts) -> None:
    """Text before the first start is a document, too; a start beyond the end (of a text that was cut short) is ignored."""
    text = ShuffledText(np.arange(10), np.array(starts, np.int64), key=(1, 0))
    whole = list(range(10))
    assert text.read(0, 10)[0].tolist() in ([whole, whole[4:] + whole[:4]] if starts else [whole])


def test_blocks_of_a_shuffled_text_are_found_once_and_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(order_module, "BLOCK", 4)
    ids, starts = documents([3] * 200)
    text = ShuffledText(ids, starts, key=(1, 0), n_lanes=2)
    for begin in range(0, 300, 5):
        for lane in (0, 300):
            text.read(lane + begin, lane + begin + 5)
    blocks = text._block.cache_info()
    assert blocks.misses <= 50 + 1, "all of them, and that in which the second lane begins once more"
    assert blocks.currsize <= 5


def test_shuffled_text_in_many_blocks(monkeypatch) -> None:
    """Looking places up in blocks gives the same as placing one document after another."""
    monkeypatch.setattr(order_module, "BLOCK", 4)
    monkeypatch.setattr(order_module, "_BLOCKS_AT_ONCE", 3)
    ids, starts = documents([1 + i % 5 for i in range(50)])
    text = ShuffledText(ids, starts, key=(1, 2))
    ends = [*starts[1:], len(ids)]
    order = Permutation(50, 1, 2)(np.arange(50)).tolist()
    expected = np.concatenate([ids[starts[i] : ends[i]] for i in order])
    begins = np.flatnonzero(expected % 100 == 0)
    for begin in range(0, len(ids), 3):
        for end in range(begin + 1, min(begin + 40, len(ids)) + 1):
            tokens, starting = text.read(begin, end)
            assert np.array_equal(tokens, expected[begin:end])
            assert np.array_equal(starting, begins[(begins >= begin) & (begins < end)] - begin)
