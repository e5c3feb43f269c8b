"""`probabilities` against the definitions in plain Python; `choose` against `probabilities`, and what it computes."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.generation.test_scores import ALL_BORDERS, BORDERS, LOG_PROBABILITIES, adaptive_logits, clustered
from transformer_xl.errors import ConfigError
from transformer_xl.generation import scores as scores_module
from transformer_xl.generation.choice import _adjusted_row, _drawn, choose, choose_together, probabilities
from transformer_xl.generation.drawing import _BLOCK, RejectionSampler
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scores import Scores
from transformer_xl.generation.seeds import seeded_generator

BAN = -math.inf
LOGITS = st.lists(st.integers(-60, 60), min_size=1, max_size=12, unique=True).map(lambda values: [v / 7 for v in values])


# the definition


def defined(
    logits: list[float],
    *,
    repetition_penalty: float = 1.0,
    seen: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> list[float]:
    """Penalty; bias; softmax; the k likeliest; the shortest prefix of the likeliest that reaches p; those near the best."""
    scores = list(logits)
    for i in set(seen):
        scores[i] = scores[i] * repetition_penalty if scores[i] < 0 else scores[i] / repetition_penalty
    for i, bias in (logit_bias or {}).items():
        scores[i] += bias
    if temperature == 0:
        return [float(i == scores.index(max(scores))) for i in range(len(scores))]
    weights = [math.exp((value - max(scores)) / temperature) for value in scores]
    kept = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_k]
    if top_p is not None:
        total, n, reached = sum(weights[i] for i in kept), 0, 0.0
        while reached < top_p - 1e-9 and n < len(kept):
            reached += weights[kept[n]] / total
            n += 1
        kept = kept[:n]
    kept = [i for i in kept if weights[i] >= (min_p or 0.0)]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(scores))]


@given(
    logits=LOGITS,
    data=st.data(),
    repetition_penalty=st.sampled_from([1.0, 1.3703, 0.8307]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 100]),
    top_p=st.sampled_from([None, 0.013, 0.31, 0.57, 0.93, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.013, 0.37, 1.0]),
)
def test_probabilities_are_as_defined(logits: list[float], data: st.DataObject, **options: Any) -> None:
    tokens = st.integers(0, len(logits) - 1)
    seen = data.draw(st.lists(tokens, max_size=5))
    bias = data.draw(st.dictionaries(tokens, st.sampled_from([-2.3011, 1.7013, BAN]), max_size=len(logits) - 1))
    actual = probabilities(torch.tensor(logits), Sampling(logit_bias=bias, **options), seen)
    expected = defined(logits, seen=seen, logit_bias=bias, **options)
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-5, rtol=1e-4)


def test_only_the_last_tokens_are_penalized() -> None:
    logits = torch.tensor([1.0, 1.0, 1.0])
    for window, expected in ((1, [1.0, 1.0, 0.5]), (2, [1.0, 0.5, 0.5]), (None, [0.5, 0.5, 0.5])):
        sampling = Sampling(repetition_penalty=2, repetition_window=window)
        torch.testing.assert_close(probabilities(logits, sampling, [0, 1, 2]), torch.tensor(expected).softmax(0))
    old_ones = [0, *[1] * 64]
    torch.testing.assert_close(
        probabilities(logits, Sampling(repetition_penalty=2), old_ones), torch.tensor([1.0, 0.5, 1.0]).softmax(0)
    )


def test_tokens_outside_the_vocabulary_are_no_history() -> None:
    row, sampling = torch.zeros(1, 13).index_fill(1, torch.tensor([12]), 5.0), Sampling(repetition_penalty=2, temperature=0)
    for history in ([-1, 13], [13], [-1]):
        assert torch.equal(probabilities(row[0], sampling, history), probabilities(row[0], sampling))
        for scores in (Scores(row), clustered(row)):
            penalized = Sampling(repetition_penalty=1e9, logit_bias={0: 1.0}, temperature=0)
            assert choose(scores, 0, penalized, history, seeded_generator(0)) == 12


def test_equal_scores_give_way_from_the_highest_id() -> None:
    logits = torch.zeros(2, 50)
    for sampling in (Sampling(top_k=7), Sampling(top_p=0.139)):
        assert probabilities(logits, sampling).gt(0).tolist() == [[True] * 7 + [False] * 43] * 2
    greedy = Sampling(temperature=0, top_k=1, top_p=1.0, min_p=0.0)  # which say the same, or nothing
    assert probabilities(logits, greedy).tolist() == [[1.0] + [0.0] * 49] * 2


def test_rows_of_any_leading_shape_and_precision() -> None:
    logits = torch.randn(2, 3, 7).bfloat16()
    sampling = Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, logit_bias={3: 1.5, 2: BAN}, repetition_penalty=1.4)
    together = probabilities(logits, sampling, [1, 6])
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(together[i, j], probabilities(logits[i, j].float(), sampling, [1, 6]))


# draws follow the definition


def fits(counts: Tensor, probabilities: Tensor) -> None:
    """Pearson's test at 1e-4; tokens of fewer than 5 expected draws count as one."""
    expected = probabilities.double() * counts.sum()
    assert counts[probabilities == 0].sum() == 0, "what was filtered out was drawn"
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    p = 1.0 if freedom == 0 else float(torch.special.gammaincc(freedom, chi_squared / 2))
    assert p > 1e-4, f"p {p:.2g}: {counts.tolist()} drawn, {expected.tolist()} expected"


