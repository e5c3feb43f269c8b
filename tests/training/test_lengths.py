"""Segment lengths: the same, growing, or random; the same draws whenever they are asked for."""

from typing import Any

import pytest

from transformer_xl.config import TrainConfig
from transformer_xl.errors import ConfigError
from transformer_xl.training.lengths import SegmentLengths


def lengths(**changes: Any) -> SegmentLengths:
    values: dict[str, Any] = {"tgt_len": 40, "max_steps": 100}
    return SegmentLengths(TrainConfig(**values | changes))


def test_without_options_every_segment_has_tgt_len() -> None:
    always = lengths()
    assert {always.at(step, index, progress=step / 100) for step in range(100) for index in range(2)} == {40}
    assert always.longest == 40


@pytest.mark.parametrize(("increment", "expected"), [(10, [10, 20, 30, 40]), (16, [10, 26, 40]), (64, [10, 40])])
def test_growth_is_even_over_its_share_and_ends_at_tgt_len(increment: int, expected: list[int]) -> None:
    growing = lengths(tgt_len_start=10, tgt_len_warmup=0.5, tgt_len_increment=increment)
    seen = [growing.at(0, 0, progress=p / 1000) for p in range(1000)]
    assert sorted(set(seen)) == expected
    assert seen == sorted(seen)
    assert seen.index(40) == 500
    rises = [seen.index(length) for length in expected[1:]]
    assert rises == pytest.approx([500 * (i + 1) / (len(expected) - 1) for i in range(len(rises))], abs=1)
    assert growing.longest == 40


def test_a_start_above_the_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tgt_len_start \(41\) must be at most tgt_len \(40\)"):
        lengths(tgt_len_start=41)


def test_random_lengths_are_those_of_the_authors_varlen() -> None:
    random = lengths(varlen=True, tgt_len=80)
    drawn = [random.at(step, 0, progress=0.5) for step in range(20_000)]
    long, short = ([length for length in drawn if (length > 60) == kind] for kind in (True, False))  # 4 deviations from both
    assert len(long) / len(drawn) == pytest.approx(0.95, abs=0.005)
    for some, mean in ((long, 79.5), (short, 39.5)):  # the authors round down
        assert sum(some) / len(some) == pytest.approx(mean, abs=0.2)
        assert (sum((length - mean) ** 2 for length in some) / len(some)) ** 0.5 == pytest.approx(5, abs=0.3)
    assert max(drawn) == 95 == random.longest


def test_no_random_length_is_below_5() -> None:
    drawn = {lengths(tgt_len=8, varlen=True).at(step, 0, progress=0) for step in range(1000)}
    assert min(drawn) == 5


def test_random_lengths_follow_growth() -> None:
    random = lengths(varlen=True, tgt_len=400, tgt_len_start=100, tgt_len_increment=300, tgt_len_warmup=0.5)
    early = [random.at(step, 0, progress=0.1) for step in range(200)]
    late = [random.at(step, 0, progress=0.6) for step in range(200)]
    assert max(early) <= 115
    assert sum(late) / len(late) > 370


def test_draws_depend_on_seed_step_and_index_alone() -> None:
    one, again, other = lengths(varlen=True), lengths(varlen=True), lengths(varlen=True, seed=1)
    places = [(step, index) for step in range(40) for index in range(2)]
    drawn = [one.at(*place, progress=0.5) for place in places]
    assert [again.at(*place, progress=0.5) for place in reversed(places)] == drawn[::-1]
    assert [other.at(*place, progress=0.5) for place in places] != drawn
    assert drawn[::2] != drawn[1::2]
