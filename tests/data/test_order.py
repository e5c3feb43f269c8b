import numpy as np

from tests.data.order_cases import documents
from transformer_xl.data import order as order_module
from transformer_xl.data.order import ShuffledText, permutation


def test_shuffled_text_in_many_blocks(monkeypatch) -> None:
    """Looking places up in blocks gives the same as placing one document after another."""
    monkeypatch.setattr(order_module, "BLOCK", 4)
    ids, starts = documents([1 + i % 5 for i in range(50)])
    cut_short = ShuffledText(np.arange(10), np.array([4, 10, 12]), key=(1, 0))  # starts beyond the end are ignored
    assert cut_short.read(0, 10)[0].tolist() in ([*range(10)], [*range(4, 10), *range(4)])
    text = ShuffledText(ids, starts, key=(1, 2))
    ends = [*starts[1:], len(ids)]
    order = permutation(50, 1, 2).tolist()
    expected = np.concatenate([ids[starts[i] : ends[i]] for i in order])
    begins = np.flatnonzero(expected % 100 == 0)
    for begin in range(0, len(ids), 3):
        for end in range(begin + 1, min(begin + 40, len(ids)) + 1):
            tokens, starting = text.read(begin, end)
            assert np.array_equal(tokens, expected[begin:end])
            assert np.array_equal(starting, begins[(begins >= begin) & (begins < end)] - begin)