HISTORY = [2, 7, 7, 11, 0]
TOGETHER: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.6, "top_p": 0.8, "logit_bias": {8: -2.0}},
    {"top_p": 0.6, "min_p": 0.3, "repetition_penalty": 1.2},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.2, "repetition_penalty": 1.3, "logit_bias": {0: BAN, 12: 2.0}},
]
N_DRAW = 5_000


def count(sampling: Sampling, scores: Scores) -> Tensor:
    draws = seeded_generator(11)
    tokens = [choose(scores, 0, sampling, HISTORY, draws) for _ in range(N_DRAW)]
    return torch.bincount(torch.tensor(tokens), minlength=scores.vocab_size)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 0.6}, *TOGETHER])
def test_draws_from_an_adaptive_softmax_follow_the_definition(options: dict[str, Any]) -> None:
    logits, sampling = adaptive_logits(), Sampling(**options)
    fits(count(sampling, clustered(logits)), probabilities(logits[0], sampling, HISTORY))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.75}, {"logit_bias": {1: BAN, 6: 1.5, 10: -1.0}}, TOGETHER[2]])
def test_draws_from_a_plain_softmax_follow_the_definition(options: dict[str, Any]) -> None:
    logits, sampling = torch.randn(1, 15), Sampling(**options)
    fits(count(sampling, Scores(logits)), probabilities(logits[0], sampling, HISTORY))


def test_draws_from_many_words_follow_the_definition() -> None:
    """More than are summed one after another; some banned."""
    logits, sampling = torch.randn(1, 2 * _BLOCK + 100), Sampling(logit_bias=dict.fromkeys(range(400, 700), BAN))
    logits[0, ::97] += 4
    fits(count(sampling, Scores(logits)), probabilities(logits[0], sampling, HISTORY))


# any settings, any scores

TOKENS = st.integers(0, 12)
SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.03, 0.6, 1.0, 1.7, 40.0]),
        "top_k": st.sampled_from([None, 1, 3, 8, 13, 100]),
        "top_p": st.sampled_from([None, 0.0137, 0.3137, 0.7731, 0.9917, 1.0]),
        "min_p": st.sampled_from([None, 0.0, 0.0137, 0.3137, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.4, 0.7]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-2.3, 1.7, 100.0, BAN]), max_size=4),
    }
)
CLUSTERS = ALL_BORDERS.filter(lambda borders: len(borders) > 2)


@given(log_probabilities=LOG_PROBABILITIES, settings=SETTINGS, history=st.lists(TOKENS, max_size=5))
def test_tokens_that_the_definition_drops_are_not_drawn(
    log_probabilities: Tensor, settings: dict[str, Any], history: list[int]
) -> None:
    """Also of equal ones; and all that it keeps, if they are likely enough."""
    sampling, draws = Sampling(**settings), seeded_generator(0)
    expected = probabilities(log_probabilities[0], sampling, history)
    found = {choose(Scores(log_probabilities), 0, sampling, history, draws) for _ in range(60)}
    assert set((expected > 0.3).nonzero().flatten().tolist()) <= found
    assert found <= set(expected.nonzero().flatten().tolist())


