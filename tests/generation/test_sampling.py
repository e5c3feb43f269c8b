"""`Sampling.probabilities` against the definitions, spelled out in plain Python; and that draws follow them."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.generation.sampling import Sampling

LOGITS = st.lists(st.integers(-60, 60), min_size=1, max_size=12, unique=True).map(lambda values: [v / 7 for v in values])


def defined(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """Softmax; the k likeliest; then the shortest prefix of the likeliest that reaches p."""
    if temperature == 0:
        return [float(value == max(logits)) for value in logits]
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    kept = order[: top_k or len(order)]
    total = sum(weights[i] for i in kept)
    if top_p is not None:
        n, reached = 0, 0.0
        while reached < top_p - 1e-9 and n < len(kept):
            reached += weights[kept[n]] / total
            n += 1
        kept = kept[:n]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 100]),
    top_p=st.sampled_from([None, 0.013, 0.31, 0.57, 0.93, 1.0]),
)
def test_probabilities_are_as_defined(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> None:
    actual = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).probabilities(torch.tensor(logits))
    torch.testing.assert_close(actual, torch.tensor(defined(logits, temperature, top_k, top_p)), atol=1e-5, rtol=1e-4)


def test_filters_apply_one_after_another() -> None:
    """0.5, 0.3, 0.15, 0.05: of the 3 likeliest, renormalized to 0.53, 0.32, 0.16, two reach 0.84; of all, three."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    both = Sampling(top_k=3, top_p=0.84).probabilities(logits)
    torch.testing.assert_close(both, torch.tensor([0.0, 0.625, 0.0, 0.375]))
    alone = Sampling(top_p=0.84).probabilities(logits)
    torch.testing.assert_close(alone, torch.tensor([0.15, 0.5, 0.0, 0.3]) / 0.95)


def test_the_likeliest_always_stays() -> None:
    assert Sampling(top_p=1e-9).probabilities(torch.tensor([0.0, 3.0, 0.0])).tolist() == [0, 1, 0]


def test_rows_and_any_leading_shape() -> None:
    logits = torch.randn(2, 3, 7)
    sampling = Sampling(temperature=0.8, top_k=4, top_p=0.9)
    together = sampling.probabilities(logits)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(together[i, j], sampling.probabilities(logits[i, j]))
    for shape in ((), (4,), (2, 3)):
        for temperature in (0.0, 1.0):
            assert Sampling(temperature=temperature).choose(torch.randn(*shape, 7)).shape == shape


def test_tiny_temperatures_and_huge_scores_stay_finite() -> None:
    for temperature in (1e-3, 1e-38, 5e-324):
        probabilities = Sampling(temperature=temperature).probabilities(torch.tensor([1e4, -1e30, 9e3], dtype=torch.float32))
        assert probabilities.tolist() == [1, 0, 0]


def test_half_precision_scores_are_taken_as_fp32() -> None:
    assert Sampling().probabilities(torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.float32


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    sampling = Sampling(temperature=1.3, top_k=4)
    n = 20_000
    drawn = sampling.choose(logits.expand(n, 5), torch.Generator().manual_seed(7))
    counts = torch.bincount(drawn, minlength=5)
    expected = sampling.probabilities(logits) * n
    assert counts[3] == 0
    kept = expected > 0
    chi_squared = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum().item()
    assert chi_squared < 16.27  # 3 degrees of freedom, 0.1 %


def test_a_generator_makes_draws_repeatable() -> None:
    logits = torch.randn(50, 7)
    draws = [Sampling().choose(logits, torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -1.0}, "0 takes the likeliest token"),
        ({"top_k": -3}, "leave it out to keep all tokens"),
        ({"top_p": float("nan")}, "must be above 0 and at most 1"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Sampling(**options)
