"""`Scores`: the numbers of all tokens, from a head and tails that are computed only when they can matter."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import assert_close
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation.scores import ROUNDING, Scores
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, Clusters

BORDERS = (0, 4, 9, 13)


def clustered(log_probabilities: Tensor, borders: Sequence[int] = BORDERS) -> Scores:
    """The same distribution (B, V), of which the head is known, and each tail as a whole."""
    tails = [log_probabilities[:, low:high] for low, high in itertools.pairwise(borders[1:])]
    return Scores(
        log_probabilities[:, : borders[1]],
        tails=torch.stack([tail.logsumexp(1) for tail in tails], dim=1),
        compute_tail=lambda i, rows: tails[i][rows],
        borders=borders,
    )


def adaptive_logits(n_row: int = 1, *, scale: float = 0.7) -> Tensor:
    """Log-probabilities (n_row, 13) of a random adaptive softmax: a head of 4 tokens, tails of 5 and 4."""
    clusters = Clusters(BORDERS[-1], cutoffs=tuple(BORDERS[1:-1]), div_val=2, d_embed=8, d_model=8)
    embedding = AdaptiveEmbedding(clusters)
    softmax = AdaptiveSoftmax(clusters, tied=True, tied_projections=[False, True, True])
    with torch.no_grad():
        for parameter in softmax.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        return softmax.logits(torch.randn(n_row, 1, 8) * scale, embedding)[:, 0]


# values with ties, and every place of the cutoffs
LOG_PROBABILITIES = st.lists(st.lists(st.integers(-6, 6), min_size=13, max_size=13), min_size=1, max_size=3).map(
    lambda rows: (torch.tensor(rows) / 2).log_softmax(1)
)
ALL_BORDERS = st.sets(st.integers(1, 12), max_size=4).map(lambda cutoffs: (0, *sorted(cutoffs), 13))


@given(log_probabilities=LOG_PROBABILITIES, borders=ALL_BORDERS.filter(lambda borders: len(borders) > 2))
def test_all_tokens_are_those_of_the_head_and_the_tails(log_probabilities: Tensor, borders: tuple[int, ...]) -> None:
    scores = clustered(log_probabilities, borders)
    assert scores.computed == set()
    assert torch.equal(scores.full(), log_probabilities)
    rows, tails = range(len(log_probabilities)), range(len(borders) - 2)
    assert scores.computed == {(tail, row) for tail in tails for row in rows}
    assert (scores.batch_size, scores.vocab_size) == log_probabilities.shape


def test_scores_are_a_copy() -> None:
    """Whoever is given all scores may write over them."""
    weight = torch.nn.Parameter(torch.zeros(1, 2, dtype=torch.bfloat16))
    scores = Scores(weight - 2, tails=weight[:, :1] - 1, compute_tail=lambda i, rows: (weight - 3)[rows], borders=(0, 2, 4))
    full = scores.full()
    assert full.dtype == torch.float32 and not full.requires_grad
    full[:] = 7
    assert scores.full().tolist() == [[-2.0, -2.0, -3.0, -3.0]]


def test_a_token_computes_its_own_tail_only_and_that_once() -> None:
    log_probabilities = adaptive_logits(4)
    scores = clustered(log_probabilities)
    calls = []
    compute_tail = scores._compute_tail
    assert compute_tail is not None
    scores._compute_tail = lambda i, rows: (calls.append((i, rows.tolist())), compute_tail(i, rows))[1]
    ids = torch.tensor([12, 3, 8, 9])
    for _ in range(2):
        assert_close("nats", scores.log_probability(ids), log_probabilities[[0, 1, 2, 3], ids], 1e-6)
    assert calls == [(0, [2]), (1, [0, 3])]  # rows of a tail together
    scores.compute(1, [0, 1, 3])
    assert calls[2:] == [(1, [1])]
    assert scores.computed == {(0, 2), (1, 0), (1, 3), (1, 1)}


@pytest.mark.parametrize("rows", [[1, 2], [2, 0], [1]])
def test_of_rows_that_nobody_asks_for_no_tail_is_computed(rows: list[int]) -> None:
    log_probabilities = adaptive_logits(4)
    log_probabilities[3] = float("nan")  # a row that has read nothing has no tail that could be left out
    scores, ids = clustered(log_probabilities), [12, 7, 9, 5]
    asked = [ids[row] for row in rows]
    assert_close("nats", scores.log_probability(asked, rows=rows), log_probabilities[rows, asked], 1e-6)
    values, best = scores.top(6, rows=rows)
    expected = log_probabilities[rows].sort(dim=1, descending=True, stable=True)
    assert torch.equal(best, expected.indices[:, :6])
    assert_close("values", values, expected.values[:, :6], 1e-6)
    assert {row for _, row in scores.computed} == set(rows)
    plain = Scores(torch.randn(3, 7))
    assert torch.equal(plain.top(2, rows=rows)[0], plain.top(2)[0][rows])
    assert torch.equal(plain.log_probability([4] * len(rows), rows=rows), plain.log_probability([4, 4, 4])[rows])


# the likeliest


@given(log_probabilities=LOG_PROBABILITIES, borders=ALL_BORDERS, n=st.integers(1, 13))
def test_the_likeliest_are_in_order_and_of_equal_ones_the_lowest_first(
    log_probabilities: Tensor, borders: tuple[int, ...], n: int
) -> None:
    scores = clustered(log_probabilities, borders) if len(borders) > 2 else Scores(log_probabilities)
    values, ids = scores.top(n)
    expected = log_probabilities.sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, expected.indices[:, :n])
    torch.testing.assert_close(values, expected.values[:, :n])


@given(log_probabilities=LOG_PROBABILITIES, borders=ALL_BORDERS.filter(lambda borders: len(borders) > 2), n=st.integers(1, 13))
def test_only_tails_that_may_hold_one_of_the_likeliest_are_computed(
    log_probabilities: Tensor, borders: tuple[int, ...], n: int
) -> None:
    scores = clustered(log_probabilities, borders)
    last = scores.top(n)[0][:, -1]
    for tail, (low, high) in enumerate(itertools.pairwise(borders[1:])):
        whole = log_probabilities[:, low:high].logsumexp(1)
        for row in range(len(log_probabilities)):
            if whole[row] + ROUNDING < last[row]:
                assert (tail, row) not in scores.computed


def test_of_several_tails_the_likeliest_is_computed_first() -> None:
    log_probabilities = torch.tensor([[0.05] * 4 + [0.02] * 5 + [0.61, 0.03, 0.03, 0.03]]).log()
    scores = clustered(log_probabilities)
    assert scores.top(1)[1].tolist() == [[9]]
    assert scores.computed == {(1, 0)}


def test_what_cannot_be_asked_for_is_refused() -> None:
    scores = clustered(adaptive_logits())
    for token in (13, -1):
        with pytest.raises(TokenizerError, match=rf"token id {token} is outside the vocabulary \(13\)"):
            scores.log_probability(torch.tensor([token]))
    with pytest.raises(ValueError, match=r"ids, \[1, 2\], must be 1, one for each row"):
        scores.log_probability([1, 2])
    for n in (0, 14):
        with pytest.raises(ConfigError, match=rf"the {n} likeliest tokens of 13"):
            scores.top(n)