@given(
    log_probabilities=LOG_PROBABILITIES,
    borders=CLUSTERS,
    settings=SETTINGS,
    history=st.lists(TOKENS, max_size=5),
    seed=st.integers(0, 1000),
)
def test_what_was_computed_before_makes_no_difference(
    log_probabilities: Tensor, borders: tuple[int, ...], settings: dict[str, Any], history: list[int], seed: int
) -> None:
    """Neither do other rows; and every token that is drawn is one that the definition keeps."""
    sampling = Sampling(**settings)
    known = clustered(log_probabilities, borders)
    known.full()
    for row in range(len(log_probabilities)):
        one, two, three = (seeded_generator(seed + row) for _ in range(3))
        for _ in range(3):
            lazy = clustered(log_probabilities, borders)
            alone = clustered(log_probabilities[row : row + 1], borders)
            token = choose(lazy, row, sampling, history, one)
            assert token == choose(known, row, sampling, history, two) == choose(alone, 0, sampling, history, three)
            assert probabilities(log_probabilities[row], sampling, history)[token] > 0
            assert {computed_for for _, computed_for in lazy.computed} <= {row}
            low = borders[1] if token >= borders[1] else None
            assert low is None or any(borders[tail + 1] <= token < borders[tail + 2] for tail, _ in lazy.computed)


@pytest.mark.parametrize("names", [("top_p",), ("top_k",), ("min_p",), ("top_k", "top_p"), ("top_k", "top_p", "min_p")])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5, 8.0])
def test_bounds_keep_the_same_tokens_as_the_definition(names: tuple[str, ...], temperature: float) -> None:
    """Scores of all kinds, so that each bound decides somewhere; a tenth of the tokens less likely than the model says."""
    numbers = random.Random(0)
    for _ in range(10):
        scores = clustered((torch.randn(1, 13) * numbers.choice([0.3, 1.0, 2.5])).log_softmax(1))
        ranges = {"top_k": numbers.randint(1, 12), "top_p": numbers.uniform(0.05, 0.95), "min_p": numbers.uniform(0.01, 0.9)}
        filters: dict[str, Any] = {name: value for name, value in ranges.items() if name in names}
        bias = {token: -2.0 for token in range(13) if numbers.random() < 0.1}
        sampling = Sampling(temperature=temperature, logit_bias=bias, **filters)
        kept = probabilities(scores.full()[0], sampling) > 0
        for cluster, token in ((i, token) for i in range(3) for token in range(BORDERS[i], BORDERS[i + 1])):
            row = _adjusted_row(scores.row(0), sampling, [])
            sampler = RejectionSampler(
                row, **{"temperature": temperature, "top_k": None, "top_p": None, "min_p": None, **filters}
            )
            sampler._open(cluster)  # where the point fell
            assert sampler._is_kept(float(row.cluster(cluster)[token - BORDERS[cluster]]), token) == kept[token]


@given(
    log_probabilities=LOG_PROBABILITIES,
    borders=CLUSTERS,
    penalty=st.sampled_from([1.0, 1.4, 0.7]),
    bias=st.dictionaries(TOKENS, st.sampled_from([-2.5, 0.5, BAN]), max_size=4),
    history=st.lists(TOKENS, max_size=5),
)
def test_greedy_takes_the_first_of_the_likeliest(
    log_probabilities: Tensor, borders: tuple[int, ...], penalty: float, bias: dict[int, float], history: list[int]
) -> None:
    sampling = Sampling(temperature=0, repetition_penalty=penalty, logit_bias=bias)
    for row, of_row in enumerate(log_probabilities):
        expected = int(probabilities(of_row, sampling, history).argmax())
        for scores in (clustered(log_probabilities, borders), Scores(log_probabilities)):
            assert choose(scores, row, sampling, history, seeded_generator(0)) == expected


