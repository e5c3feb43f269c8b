"""However a stream is cut, every token of every lane is read once and in order, also by a run that stops and resumes.

Segment lengths: the same, or random; the same draws whenever they are asked for.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.config.run import TrainConfig
from transformer_xl.data.labelled import LabelledBatch
from transformer_xl.data.streams import Segment, SegmentStream
from transformer_xl.errors import ConfigError
from transformer_xl.training.feed import Feed, SegmentLengths
from transformer_xl.training.segments import count, divided
from transformer_xl.world import World

CPU = torch.device("cpu")
N_TOKEN, N_LANE, T = 47, 3, 4  # 15 tokens a lane: 3 segments an epoch, and 3 tokens that are not read
STARTS = np.array([0, 5, 6, 20, 31, 46])


def stream(n_token: int = N_TOKEN) -> SegmentStream:
    return SegmentStream(np.arange(n_token), batch_size=N_LANE, tgt_len=T, document_starts=STARTS)


def columns(segments: list[Segment]) -> list[list[list[int]]]:
    """The columns, one after another, of ids, labels and document starts."""
    parts = ("ids", "labels", "document_starts")
    return [torch.cat([getattr(segment, part) for segment in segments], dim=1).int().tolist() for part in parts]


@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=12),
    stops=st.sets(st.integers(0, 11)),
    ahead=st.booleans(),
    n_token=st.integers(N_LANE * T + 1, 60),
)
def test_no_token_is_skipped_or_read_twice(lengths: list[int], stops: set[int], ahead: bool, n_token: int) -> None:
    feed = Feed(stream(n_token), CPU, ahead=ahead)
    read: list[Segment] = []
    for i, length in enumerate(lengths):
        if i in stops:
            state = feed.state_dict()
            feed = Feed(stream(n_token), CPU, ahead=ahead)
            feed.read(3)
            feed.load_state_dict(state)
        new_epoch = feed.starts_epoch
        assert new_epoch == (feed.epochs == int(feed.epochs))
        before = feed.epochs
        segment = feed.read(length)
        assert isinstance(segment, Segment)
        feed.prefetch(2 * T)
        read.append(segment)
        assert feed.epochs - before == pytest.approx(segment.ids.shape[1] / T / stream(n_token).segments_per_epoch)
        assert segment.ids.shape[1] == length or feed.starts_epoch  # short only where an epoch ends
        assert int(before) == int(feed.epochs - 1e-9)  # and none goes beyond it
    total = sum(segment.ids.shape[1] for segment in read)
    plain = stream(n_token)
    expected = columns([next(plain) for _ in range(-(-total // T))])
    assert columns(read) == [[row[:total] for row in part] for part in expected]


def test_what_was_read_ahead_is_not_part_of_the_state() -> None:
    ahead, plain = Feed(stream(), CPU, ahead=True), Feed(stream(), CPU)
    for length in (4, 4, 3, 4, 4):
        assert ahead.read(length).ids.equal(plain.read(length).ids)
        ahead.prefetch(9)
        assert ahead.state_dict() == plain.state_dict()
        assert (ahead.epochs, ahead.starts_epoch, ahead.place) == (plain.epochs, plain.starts_epoch, plain.place)


def test_reading_ahead_reads_ahead_and_on_a_cpu_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    following = SegmentStream.__next__

    def counted(self: SegmentStream) -> Segment:
        reads.append(self.position)
        return following(self)

    monkeypatch.setattr(SegmentStream, "__next__", counted)
    ahead = Feed(stream(), CPU, ahead=True)
    ahead.prefetch(T)
    ahead.prefetch(T)
    assert reads == [0]
    ahead.prefetch(T + 1)
    assert reads == [0, 1]
    ahead.read(T + 1)
    ahead.prefetch(T - 1)
    assert reads == [0, 1]
    ahead.prefetch(T)  # a token of what waits was given
    assert reads == [0, 1, 2]
    ahead.read(T - 1)
    ahead.read(T)
    assert reads == [0, 1, 2]
    Feed(stream(), CPU).prefetch(T)
    assert reads == [0, 1, 2]


def test_fixed_lengths_are_the_segments_of_the_stream_unchanged() -> None:
    feed, plain = Feed(stream(), CPU), stream()
    for _ in range(7):
        segment, expected = feed.read(T), next(plain)
        assert segment.ids.equal(expected.ids) and segment.ids.is_contiguous()
        assert feed.state_dict() == {"stream": plain.state_dict(), "offset": 0}


@pytest.mark.parametrize("offset", [-1, T, 99])
def test_a_damaged_position_is_refused(offset: int) -> None:
    feed = Feed(stream(), CPU)
    with pytest.raises(ConfigError, match=rf"token {offset} of a segment of 4\) is damaged; restore an older checkpoint"):
        feed.load_state_dict({"stream": stream().state_dict(), "offset": offset})


def lengths(**changes: Any) -> SegmentLengths:
    values: dict[str, Any] = {"tgt_len": 40, "max_steps": 100}
    return SegmentLengths(TrainConfig(**values | changes))


def test_without_options_every_segment_has_tgt_len() -> None:
    always = lengths()
    assert {always.at(step, index) for step in range(100) for index in range(2)} == {40}
    assert always.longest == 40


def test_random_lengths_are_those_of_the_authors_varlen() -> None:
    random = lengths(varlen=True, tgt_len=80)
    drawn = [random.at(step, 0) for step in range(20_000)]
    long, short = ([length for length in drawn if (length > 60) == kind] for kind in (True, False))  # 4 deviations from both
    assert len(long) / len(drawn) == pytest.approx(0.95, abs=0.005)
    for some, mean in ((long, 79.5), (short, 39.5)):  # the authors round down
        assert sum(some) / len(some) == pytest.approx(mean, abs=0.2)
        assert (sum((length - mean) ** 2 for length in some) / len(some)) ** 0.5 == pytest.approx(5, abs=0.3)
    assert max(drawn) == 95 == random.longest


def test_no_random_length_is_below_5() -> None:
    drawn = {lengths(tgt_len=8, varlen=True).at(step, 0) for step in range(1000)}
    assert min(drawn) == 5


def test_draws_depend_on_seed_step_and_index_alone() -> None:
    one, again, other = lengths(varlen=True), lengths(varlen=True), lengths(varlen=True, seed=1)
    places = [(step, index) for step in range(40) for index in range(2)]
    drawn = [one.at(*place) for place in places]
    assert [again.at(*place) for place in reversed(places)] == drawn[::-1]
    assert [other.at(*place) for place in places] != drawn
    assert drawn[::2] != drawn[1::2]


def batch(length: int, labels: torch.Tensor, n_pad: list[int]) -> LabelledBatch:
    ids = torch.arange(len(n_pad) * length).view(len(n_pad), length)
    return LabelledBatch(ids, torch.tensor(n_pad), torch.zeros_like(ids), labels, torch.ones_like(ids, dtype=torch.bool))


@pytest.mark.parametrize(
    ("labels", "n_scored"),
    [
        (torch.tensor([1, -100, 0]), 2),
        (torch.tensor([math.nan, 0.5, math.nan]), 1),
        (torch.tensor([[0.0, 1.0], [math.nan, math.nan], [0.0, 0.0]]), 2),
        (torch.tensor([[1, 2, 0], [-100, -100, -100], [4, 4, 1]]), 2),
    ],
)
def test_rows_without_a_label_are_not_counted(labels: torch.Tensor, n_scored: int) -> None:
    """The last batch of an epoch is filled up with such rows, and a mean over them would be another loss."""
    config = TrainConfig(max_steps=1)
    assert count([batch(5, labels, [0, 2, 4])], config, World()) == (9, n_scored)
    first, second, third = divided(batch(5, labels, [0, 2, 4]), 3)
    assert [count([part], config, World())[0] for part in (first, second, third)] == [5, 3, 1]


def test_texts_are_read_whole_and_one_batch_ahead() -> None:
    class Texts:
        epoch, segments_per_epoch, starts_epoch = 0, 9, False
        position = 0

        def __next__(self) -> LabelledBatch:
            self.position += 1
            return batch(self.position, torch.tensor([1, 0]), [0, 0])

        def state_dict(self) -> dict[str, int]:
            return {"epoch": 0, "segment": self.position}

    texts: Any = Texts()
    feed = Feed(texts, CPU, ahead=True)
    for length in (1, 2, 3):
        assert feed.read(512).ids.shape == (2, length)
        feed.prefetch(512)
        assert texts.position == length + 1
        assert feed.state_dict() == {"stream": {"epoch": 0, "segment": length}, "offset": 0}
