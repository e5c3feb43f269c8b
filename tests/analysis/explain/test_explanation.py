"""The passages of a text that gain most."""

import numpy as np

from transformer_xl.analysis.explain.explanation import best_passages


def test_passages_lie_inside_segments_and_the_best_come_first():
    values = np.zeros(300)
    values[[5, 130, 131, 199]] = 3, 2, 2, -9
    first, second = best_passages(values, tgt_len=128)
    assert (first.begin, first.end, first.score, first.best) == (129, 193, 4.0, 131)
    assert (second.begin, second.end, second.score, second.best) == (1, 65, 3.0, 6)
    assert best_passages(-np.ones(5), tgt_len=2) == []
    assert [p.end - p.begin for p in best_passages(np.ones(100), tgt_len=100, n=9)] == [50, 50]