@given(logits=LOGITS, temperature=st.sampled_from([1e-3, 1e-38, 5e-324]))
def test_tiny_temperatures_draw_the_likeliest(logits: list[float], temperature: float) -> None:
    row = torch.tensor([[*logits, 1e4, -1e30, 9e3]])
    sampling = Sampling(temperature=temperature)
    assert probabilities(row[0], sampling).argmax() == len(logits) == choose(Scores(row), 0, sampling, [], seeded_generator(0))
    clusters = clustered(row.log_softmax(1), (0, 1, row.shape[1] - 1, row.shape[1]))
    assert choose(clusters, 0, sampling, [], seeded_generator(0)) == len(logits)


# what is computed

HEAVY = torch.tensor([[0.5, 0.25, 0.1, 0.05, *[0.012] * 5, *[0.01] * 4]]).log()
"""A head of 0.9, tails of 0.06 and 0.04."""


def test_the_nucleus_computes_a_tail_only_where_bounds_do_not_tell() -> None:
    """Of 0.87, 0.5, 0.25 and 0.1 are part whatever the tails hold; 0.05 is, unless a token of the first tail is likelier."""
    found = set()
    for seed in range(200):
        scores = clustered(HEAVY)
        token = choose(scores, 0, Sampling(top_p=0.87), [], seeded_generator(seed))
        found.add((token, scores.computed))
    nothing, first = frozenset(), frozenset({(0, 0)})
    assert {(0, nothing), (1, nothing), (2, nothing), (3, first)} <= found
    assert (3, nothing) not in found and {token for token, _ in found} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "history", "expected"),
    [
        ({"temperature": 0, "repetition_penalty": 1.2}, [0, 5, 12], set()),
        ({"temperature": 0, "logit_bias": {5: -1.0, 12: BAN}}, [], set()),
        ({"temperature": 0, "logit_bias": {5: -0.1, 12: 0.1}}, [], {1}),  # a token may rise
        ({"temperature": 0, "repetition_penalty": 0.9}, [10], {1}),
        ({"temperature": 0, "repetition_penalty": 0.9}, [0, 3], set()),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5}, [], set()),
        ({"min_p": 0.2, "top_p": 0.7}, [], set()),
        ({"top_p": 0.7, "temperature": 0.5}, [], set()),
    ],
)
def test_only_tails_that_can_matter_are_computed(options: dict[str, Any], history: list[int], expected: set[int]) -> None:
    for seed in range(50):
        scores = clustered(HEAVY)
        choose(scores, 0, Sampling(**options), history, seeded_generator(seed))
        assert {tail for tail, _ in scores.computed} == expected


@pytest.mark.parametrize(
    ("temperature", "top_p", "bias"),
    [(0.5, 0.7, {}), (1.0, 0.6, dict.fromkeys(range(2, 11), -10.0))],
    ids=["many equal tokens", "tokens made rare"],
)
def test_a_tail_may_hold_little_of_all(temperature: float, top_p: float, bias: dict[int, float]) -> None:
    """Were the tail one token, or as likely as the model says, then the second token would be in the nucleus too."""
    row = torch.tensor([[0.5, 0.26, *[0.24 / 9] * 9]]).log()
    sampling = Sampling(temperature=temperature, top_p=top_p, logit_bias=bias)
    assert probabilities(row[0], sampling).tolist() == [1.0] + [0.0] * 10
    for seed in range(50):
        assert choose(clustered(row, (0, 2, 11)), 0, sampling, [], seeded_generator(seed)) == 0


def test_a_tail_may_hold_several_that_are_likelier() -> None:
    """0.41 has room for two tokens before 0.18."""
    row, sampling = torch.tensor([[0.3, 0.18, 0.06, 0.05, 0.2, 0.2, 0.005, 0.005]]).log(), Sampling(top_k=3)
    assert probabilities(row[0], sampling).gt(0).tolist() == [True, False, False, False, True, True, False, False]
    assert {choose(clustered(row, (0, 4, 8)), 0, sampling, [], seeded_generator(seed)) for seed in range(50)} == {0, 4, 5}


class Counting(np.random.Generator):
    n_drawn = 0

    def random(self) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.n_drawn += 1
        return super().random()


