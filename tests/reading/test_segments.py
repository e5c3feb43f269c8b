"""Whatever way a text is cut, every token but the first is predicted once, after the tokens that stand before it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from transformer_xl.batch import NOT_SCORED
from transformer_xl.reading.segments import Cut, Lanes, blocks, segments
from transformer_xl.world import World

TEXT = np.arange(1000, 1400).astype(np.uint16)  # a token tells its place


def predicted(cuts: list[Cut]) -> list[int]:
    """Return the places of all predicted tokens; each follows the token read, and what is padded is neither."""
    places = []
    for cut in cuts:
        assert cut.ids.shape == cut.labels.shape == cut.places.shape
        scored = cut.is_scored
        assert torch.equal(cut.labels[scored], cut.ids[scored] + 1)
        assert torch.equal(cut.ids[scored], cut.places[scored] + 1000)
        assert (cut.labels[~scored] == NOT_SCORED).all()
        assert not scored[:, : cut.n_context].any() and scored[:, cut.n_context].any()
        places += (cut.places[scored] + 1).tolist()
    return sorted(places)


@settings(max_examples=examples(200))
@given(
    n=st.integers(2, 400),
    tgt_len=st.integers(1, 50),
    ext_len=st.integers(0, 20),
    n_lane=st.integers(1, 9),
    size=st.integers(1, 3),
    pad_left=st.booleans(),
)
def test_lanes_of_all_processes_miss_nothing(
    n: int, tgt_len: int, ext_len: int, n_lane: int, size: int, pad_left: bool
) -> None:
    cuts, colds = [], 0
    for rank in range(size):
        lanes = Lanes(TEXT[:n], n_lane, tgt_len=tgt_len, ext_len=ext_len, world=World(rank=rank, size=size))
        colds += lanes.n_cold
        own = list(lanes.segments(pad_left=pad_left)) if lanes.n_lane else []
        assert all(len(cut.ids) == lanes.n_lane and (pad_left or cut.n_pad is None) for cut in own)
        cuts += own
    assert predicted(cuts) == list(range(1, n))
    assert colds == 1


def test_lanes_warm_up_with_what_stands_before_them() -> None:
    lanes = Lanes(TEXT, 3, tgt_len=10, ext_len=4)
    assert (lanes.length, lanes.n_lane, lanes.n_cold) == (140, 3, 1)
    first, second = lanes.before(20)
    assert first.ids.tolist() == [list(range(1000 + b - 24, 1000 + b - 10)) for b in (140, 280)]
    assert second.ids.tolist() == [list(range(1000 + b - 14, 1000 + b)) for b in (140, 280)]
    assert second.labels.tolist() == [[-100] * 4 + list(range(1000 + b - 9, 1000 + b + 1)) for b in (140, 280)]


@settings(max_examples=examples(100))
@given(n=st.integers(2, 400), tgt_len=st.integers(1, 50), ext_len=st.integers(0, 20), rows=st.integers(1, 9))
def test_segments_side_by_side_are_those_of_one_lane(n: int, tgt_len: int, ext_len: int, rows: int) -> None:
    cuts = list(segments(TEXT[:n], tgt_len=tgt_len, ext_len=ext_len, rows=rows))
    assert predicted(cuts) == list(range(1, n))
    assert all(cut.n_pad is None and len(cut.ids) <= rows for cut in cuts)
    one_by_one = [cut.ids for cut in Lanes(TEXT[:n], 1, tgt_len=tgt_len, ext_len=ext_len).segments(pad_left=True)]
    assert [row.tolist() for cut in cuts for row in cut.ids] == [ids[0].tolist() for ids in one_by_one]


@pytest.mark.parametrize(("size", "context", "tgt_len"), [(1, 1, 5), (1, 12, 5), (4, 9, 5), (7, 3, 2), (3, 40, 100)])
def test_windows_read_the_context_and_score_the_block(size: int, context: int, tgt_len: int) -> None:
    starts = np.array([60, 100, 300])
    cuts = list(blocks(TEXT, starts, size=size, context=context, tgt_len=tgt_len))
    read = torch.cat([cut.ids for cut in cuts], dim=1) - 1000
    assert read.tolist() == [list(range(start - context, start + size - 1)) for start in starts]
    labels = torch.cat([cut.labels for cut in cuts], dim=1)
    assert [row[row >= 0].tolist() for row in labels - 1000] == [list(range(start, start + size)) for start in starts]
    assert all(cut.ids.shape[1] == tgt_len for cut in cuts[1:])  # the short one is the first
