import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.given_draws import GivenDraws
from transformer_xl.batch import Batch
from transformer_xl.data import pairs as pairs_module
from transformer_xl.data.pairs import PairStream
from transformer_xl.errors import ConfigError, CorpusError

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens" / "xlnet_data"
V, SEP, CLS, PERIOD = 1000, 1, 2, 3
SIZES = {"batch_size": 4, "tgt_len": 32, "reuse_len": 16, "perm_size": 8, "num_predict": 6}


def _text(n_tokens: int, seed: int = 0) -> np.ndarray:
    """Return different tokens, with a period after every few."""
    ids = np.arange(10, 10 + n_tokens) % (V - 10) + 10
    ids[np.random.default_rng(seed).random(n_tokens) < 0.15] = PERIOD
    return ids.astype(np.uint16)


def _stream(ids: np.ndarray, **changes) -> PairStream:
    ends = np.zeros(V, bool)
    ends[PERIOD] = True
    starts = np.random.default_rng(9).random(V) < 0.8
    return PairStream(ids, **{**SIZES, "word_starts": starts, "sep": SEP, "cls": CLS, "sentence_ends": ends, **changes})


def _same(one: Batch, other: Batch) -> bool:
    return all(map(torch.equal, one.tensors, other.tensors))


def _parts(segment: Batch, row: int, reuse_len: int = 16) -> tuple[list[int], list[int], list[int]]:
    """Return the tokens of the stream, A and B."""
    ids, kinds = segment.ids[row], segment.pairs.segments[row]
    first = int((kinds == 0).sum()) - 1
    assert ids[first] == ids[-2] == SEP
    return ids[:reuse_len].tolist(), ids[reuse_len:first].tolist(), ids[first + 1 : -2].tolist()


@pytest.mark.parametrize("case", json.loads((GOLDENS / "rows.json").read_text()), ids=lambda case: case["name"])
def test_rows_are_those_of_the_original(monkeypatch, case) -> None:
    """Texts, targets and masks of the authors' code; it has the backward rows of a batch behind the forward ones."""
    layout, ends = case["layout"], np.zeros(len(case["word_starts"]), bool)
    ends[case["period"]] = True
    batch_size, n_lane = layout["batch_size"], layout["batch_size"] // (2 if layout["bi_data"] else 1)
    order = [row // 2 + row % 2 * n_lane for row in range(batch_size)] if layout["bi_data"] else range(batch_size)
    given_draws: list[GivenDraws] = []

    def draws(seed: int, purpose: int, *, epoch: int, row: int, step: int) -> GivenDraws:
        given_draws.append(GivenDraws(case["rows"][step * batch_size + order[row]]["draws"]))
        return given_draws[-1]

    monkeypatch.setattr(pairs_module, "Draws", draws)
    options = {name: case[name] for name in ("sep", "cls")}
    stream = PairStream(
        np.array(case["text"]),
        **layout,
        **options,
        word_starts=np.array(case["word_starts"]),
        sentence_ends=ends,
        spans="pieces",
    )
    assert stream.segments_per_epoch == len(case["rows"]) // batch_size
    for step in range(stream.segments_per_epoch):
        segment = next(stream)
        for row in range(batch_size):
            expected = case["rows"][step * batch_size + order[row]]
            assert segment.ids[row].tolist() == expected["ids"]
            assert segment.pairs.segments[row].tolist() == expected["segment_ids"]
            assert bool(segment.pairs.is_random[row]) == expected["is_random"]
            assert bool(segment.pairs.backward[row]) == (layout["bi_data"] and row % 2 == 1)
            padding = layout["num_predict"] - len(expected["targets"])
            assert segment.pairs.order.targets[row].tolist() == expected["targets"] + [layout["tgt_len"] - 1] * padding
            assert segment.labels[row].tolist() == expected["labels"] + [-100] * padding
            hidden = segment.pairs.order.rank[row] >= segment.pairs.order.sees[row][:, None]
            assert np.packbits(hidden.numpy()).tobytes().hex() == expected["perm_mask"]
    assert not any(draws.left for draws in given_draws)


def test_rows_follow_the_text_in_both_directions() -> None:
    ids = np.arange(10, 500).astype(np.uint16)  # 245 tokens a lane
    stream = _stream(ids)
    assert (stream.segments_per_epoch, stream.tokens_per_step) == ((245 - 32) // 16 + 1, 128)
    for step in range(stream.segments_per_epoch):
        segment = next(stream)
        assert {tensor.dtype for tensor in segment.tensors} == {torch.int64, torch.bool}
        assert segment.pairs.backward.tolist() == [False, True, False, True]
        for row in range(4):
            lane = ids[row // 2 * 245 :][:245].tolist()
            lane = lane[::-1] if row % 2 else lane
            tokens, a, b = _parts(segment, row)
            assert tokens + a == lane[16 * step :][: 16 + len(a)]
            assert b == lane[lane.index(b[0]) :][: len(b)]
            assert (len(a) + len(b), len(a) > 0, len(b) > 0) == (13, True, True)
            assert segment.ids[row, -1] == CLS
            assert segment.pairs.segments[row].tolist() == [0] * (17 + len(a)) + [1] * (len(b) + 1) + [2]
            if not segment.pairs.is_random[row]:
                assert b[0] == lane[lane.index(a[-1]) + 1]
    assert stream.starts_epoch
    assert stream.epoch == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 3}, r"train.batch_size \(3\) must be even"),
        ({"reuse_len": 28, "perm_size": 4}, r"model.reuse_len \(28\) must be at most train.tgt_len - 5 \(27\)"),
        ({"batch_size": 32}, "text too short: 500 tokens, but 16 lanes of 32 tokens need 512"),
    ],
)
def test_layouts_that_cannot_be_are_refused(changes, message: str) -> None:
    with pytest.raises((ConfigError, CorpusError), match=message):
        _stream(_text(500), **changes)
    state = _stream(_text(300)).state_dict()
    for name, value in (("bi_data", False), ("reuse_len", 8)):
        with pytest.raises(ConfigError, match=f"saved position belongs to {name} {state[name]}, not {value}"):
            _stream(_text(300), **{name: value}).load_state_dict(state)