@pytest.mark.parametrize("n_tail", [0, 1])
def test_a_small_nucleus_takes_few_proposals(n_tail: int) -> None:
    """A rejected token removes all tokens of lower rank, too: 1,000 tokens do not take 1,000 proposals."""
    row = torch.zeros(1, 1000).log_softmax(1)
    scores = clustered(row, (0, 500, 1000)) if n_tail else Scores(row)
    for seed in range(50):
        draws = Counting(np.random.PCG64(seed))
        assert choose(scores, 0, Sampling(top_p=1e-4), [], draws) == 0
        assert 0 < draws.n_drawn < 30


# what is refused

WHOLE, REAL = ("top_k", "repetition_window"), ("temperature", "repetition_penalty")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -1.0}, r"^temperature \(-1.0\) must be at least 0 and finite$"),
        *(({"temperature": value}, r"^temperature \(") for value in (math.nan, math.inf)),
        *(({"top_k": value}, r"^top_k \(.* must be at least 1") for value in (-3, 0)),
        *(({"top_p": value}, r"^top_p \(.* must be above 0 and at most 1") for value in (math.nan, 0.0, 1.1)),
        *(({"min_p": value}, r"^min_p \(.* must be at least 0 and at most 1") for value in (math.nan, -0.1, 1.5)),
        *(({"repetition_penalty": value}, r"^repetition_penalty \(") for value in (0.0, 1e-10, math.inf, math.nan)),
        ({"repetition_window": 0}, r"^repetition_window \(0\) must be at least 1"),
        *(({name: value}, rf"^{name} \({value}\) .* a whole number$") for name in WHOLE for value in (2.5, True)),
        *(({name: value}, rf"^{name} \({value!r}\) must be at") for name in REAL for value in (None, True, "0.8")),
        *(
            ({"logit_bias": bias}, "^logit_bias of token id .* must be a number")
            for bias in ({-1: 2.0}, {3: math.nan}, {3: math.inf})
        ),
        *(({"temperature": 0, **idle}, "would do nothing") for idle in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1})),
    ],
)
def test_values_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Sampling(**options)


@pytest.mark.parametrize(
    ("bias", "match"),
    [
        ({13: 1.0}, r"logit_bias has token id 13, which is outside the vocabulary \(13\)"),
        (dict.fromkeys(range(13), BAN), "logit_bias bans all 13 tokens; leave one that can be drawn"),
    ],
)
def test_a_bias_that_does_not_fit_the_vocabulary(bias: dict[int, float], match: str) -> None:
    sampling = Sampling(logit_bias=bias)
    for attempt in (
        lambda: sampling.check(13),
        lambda: probabilities(HEAVY, sampling),
        lambda: choose(clustered(HEAVY), 0, sampling, [], seeded_generator(0)),
    ):
        with pytest.raises(ConfigError, match=match):
            attempt()


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers(options: dict[str, Any], value: float) -> None:
    sampling, row = Sampling(**options), torch.full((1, 13), value)
    for attempt in (
        lambda: probabilities(row, sampling),
        lambda: choose(Scores(row), 0, sampling, [], seeded_generator(0)),
        lambda: choose(clustered(row), 0, sampling, [], seeded_generator(0)),
    ):
        with pytest.raises(ConfigError, match="no token can be drawn: the best score is not a finite number"):
            attempt()


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({"repetition_penalty": 1e9}, {0, 1, 3}),
        ({"logit_bias": {0: -1e300, 1: -1e300}}, {2, 3}),
        ({"temperature": 1e300, "min_p": 0.5}, {0, 1, 2, 3}),
    ],
)
def test_settings_beyond_fp32(options: dict[str, Any], possible: set[int]) -> None:
    row, sampling = torch.tensor([[0.0, 0.0, -1.0, 1.0]]), Sampling(**options)
    assert set(probabilities(row[0], sampling, [2]).nonzero().flatten().tolist()) == possible
    draws = seeded_generator(0)
    assert {choose(Scores(row), 0, sampling, [2], draws) for _ in range(100)} == possible


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_tail_of_no_numbers_is_not_drawn_from(options: dict[str, Any]) -> None:
    row = torch.tensor([[0.01] * 4 + [0.91] + [0.01] * 4 + [0.0025] * 4]).log()
    broken = Scores(
        row[:, :4],
        tails=torch.tensor([[0.95, 0.01]]).log(),
        compute_tail=lambda i, rows: torch.full((len(rows), 5 - i), math.nan),
        borders=(0, 4, 9, 13),
    )
    with pytest.raises(ConfigError, match="look for NaN"):
        choose(broken, 0, Sampling(**options), [], seeded_generator(0))


