import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.order_cases import documents
from transformer_xl.data.streams import SegmentStream
from transformer_xl.errors import ConfigError, CorpusError

LAYOUTS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(0, 60))


def _stream(n_tokens: int, **layout) -> SegmentStream:
    return SegmentStream(np.arange(n_tokens, dtype=np.uint16), **layout)


@given(LAYOUTS, st.lists(st.integers(0, 100), unique=True).map(sorted))
def test_any_world_size_reads_the_same(layout, begins) -> None:
    lanes_per_rank, world_size, tgt_len, extra = layout
    batch_size = lanes_per_rank * world_size
    n_tokens = batch_size * tgt_len + 1 + extra
    starts = np.array(begins, np.int64)
    options = {"batch_size": batch_size, "tgt_len": tgt_len, "document_starts": starts, "resets": True}
    whole = _stream(n_tokens, **options)
    ranks = [_stream(n_tokens, **options, rank=rank, world_size=world_size) for rank in range(world_size)]
    n = (n_tokens - 1) // batch_size
    for step in range(2 * whole.segments_per_epoch + 1):
        assert whole.starts_epoch == (step % whole.segments_per_epoch == 0)
        assert (whole.epoch, whole.position) == divmod(step, whole.segments_per_epoch)
        segment, parts = next(whole), [next(rank) for rank in ranks]
        for same, tensor in zip(zip(*(part.tensors for part in parts), strict=True), segment.tensors, strict=True):
            assert torch.equal(torch.cat(same), tensor)
        begin = torch.arange(batch_size)[:, None] * n + step % whole.segments_per_epoch * tgt_len
        assert torch.equal(segment.ids, begin + torch.arange(tgt_len))
        assert torch.equal(segment.labels, segment.ids + 1)
        assert segment.tensors[2].equal(torch.isin(segment.ids, torch.from_numpy(starts)))


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"n_tokens": 101}, "n_tokens 100, not 101"),
        ({"batch_size": 4}, "batch_size 2, not 4"),
        ({"tgt_len": 4}, "tgt_len 5, not 4"),
        ({"shuffle": "none"}, "shuffle documents, not none"),
        ({"seed": 2}, "seed 1, not 2"),
        ({"document_starts": np.array([0])}, "n_documents 2, not 1"),
    ],
)
def test_a_position_of_another_layout_is_refused(now, message: str) -> None:
    layout = {"n_tokens": 100, "batch_size": 2, "tgt_len": 5, "document_starts": np.array([0, 10])}
    layout |= {"shuffle": "documents", "seed": 1}
    state = _stream(**layout).state_dict()
    with pytest.raises(ConfigError, match=f"saved position belongs to {message}; resume with"):
        _stream(**layout | now).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"saved position \(epoch 0, segment 99\) lies outside"):
        _stream(**layout).load_state_dict({**state, "read": 5 * 99})


def test_errors() -> None:
    with pytest.raises(
        CorpusError, match=r"10 tokens, and 21 are needed, for train.batch_size \(4\) pieces of train.tgt_len \(5\)"
    ):
        _stream(10, batch_size=4, tgt_len=5)
    with pytest.raises(ConfigError, match=r"world_size \(3\) must divide train.batch_size \(4\).*use train.batch_size=3 or 6$"):
        _stream(100, batch_size=4, tgt_len=5, world_size=3)


LENGTHS = st.lists(st.integers(1, 9), min_size=12, max_size=40)


def _epoch(stream: SegmentStream) -> torch.Tensor:
    """Return the ids of one epoch, (B, tokens)."""
    return torch.cat([next(stream).ids for _ in range(stream.segments_per_epoch)], dim=1)