def test_a_long_sentence_does_not_hold_b_back() -> None:
    """A text without any sentence end: B is random, and begins anywhere instead of always at the lane's beginning."""
    stream = _stream(np.arange(10, 140), batch_size=2)
    first = set()
    for _ in range(50):
        segment = next(stream)
        assert segment.pairs.is_random.all()
        for row in range(2):
            _, a, b = _parts(segment, row)
            assert (len(a), len(b)) in [(7, 6), *[(13 - n, n) for n in range(1, 6)]]
            first.add(139 - b[0] if row else b[0] - 10)
    assert len(first) > 30
    assert min(first) == 0
    assert max(first) > 115


def test_documents_end_sentences() -> None:
    ids = np.arange(10, 1000)
    starts = np.arange(0, 990, 9)
    stream = _stream(ids, document_starts=starts, batch_size=2)
    for _ in range(25):
        segment = next(stream)
        _, a, b = _parts(segment, 0)
        assert (b[0] - 10) % 9 == 0
        _, a, b = _parts(segment, 1)
        assert (b[0] - 10) % 9 == 8, (a, b)


LAYOUTS = st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 90), st.booleans())


@given(LAYOUTS, st.integers(0, 5), st.sampled_from(["none", "documents"]))
def test_any_world_size_reads_the_same(layout, seed: int, shuffle) -> None:
    rows_per_rank, blocks, world_size, extra, bi_data = layout
    batch_size = rows_per_rank * world_size
    bi_data &= batch_size % 2 == 0
    n_tokens = (batch_size // 2 if bi_data else batch_size) * 8 * (blocks + 1) + extra
    options = {
        "batch_size": batch_size, "tgt_len": 8 * (blocks + 1), "reuse_len": 8, "num_predict": 4, "bi_data": bi_data,
        "seed": seed, "shuffle": shuffle, "document_starts": np.arange(0, n_tokens, 7),
    }  # fmt: skip
    ids = _text(n_tokens)
    whole = _stream(ids, **options)
    ranks = [_stream(ids, **options, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in range(2 * whole.segments_per_epoch + 1):
        assert (whole.epoch, whole.position) == divmod(step, whole.segments_per_epoch)
        segment, parts = next(whole), [next(rank) for rank in ranks]
        for same, tensor in zip(zip(*(part.tensors for part in parts), strict=True), segment.tensors, strict=True):
            assert torch.equal(torch.cat(same), tensor)


@given(st.integers(0, 12), st.booleans(), st.sampled_from(["none", "documents"]))
def test_resuming_continues_exactly(steps: int, fixed: bool, shuffle) -> None:
    ids = _text(300)
    options = {"shuffle": shuffle, "document_starts": np.arange(0, 300, 11), "fixed_draws": fixed, "seed": 4}
    stream, resumed = _stream(ids, **options), _stream(ids, **options)
    for _ in range(steps):
        next(stream)
    next(resumed)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    for _ in range(stream.segments_per_epoch + 1):
        assert _same(next(resumed), next(stream))


def test_draws_are_new_in_each_epoch_unless_they_are_fixed() -> None:
    ids = _text(300)
    epochs = {}
    for fixed in (False, True):
        stream = _stream(ids, fixed_draws=fixed)
        epochs[fixed] = [[next(stream) for _ in range(stream.segments_per_epoch)] for _ in range(2)]
    for first, second, other in zip(*epochs[True], epochs[False][0], strict=True):
        assert _same(first, second)
        assert torch.equal(first.ids[:, :16], other.ids[:, :16])
        assert not torch.equal(first.pairs.order.targets, other.pairs.order.targets)
    assert all(
        not torch.equal(one.pairs.order.targets, two.pairs.order.targets) for one, two in zip(*epochs[False], strict=True)
    )
    assert not torch.equal(next(_stream(ids, seed=1)).pairs.order.targets, epochs[False][0][0].pairs.order.targets)
