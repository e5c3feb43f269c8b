"""However a stream is cut, every token of every lane is read once and in order, also by a run that stops and resumes.

Segment lengths: the same, or random; the same draws whenever they are asked for.
"""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.batch import Batch, Rows, TaskRows
from transformer_xl.config.run import TrainConfig
from transformer_xl.data.streams import SegmentStream
from transformer_xl.errors import ConfigError
from transformer_xl.training import feed as feed_module
from transformer_xl.training.feed import Feed, longest_segment, segment_length

N_TOKEN, N_LANE, T = 47, 3, 4  # 15 tokens a lane: 3 segments an epoch, and 3 tokens that are not read
STARTS = np.array([0, 5, 6, 20, 31, 46])


def stream(n_token: int = N_TOKEN) -> SegmentStream:
    return SegmentStream(np.arange(n_token), batch_size=N_LANE, tgt_len=T, document_starts=STARTS, resets=True)


def feed(n_token: int = N_TOKEN, *, ahead: bool = False, **changes: Any) -> Feed:
    values: dict[str, Any] = {"tgt_len": T, "max_steps": 9}
    return Feed(stream(n_token), TrainConfig(**values | changes), ahead=ahead)


def columns(segments: list[Batch]) -> list[list[list[int]]]:
    """The columns, one after another, of ids, labels and document starts."""
    return [torch.cat(same, dim=1).int().tolist() for same in zip(*(segment.tensors for segment in segments), strict=True)]


