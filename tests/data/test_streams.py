import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.streams import SegmentStream
from transformer_xl.errors import ConfigError, CorpusError

LAYOUTS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(0, 60))


def _stream(n_tokens: int, **layout) -> SegmentStream:
    return SegmentStream(np.arange(n_tokens, dtype=np.uint16), **layout)


def test_lanes_follow_the_text() -> None:
    stream = _stream(25, batch_size=2, tgt_len=5)  # 12 tokens a lane, 2 dropped
    assert stream.segments_per_epoch == 2
    assert stream.tokens_per_step == 10
    first, second, third = next(stream), next(stream), next(stream)
    assert first.ids.tolist() == [[0, 1, 2, 3, 4], [12, 13, 14, 15, 16]]
    assert second.ids.tolist() == [[5, 6, 7, 8, 9], [17, 18, 19, 20, 21]]
    assert second.labels.tolist() == [[6, 7, 8, 9, 10], [18, 19, 20, 21, 22]]
    assert torch.equal(third.ids, first.ids)
    assert first.ids.dtype == first.labels.dtype == torch.int64
    assert first.document_starts.dtype == torch.bool


@given(LAYOUTS, st.lists(st.integers(0, 100), unique=True).map(sorted))
def test_any_world_size_reads_the_same(layout, documents) -> None:
    lanes_per_rank, world_size, tgt_len, extra = layout
    batch_size = lanes_per_rank * world_size
    n_tokens = batch_size * tgt_len + 1 + extra
    starts = np.array(documents, np.int64)
    options = {"batch_size": batch_size, "tgt_len": tgt_len, "document_starts": starts}
    whole = _stream(n_tokens, **options)
    ranks = [_stream(n_tokens, **options, rank=rank, world_size=world_size) for rank in range(world_size)]
    n = (n_tokens - 1) // batch_size
    for step in range(2 * whole.segments_per_epoch + 1):
        assert whole.starts_epoch == (step % whole.segments_per_epoch == 0)
        assert (whole.epoch, whole.position) == divmod(step, whole.segments_per_epoch)
        segment, parts = next(whole), [next(rank) for rank in ranks]
        for name in ("ids", "labels", "document_starts"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(segment, name))
        begin = torch.arange(batch_size)[:, None] * n + step % whole.segments_per_epoch * tgt_len
        assert torch.equal(segment.ids, begin + torch.arange(tgt_len))
        assert torch.equal(segment.labels, segment.ids + 1)
        assert torch.equal(segment.document_starts, torch.isin(segment.ids, torch.from_numpy(starts)))


@given(LAYOUTS, st.integers(0, 20))
def test_resuming_continues_exactly(layout, steps: int) -> None:
    lanes_per_rank, world_size, tgt_len, extra = layout
    batch_size = lanes_per_rank * world_size
    n_tokens = batch_size * tgt_len + 1 + extra
    stream = _stream(n_tokens, batch_size=batch_size, tgt_len=tgt_len)
    for _ in range(steps):
        next(stream)
    resumed = _stream(n_tokens, batch_size=batch_size, tgt_len=tgt_len)
    resumed.load_state_dict(stream.state_dict())
    assert (resumed.epoch, resumed.position) == (stream.epoch, stream.position)
    assert torch.equal(next(resumed).ids, next(stream).ids)


@pytest.mark.parametrize(("name", "value"), [("n_tokens", 101), ("batch_size", 2), ("tgt_len", 4)])
def test_state_of_another_layout(name: str, value: int) -> None:
    layout = {"n_tokens": 100, "batch_size": 4, "tgt_len": 5}
    state = _stream(**layout).state_dict()
    with pytest.raises(ConfigError, match=rf"saved position belongs to {name} {layout[name]}, not {value}; resume with"):
        _stream(**{**layout, name: value}).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"saved position \(epoch 0, segment 99\) lies outside"):
        _stream(**layout).load_state_dict({**state, "segment": 99})


def test_errors() -> None:
    with pytest.raises(CorpusError, match=r"10 tokens, but 4 lanes of 5 tokens need 21; use a smaller train.batch_size"):
        _stream(10, batch_size=4, tgt_len=5)
    with pytest.raises(CorpusError, match=r"text too short: 0 tokens"):
        _stream(0, batch_size=1, tgt_len=1)
    with pytest.raises(ConfigError, match=r"world_size \(3\) must divide train.batch_size \(4\)"):
        _stream(100, batch_size=4, tgt_len=5, world_size=3)
    with pytest.raises(ConfigError, match=r"exceed rank"):
        _stream(100, batch_size=4, tgt_len=5, rank=2, world_size=2)
    with pytest.raises(ConfigError, match=r"must be at least 1"):
        _stream(100, batch_size=0, tgt_len=5)


def test_one_token_per_lane_is_enough() -> None:
    segment = next(_stream(4, batch_size=3, tgt_len=1))
    assert segment.ids.tolist() == [[0], [1], [2]]
    assert segment.labels.tolist() == [[1], [2], [3]]


def test_memory_maps_are_read_only_where_needed(tmp_path) -> None:
    path = tmp_path / "ids.bin"
    np.arange(1000, dtype="<u4").tofile(path)
    stream = SegmentStream(np.memmap(path, "<u4", "r"), batch_size=2, tgt_len=7)
    assert next(stream).ids[1].tolist() == list(range(499, 506))