def test_the_callers_bias_is_copied() -> None:
    bias = {1: -1.0}
    sampling = Sampling(logit_bias=bias)
    bias[2] = math.inf
    assert sampling.logit_bias == {1: -1.0}
    assert hash(sampling) == hash(Sampling(logit_bias={1: -1.0}))


# draws on a GPU, tried out on a CPU


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_module, "_DRAWING", ("cpu",))
    monkeypatch.setattr(scores_module, "_WORTH_DRAWING", 15)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("options", [{}, {"top_p": 0.75}, {"top_k": 9, "top_p": 0.8, "min_p": 0.2}])
def test_draws_on_a_gpu_follow_the_definition(options: dict[str, Any]) -> None:
    """Forty at once."""
    logits, sampling = torch.randn(40, 15), Sampling(**options)
    logits[1:] = logits[0]
    draws, scores = [seeded_generator(i) for i in range(40)], Scores(logits)
    drawn = [choose_together(scores, range(40), sampling, draws) for _ in range(N_DRAW // 40)]
    fits(torch.bincount(torch.tensor(drawn).flatten(), minlength=15), probabilities(logits[0], sampling, HISTORY))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.4, "top_p": 0.7}, {"top_k": 3}, {"temperature": 0}])
def test_a_draw_on_a_gpu_depends_on_its_row_and_its_generator_alone(options: dict[str, Any]) -> None:
    scores, sampling = Scores(torch.randn(5, 40)), Sampling(**options)
    together = choose_together(scores, [3, 0, 4], sampling, [seeded_generator(i) for i in (3, 0, 4)])
    assert together == [choose(scores, row, sampling, [], seeded_generator(row)) for row in (3, 0, 4)]
    if options == {"temperature": 0}:
        assert together == scores.full().argmax(1)[[3, 0, 4]].tolist()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_on_a_gpu_that_is_no_numbers_harms_no_other(options: dict[str, Any], value: float) -> None:
    sampling, scores = Sampling(**options), Scores(torch.stack([torch.randn(15), torch.full((15,), value)]))
    drawn = choose_together(scores, range(2), sampling, [seeded_generator(0), seeded_generator(1)])
    assert drawn is not None and drawn[0] >= 0 and drawn[1] == -1
    with pytest.raises(ConfigError, match="no token can be drawn"):
        choose(scores, 1, sampling, [], seeded_generator(0))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_few_tokens_tails_and_penalties_are_left_to_the_cpu() -> None:
    enough, draws = Scores(torch.zeros(1, 15)), [seeded_generator(0)]
    assert enough.on_device is not None and Scores(torch.zeros(1, 14)).on_device is None
    assert clustered(torch.zeros(1, 13)).on_device is None
    for changed in (Sampling(repetition_penalty=1.1), Sampling(logit_bias={3: 9.0})):
        assert choose_together(enough, [0], changed, draws) is None
        assert choose(enough, 0, changed, HISTORY, draws[0]) >= 0
    assert choose_together(enough, [0], Sampling(), draws) is not None


def test_a_draw_falls_where_the_number_lies() -> None:
    """The last number below 1 still takes a token, and none of probability 0 is ever taken."""
    nats = torch.tensor([BAN, math.log(0.5), BAN, 0.0, BAN], dtype=torch.float64)
    numbers = torch.tensor([0.0, 0.3, 0.34, 1 - 2**-53], dtype=torch.float64)
    assert _drawn(nats.expand(4, -1), numbers).tolist() == [1, 1, 3, 3]
    assert _drawn(torch.zeros(1, 1 << 16, dtype=torch.float64), numbers[3:]).tolist() == [(1 << 16) - 1], "rounded up"
