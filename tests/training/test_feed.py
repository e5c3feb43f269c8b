"""However a stream is cut, every token of every lane is read once and in order, also by a run that stops and resumes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.streams import Segment, SegmentStream
from transformer_xl.errors import ConfigError
from transformer_xl.training.feed import Feed

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