@given(
    lengths=st.lists(st.lists(st.integers(1, 17), min_size=3, max_size=3), min_size=1, max_size=8),
    stops=st.sets(st.integers(0, 7)),
    ahead=st.booleans(),
    n_segment=st.integers(1, 3),
    n_token=st.integers(N_LANE * T + 1, 60),
)
def test_no_token_is_skipped_or_read_twice(
    lengths: list[list[int]], stops: set[int], ahead: bool, n_segment: int, n_token: int
) -> None:
    """Segments are short only where an epoch ends, where a step ends too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "segment_length", lambda config, step, index: lengths[step % len(lengths)][index])
        own, read = feed(n_token, ahead=ahead, tbptt_segments=n_segment), []
        n_lane = stream(n_token).segments_per_epoch * T
        for step in range(len(lengths)):
            if step in stops:
                state = own.state_dict()
                own = feed(n_token, ahead=ahead, tbptt_segments=n_segment)
                own.read(0)
                own.prefetch(1)
                own.load_state_dict(json.loads(json.dumps(state)))
            before = own.place
            assert before.starts_epoch == (before.epochs == int(before.epochs))
            segments = own.read(step)
            own.prefetch(step + 1)
            begun = round(before.epochs % 1 * n_lane)
            for i, segment in enumerate(segments):
                begun += segment.ids.shape[1]
                assert segment.ids.shape[1] == lengths[step][i] or begun == n_lane
                assert begun <= n_lane
            assert len(segments) == n_segment or begun == n_lane
            assert own.place.epochs == pytest.approx(before.epoch + begun / n_lane)
            assert (own.place.epoch, own.place.position) == divmod(before.epoch * n_lane // T + begun // T, n_lane // T)
            read += segments
    total = sum(segment.ids.shape[1] for segment in read)
    plain = stream(n_token)
    expected = columns([next(plain) for _ in range(-(-total // T))])
    assert columns(read) == [[row[:total] for row in part] for part in expected]


def test_reading_ahead_reads_one_step_ahead_and_on_a_cpu_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    following = SegmentStream.read

    def counted(self: SegmentStream, tgt_len: int | None = None) -> Batch:
        reads.append(self.position)
        return following(self, tgt_len)

    monkeypatch.setattr(SegmentStream, "read", counted)
    ahead = feed(ahead=True)
    ahead.prefetch(0)
    ahead.prefetch(0)
    assert reads == [0]
    assert ahead.place == feed().place
    ahead.read(0)
    assert reads == [0]
    ahead.read(1)
    assert reads == [0, 1]
    feed().prefetch(0)
    assert reads == [0, 1]


@pytest.mark.parametrize("read", [-1, 3 * T, 99])
def test_a_damaged_position_is_refused(read: int) -> None:
    state = {"stream": {**stream().state_dict(), "read": read}}
    with pytest.raises(
        ConfigError, match=rf"epoch 0, segment {read / T:g}\) lies outside the text of 3 segments; restore an older"
    ):
        feed().load_state_dict(state)


def config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"tgt_len": 40, "max_steps": 100}
    return TrainConfig(**values | changes)


def test_random_lengths_are_those_of_the_authors_varlen() -> None:
    random = config(varlen=True, tgt_len=80)
    drawn = [segment_length(random, step, 0) for step in range(20_000)]
    long, short = ([length for length in drawn if (length > 60) == kind] for kind in (True, False))  # 4 deviations from both
    assert len(long) / len(drawn) == pytest.approx(0.95, abs=0.005)
    for some, mean in ((long, 79.5), (short, 39.5)):  # the authors round down
        assert sum(some) / len(some) == pytest.approx(mean, abs=0.2)
        assert (sum((length - mean) ** 2 for length in some) / len(some)) ** 0.5 == pytest.approx(5, abs=0.3)
    assert max(drawn) == 95 == longest_segment(random)


def test_no_random_length_is_below_5() -> None:
    drawn = {segment_length(config(tgt_len=8, varlen=True), step, 0) for step in range(1000)}
    assert min(drawn) == 5


def test_draws_depend_on_seed_step_and_index_alone() -> None:
    one, other = config(varlen=True), config(varlen=True, seed=1)
    places = [(step, index) for step in range(40) for index in range(2)]
    drawn = [segment_length(one, *place) for place in places]
    assert [segment_length(one, *place) for place in reversed(places)] == drawn[::-1]
    assert [segment_length(other, *place) for place in places] != drawn
    assert drawn[::2] != drawn[1::2]


@pytest.mark.parametrize(
    ("labels", "n_scored", "n_label"),
    [
        (torch.tensor([1, -100, 0]), 2, 2),
        (torch.tensor([math.nan, 0.5, math.nan]), 1, 1),
        (torch.tensor([[0.0, 1.0], [math.nan, math.nan], [0.0, 0.0]]), 2, 4),
        (torch.tensor([[1, 2, 0], [-100, -100, -100], [4, -100, 1]]), 1, 5),
    ],
)
def test_rows_without_a_label_are_not_counted(labels: torch.Tensor, n_scored: int, n_label: int) -> None:
    """The last batch of an epoch is filled up with such rows, and a mean over them would be another loss."""
    batch = Batch(torch.arange(15).view(3, 5), labels, Rows(n_pad=torch.tensor([0, 2, 4])), per_row=True)
    assert (batch.n_read, batch.n_scored, replace(batch, per_row=False).n_scored) == (9, n_scored, n_label)
    assert [part.n_read for part in batch.split(3)] == [5, 3, 1]
    assert [part.n_read for part in batch.split(2)] == [5, 4]
    of_task = replace(batch, extra=TaskRows(batch.ids, batch.ids > 0))
    missing = labels.isnan() if labels.is_floating_point() else labels == -100
    filled_up = missing.view(3, -1).all(1).tolist()
    assert of_task.n_read == sum(n for n, fills in zip((5, 3, 1), filled_up, strict=True) if not fills), "read for nothing"


def test_half_a_segment_is_learned_from_however_long_it_is() -> None:
    batches = SegmentStream(np.arange(40), batch_size=2, tgt_len=6, later_half=True)
    for length in (6, 5, 1):
        batch = batches.read(length)
        assert ((batch.labels >= 0) == (torch.arange(length) >= length // 2)).all()
        assert batch.n_scored == 2 * (length - length // 2)