@given(LENGTHS, st.integers(0, 5))
def test_each_epoch_reads_every_document_whole_in_an_order_of_its_own(lengths, seed: int) -> None:
    ids, starts = documents(lengths)
    stream = SegmentStream(
        np.append(ids, 0), batch_size=1, tgt_len=1, document_starts=starts, shuffle="documents", seed=seed, resets=True
    )  # the last document is longer by one, because the last token of any document may be the one that is never an input
    orders = []
    for _ in range(3):
        steps = [next(stream) for _ in range(stream.segments_per_epoch)]
        tokens = [int(step.ids) for step in steps] + [int(steps[-1].labels)]
        assert [int(step.labels) for step in steps] == tokens[1:]
        assert sorted(tokens) == sorted([*ids.tolist(), 0])
        begins = [i for i, step in enumerate(steps) if bool(step.rows.document_starts)]
        order = [tokens[i] // 100 for i in begins]
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
            document = tokens[begin] // 100
            assert tokens[begin:end][: lengths[document]] == [100 * document + i for i in range(lengths[document])]
        assert len(set(order)) == len(order) >= len(lengths) - 1  # a document of length 1 may be the very last label
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]


@given(LENGTHS, st.integers(0, 60), st.sampled_from(["none", "documents"]))
def test_resuming_continues_exactly(lengths, steps: int, shuffle) -> None:
    ids, starts = documents(lengths)
    options = {"batch_size": 2, "tgt_len": 2, "document_starts": starts, "shuffle": shuffle, "seed": 1, "resets": True}
    stream, resumed = SegmentStream(ids, **options), SegmentStream(ids, **options)
    for _ in range(steps):
        next(stream)
    next(resumed)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert (resumed.epoch, resumed.position) == (stream.epoch, stream.position)
    for _ in range(stream.segments_per_epoch + 1):
        assert all(map(torch.equal, next(resumed).tensors, next(stream).tensors))


@pytest.mark.parametrize("shuffle", ["none", "documents"])
def test_only_an_order_belongs_to_a_version_of_numpy(monkeypatch, shuffle) -> None:
    layout = {"batch_size": 2, "tgt_len": 5, "document_starts": np.array([0, 10]), "shuffle": shuffle}
    state = _stream(100, **layout).state_dict()
    monkeypatch.setattr("transformer_xl.data.streams.ORDER", "another one")
    stream = _stream(100, **layout)
    if shuffle == "none":
        stream.load_state_dict(state)
        return
    with pytest.raises(ConfigError, match=r"belongs to order .* of numpy [\d.]+, not another one; resume with that version of"):
        stream.load_state_dict(state)


@given(
    st.lists(st.integers(0, 3), min_size=9, max_size=80),
    st.lists(st.integers(0, 80), unique=True).map(sorted),
    st.sampled_from(["none", "documents"]),
    st.integers(0, 8),
)
def test_only_what_follows_the_first_separator_of_a_document_is_learned(ids, begins, shuffle, n_step: int) -> None:
    """Wherever reading begins, so that a resumed run learns from the same tokens."""
    starts = np.array([begin for begin in begins if begin < len(ids)], np.int64)
    layout = {"batch_size": 2, "tgt_len": 3, "document_starts": starts, "shuffle": shuffle, "resets": True}
    text = np.array(ids, np.uint16)
    plain, answers = SegmentStream(text, **layout), SegmentStream(text, **layout, separator=1)
    epoch = [next(plain) for _ in range(plain.segments_per_epoch)]
    order = plain._epoch_text() if shuffle == "none" else answers._epoch_text()
    whole, new = order.read(0, len(ids))
    learned, answered = np.zeros(len(ids), bool), False
    for place in range(len(ids)):  # of each token, whether the one after it belongs to an answer
        answered = (answered and place not in new) or whole[place] == 1
        learned[place] = answered and place + 1 not in new
    answers.load_state_dict({**answers.state_dict(), "read": n_step % plain.segments_per_epoch * 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_xl.data.streams._LOOK_BACK", 1)
        segment = next(answers)
    expected, first = epoch[n_step % plain.segments_per_epoch], n_step % plain.segments_per_epoch * 3
    assert torch.equal(segment.ids, expected.ids) and torch.equal(segment.tensors[2], expected.tensors[2])
    for lane in range(2):
        begin = lane * ((len(ids) - 1) // 2) + first
        labels = np.where(learned[begin : begin + 3], expected.labels[lane].numpy(), -100)
        assert segment.labels[lane].tolist() == labels.tolist()
