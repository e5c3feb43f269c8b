"""A `Reader` with a `KeyValueMemory` computes what the model computes with `Mems`, however text is cut and rows are fed."""

import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import assert_close, examples, threads, tiny_model
from tests.reference.test_equation import KINDS, VARIANTS
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.inference import layer as layer_module
from transformer_xl.inference.buffer import KeyValueMemory
from transformer_xl.inference.layer import SegmentPlaces
from transformer_xl.inference.reader import Reader
from transformer_xl.inference.ways import compiled_functions
from transformer_xl.kernels.device import InferencePrecision
from transformer_xl.kernels.equation import Positions
from transformer_xl.model.attention.block import AttentionKind, Distances
from transformer_xl.model.attention.kinds import ATTENTION
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL

_OF_SOFTMAX = {"cutoffs", "div_val", "d_embed", "tie_weight"}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: options for name, options in VARIANTS.items() if not _OF_SOFTMAX & {*options}},  # test_frozen.py has the others
    "cutoffs, div_val 2": VARIANTS["cutoffs, div_val 2"],
    **{name: options for name, options in KINDS.items() if options["attention"] in ("shaw", "rotary", "alibi")},
    "clamp_len beyond memory": {"clamp_len": 9},
    "gelu, untie_r, same_length besides self": {
        "activation": "gelu",
        "untie_r": True,
        "same_length": True,
        "same_length_besides_self": True,
    },
    "shaw, table as long as memory": {"attention": "shaw", "max_klen": 5, "same_length": True},
    "shaw, no memory": {"attention": "shaw", "max_klen": 5, "mem_len": 0},
    "shaw, zero first memory": {"attention": "shaw", "max_klen": 9, "zero_first_memory": True},
    "averages": {"shift": "averages", "d_model": 16, "pre_lnorm": True, "clamp_len": 3},
    "averages, same_length": {"shift": "averages", "d_model": 16, "same_length": True, "attention": "shaw", "max_klen": 5},
    "pairs to fours": {"ngram_rows": (40, 50, 60)},
    "pairs, averages": {"ngram_rows": (40,), "shift": "averages", "d_model": 16, "pre_lnorm": True},
}


@cache
def model_of(name: str, dtype: torch.dtype, mem_len: int = 5) -> TransformerXL:
    torch.manual_seed(0)
    return tiny_model(**{"mem_len": mem_len, **OPTIONS[name]}).to(dtype)


def tokens(*shape: int, seed: int | None = None) -> Tensor:
    return torch.randint(13, shape, generator=None if seed is None else torch.Generator().manual_seed(seed))


def logits(reader: Reader, h: Tensor) -> Tensor:
    return reader.softmax.logits(h.flatten(0, -2)).unflatten(0, h.shape[:-1])


def expected(model: TransformerXL, ids: Tensor, mems: Mems) -> tuple[Tensor, Mems]:
    with torch.no_grad():
        out = model(ids, mems=mems)
    assert out.logits is not None
    return out.logits, out.mems


class Rows:
    """Rows of a memory, each beside a model that reads that row alone, with hidden states."""

    def __init__(self, model: TransformerXL, *, batch_size: int, tgt_len: int) -> None:
        self.model = model
        self.reader = Reader(model, tgt_len=tgt_len)
        self.memory = self.reader.empty_memory(batch_size)
        self.mems = [model.init_mems(1) for _ in range(batch_size)]

    def read(self, ids: Tensor, tolerance: float, *, rows: slice = slice(None)) -> None:
        actual = logits(self.reader, self.reader.read(ids, self.memory, rows=rows))
        for own, row in enumerate(range(len(self.mems))[rows]):
            right, self.mems[row] = expected(self.model, ids[own : own + 1], self.mems[row])
            assert_close(f"row {row}", actual[own], right[0], tolerance)

    def step(self, ids: Tensor, tolerance: float, *, active: list[bool] | None = None) -> None:
        mask = None if active is None else torch.tensor(active)
        hidden = self.reader.step(ids, self.memory, active=mask)
        assert not hidden.is_inference(), "whoever has it may compute gradients with it"
        actual = logits(self.reader, hidden)
        for row in range(len(self.mems)):
            if active is None or active[row]:
                right, self.mems[row] = expected(self.model, ids[row].view(1, 1), self.mems[row])
                assert_close(f"row {row}", actual[row], right[0, 0], tolerance)

    def reset(self, forget: list[bool]) -> None:
        self.reader.reset(self.memory, torch.tensor(forget))
        for row, forgets in enumerate(forget):
            self.mems[row] = self.model.init_mems(1) if forgets else self.mems[row]


# against the model


@pytest.mark.parametrize("name", OPTIONS)
def test_segments_and_steps_are_those_of_the_model(name: str) -> None:
    """Growing from nothing, longer and shorter than the memory, single tokens, and around the ring."""
    rows = Rows(model_of(name, torch.float64), batch_size=2, tgt_len=6)
    for T in (1, 3, 6, 6, 5):
        rows.read(tokens(2, T), 1e-10)
        rows.step(tokens(2), 1e-10)
    assert int(rows.memory.end[0]) > rows.reader.n_slot
    assert rows.memory.n_valid.tolist() == [rows.reader.n_slot] * 2, "at most as many as there are slots"


@pytest.mark.parametrize("name", ["paper", "rotary", "rotary, zero first memory", "alibi"])
def test_ten_million_tokens_later_numbers_are_as_right_as_at_the_beginning(name: str) -> None:
    """Rows that stand at different positions are read at once, too; angles in fp32 would be off by a tenth."""
    rows = Rows(model_of(name, torch.float32), batch_size=3, tgt_len=9)
    rows.memory = KeyValueMemory.concatenate([rows.reader.empty_memory(1, end=end) for end in (0, 10_000_000, 40_000_000)])
    for T in (4, 9, 9):
        rows.read(tokens(3, T), 1e-5)
        rows.step(tokens(3), 1e-5)
    assert rows.memory.end.tolist() == [25, 10_000_025, 40_000_025]


@pytest.mark.parametrize(
    ("mem_len", "tgt_len"),
    [(5, 11), (1, 15), (16, 16), (31, 1), (15, 1), (0, 16), (5, 12), (1, 16), (16, 1), (0, 17), (20, 20)],
)
@pytest.mark.parametrize("same_length", [False, True])
def test_rings_are_as_long_as_they_must_be(mem_len: int, tgt_len: int, same_length: bool) -> None:
    """Sizes that fill all slots to the last one, so that the longest segment overwrites all that it may, or one slot more."""
    model = tiny_model(mem_len=mem_len, same_length=same_length and mem_len > 0).double()
    rows = Rows(model, batch_size=1, tgt_len=tgt_len)
    assert 0 <= rows.reader.n_slot - mem_len - tgt_len < max(tgt_len, 16)
    for _ in range(5):
        rows.read(tokens(1, tgt_len), 1e-10)
    rows.step(tokens(1), 1e-10)
    rows.read(tokens(1, tgt_len), 1e-10)


def test_a_window_limits_what_tokens_see_where_training_did_not() -> None:
    """With a window, segments give the numbers of single steps."""
    model = tiny_model().double()
    one, other = (Reader(model, tgt_len=7, window=model.mem_len + 1) for _ in range(2))
    memory, steps = one.empty_memory(2), other.empty_memory(2)
    mems = model.init_mems(2)
    for T in (1, 7, 4, 7, 7):
        ids = tokens(2, T)
        actual = one.read(ids, memory)
        for t in range(T):
            assert_close("step", other.step(ids[:, t], steps), actual[:, t], 1e-10)
            right, mems = expected(model, ids[:, t : t + 1], mems)
            assert_close("model", logits(one, actual[:, t]), right[:, 0], 1e-10)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_rows_fed_in_any_way_read_as_if_alone(data: st.DataObject) -> None:
    """Segments of all rows and of one, steps of some, resets, in any order; each row against a model that reads it alone."""
    name = data.draw(st.sampled_from(sorted(OPTIONS)))
    model = model_of(name, torch.float64)
    model = model.with_context(mem_len=data.draw(st.integers(int(model.same_length), 18)))
    rows = Rows(model, batch_size=3, tgt_len=data.draw(st.integers(1, 12)))
    flags, generator = st.lists(st.booleans(), min_size=3, max_size=3), torch.Generator().manual_seed(7)
    for kind in data.draw(st.lists(st.sampled_from(["read", "row", "step", "steps", "reset"]), max_size=8)):
        T = data.draw(st.integers(1, rows.reader.tgt_len))
        ids = torch.randint(13, (3, T), generator=generator)
        if kind == "reset":
            rows.reset(data.draw(flags))
        elif kind == "steps":
            for t in range(T):
                rows.step(ids[:, t], 1e-10)
        elif kind == "step":
            rows.step(ids[:, 0], 1e-10, active=data.draw(flags))
        elif kind == "read":
            rows.read(ids, 1e-10)
        else:
            row = data.draw(st.integers(0, 2))
            rows.read(ids[:1], 1e-10, rows=slice(row, row + 1))


@pytest.mark.parametrize("name", ["paper", "same_length", "shaw", "rotary", "alibi", "zero first memory"])
def test_a_step_that_rows_sit_out_leaves_them_as_they_were(name: str) -> None:
    """To the last bit, many times, at every slot of the ring."""
    reader = Reader(model_of(name, torch.float32), tgt_len=3)
    sitting, reading = (reader.empty_memory(3) for _ in range(2))
    active = torch.tensor([True, False, True])
    for _ in range(40):
        ids = tokens(3)
        for _ in range(int(tokens(1)) % 3):
            before = sitting.end.clone(), sitting.n_valid.clone()
            reader.step(tokens(3), sitting, active=torch.zeros(3, dtype=torch.bool))
            assert torch.equal(sitting.end, before[0]) and torch.equal(sitting.n_valid, before[1])
        assert torch.equal(reader.step(ids, sitting), reader.step(ids, reading))
        other = tokens(3)
        both = [reader.step(torch.where(active, other, wrong), m, active=active) for m, wrong in ((sitting, 3), (reading, 4))]
        assert torch.equal(both[0][active], both[1][active])
    assert sitting.end.tolist() == reading.end.tolist()
    assert sitting.end[0] - sitting.end[1] == 40


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("n_read", [0, 2, 5, 11, 16, 30])
def test_what_is_out_of_sight_has_no_effect_at_all(n_read: int, window: int | None) -> None:
    """Whatever lies in slots that are older than the window, never written, or written by a row that did not read."""
    reader = Reader(tiny_model(), tgt_len=9, window=window)
    memory = reader.empty_memory(1)
    for token in tokens(n_read):
        reader.step(token.view(1), memory)
    clean, foul = clone(memory), clone(memory)
    seen = min(n_read, reader.mem_len)
    age = (memory.end - 1 - torch.arange(reader.n_slot)) % reader.n_slot
    for keys, values in zip(foul.keys, foul.values, strict=True):
        keys[:, :, age >= seen] = 1e6
        values[..., age >= seen] = 1e6
    ids = tokens(1, 9)
    assert torch.equal(reader.read(ids, clean), reader.read(ids, foul))
    assert torch.equal(reader.step(ids[:, 0], clean), reader.step(ids[:, 0], foul))


def clone(memory: KeyValueMemory) -> KeyValueMemory:
    return KeyValueMemory.concatenate([memory])


def test_segments_too_long_are_refused() -> None:
    reader = Reader(tiny_model(), tgt_len=4)
    memory = reader.empty_memory(2)
    with pytest.raises(ValueError, match=r"5 tokens \(at most 4\) cannot be read at once"):
        reader.read(tokens(2, 5), memory)
    assert memory.end.tolist() == [0, 0]


@pytest.mark.parametrize(
    "options", [{"attention": "vaswani"}, {"attention": "al_rfou", "max_klen": 7, "n_head": 2, "d_head": 5}]
)
def test_models_without_keys_to_keep_are_refused(options: dict[str, Any]) -> None:
    model = tiny_model(**options)
    assert not model.keeps_keys
    with pytest.raises(ConfigError, match=rf"with attention '{model.config.attention}' cannot be kept: they change"):
        Reader(model, tgt_len=4)


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_at_different_slots_are_read_at_once(name: str) -> None:
    """From nothing, around the ring, in short segments and long ones, in some rows and in all."""
    rows = Rows(model_of(name, torch.float64), batch_size=3, tgt_len=6)
    rows.step(tokens(3), 1e-10, active=[False, True, True])
    rows.step(tokens(3), 1e-10, active=[False, True, False])
    assert rows.memory.end.tolist() == [0, 2, 1]
    for i, n in enumerate((6, 6, 1, 5, 6, 3)):
        rows.read(tokens(3 - i % 2, n), 1e-10, rows=slice(i % 2, None))


@pytest.mark.parametrize("n_score", [1, 7 * 16, 2 * 7 * 16, 2 * 5 * 7 * 16])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_heads_and_rows_are_read_one_group_after_another_where_scores_would_be_many(
    together: bool, alike: bool, n_score: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(tiny_model(), batch_size=5, tgt_len=7)
    for _ in range(6):
        rows.step(tokens(5), 1e-5)
    if not alike:
        rows.memory.n_valid.copy_(torch.tensor([6, 0, 3, 5, 1]))
        rows.mems = [Mems(mems.hidden, mems.n_valid.clamp(max=n)) for mems, n in zip(rows.mems, (6, 0, 3, 5, 1), strict=True)]
    if not together:
        rows.step(tokens(5), 1e-5, active=[True, False, True, False, True])
    monkeypatch.setattr(layer_module, "_CACHED_BYTES", n_score * 4)
    groups, sizes = layer_module._groups, list[int]()

    def noted(query: Tensor, n_slot: int) -> Iterator[tuple[slice, slice]]:
        found = list(groups(query, n_slot))
        sizes.extend(query[heads, part].numel() // (7 * query.shape[-1]) for heads, part in found)
        assert sum(sizes) % (5 * query.shape[0]) == 0, "each head of each row once"
        return iter(found)

    def room(places: SegmentPlaces, *size: Any) -> Tensor:
        rooms.add(found_room(places, *size).data_ptr())
        return found_room(places, *size)

    rooms, found_room = set[int](), SegmentPlaces.room
    monkeypatch.setattr(SegmentPlaces, "room", room)
    monkeypatch.setattr(layer_module, "_groups", noted)
    rows.read(tokens(5, 7), 1e-5)
    assert len(rooms) == 1, "memory for scores is allotted once"
    assert max(sizes) <= max(1, n_score // (7 * 16))


# reset


@pytest.mark.parametrize(
    "name", ["paper", "shaw", "zero first memory", "shaw, zero first memory", "rotary", "rotary, zero first memory"]
)
def test_nothing_is_left_of_a_row_that_was_reset(name: str) -> None:
    reader = Reader(model_of(name, torch.float32), tgt_len=4)
    memory, fresh = reader.empty_memory(3), reader.empty_memory(3)
    for _ in range(30):
        reader.step(tokens(3), memory)
    before = clone(memory)
    reader.reset(memory, torch.tensor([False, True, False]))
    for row, like in enumerate((before, fresh, before)):
        for own, right in zip((*memory.keys, *memory.values), (*like.keys, *like.values), strict=True):
            assert torch.equal(own[:, row], right[:, row])
        assert (int(memory.end[row]), int(memory.n_valid[row])) == (int(like.end[row]), int(like.n_valid[row]))
    if not reader.config.zero_first_memory:
        assert all(x[:, 1].count_nonzero() == 0 for x in (*memory.keys, *memory.values))
    else:
        assert int(memory.n_valid[1]) == reader.mem_len


def test_a_row_that_went_wrong_harms_no_other_and_heals_by_a_reset() -> None:
    reader = Reader(tiny_model(cutoffs=(4, 9), div_val=2), tgt_len=4)
    memory, sound = (reader.empty_memory(3) for _ in range(2))
    for _ in range(20):
        ids = tokens(3)
        reader.step(ids, memory)
        reader.step(ids, sound)
    for x in (*memory.keys, *memory.values):
        x[:, 1] = float("nan")
    ids = tokens(3, 4)
    others = torch.tensor([0, 2])
    actual, right = reader.read(ids, memory), reader.read(ids, sound)
    assert actual[1].isnan().all() and torch.equal(actual[others], right[others])
    actual, right = reader.step(ids[:, 0], memory), reader.step(ids[:, 0], sound)
    assert torch.equal(logits(reader, actual)[others], logits(reader, right)[others])
    reader.reset(memory, torch.tensor([False, True, False]))
    healed, fresh = reader.step(ids[:, 0], memory), reader.step(ids[:, 0], reader.empty_memory(3))
    assert torch.equal(healed[1], fresh[1]) and healed.isfinite().all()


# hidden states and back


@pytest.mark.parametrize("name", OPTIONS)
def test_hidden_states_become_keys(name: str) -> None:
    """Rows have different ages; reading on gives the model's numbers after the same hidden states."""
    model = model_of(name, torch.float32)
    parts = [model(tokens(1, n), mems=model.init_mems(1)).mems if n else model.init_mems(1) for n in (0, 2, 30)]
    mems = Mems.concatenate(parts)
    rows = Rows(model, batch_size=3, tgt_len=7)
    rows.memory, rows.mems = rows.reader.from_mems(mems), parts
    for T in (4, 7):
        rows.read(tokens(3, T), 1e-5)
        rows.step(tokens(3), 1e-5)


def test_of_a_longer_memory_the_last_positions_count() -> None:
    model = tiny_model(mem_len=40).double()
    with torch.no_grad():
        mems = model(tokens(2, 40)).mems
    short = model.with_context(mem_len=6)
    rows = Rows(short, batch_size=2, tgt_len=3)
    rows.memory = rows.reader.from_mems(mems)
    last = Mems(tuple(h[:, -6:] for h in mems.hidden), mems.n_valid.clamp(max=6))
    rows.mems = [last.select(slice(row, row + 1)) for row in range(2)]
    rows.read(tokens(2, 3), 1e-10)
    rows.step(tokens(2), 1e-10)


# precisions


TEXT = torch.randint(0, 13, (2, 60), generator=torch.Generator().manual_seed(5))


def loss(model: TransformerXL, precision: InferencePrecision) -> tuple[Reader, float]:
    """Nats per token of a fixed text, single tokens and segments in turn."""
    reader = Reader(model, tgt_len=7, precision=precision)
    memory, hidden = reader.empty_memory(2), []
    for at in range(0, 56, 8):
        hidden += [reader.read(TEXT[:, at : at + 7], memory), reader.step(TEXT[:, at + 7], memory).unsqueeze(1)]
    h = torch.cat(hidden, dim=1)
    nats = reader.softmax.nll(h.flatten(0, 1), TEXT[:, 1:57].flatten())
    return reader, float(nats.mean())


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.005), ("int8", 0.01)])
@pytest.mark.parametrize("name", ["paper", "pre_lnorm", "shaw", "rotary", "alibi", "cutoffs, div_val 2"])
def test_narrower_numbers_cost_little(name: str, precision: InferencePrecision, bound: float) -> None:
    """In nats per token; and the precision is really used, because the losses differ."""
    model = model_of(name, torch.float32)
    full, narrow = loss(model, "fp32")[1], loss(model, precision)[1]
    assert 0 < abs(narrow - full) < bound


class NearAttention(AttentionKind):
    """Keys 8 and more tokens away get 1000 less, as ALiBi's do that are far away in a long memory."""

    name = "near"

    @classmethod
    def positions(cls, config: TransformerXLConfig, learned: Mapping[str, Tensor], distances: Distances) -> list[Positions]:
        b_S1 = torch.where(distances.limited < 8, 0.0, -1000.0).unsqueeze(1)
        return [Positions(b=b_S1.expand(-1, config.n_head))] * config.n_layer


def test_scores_of_near_keys_are_not_rounded_for_the_sake_of_far_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 segments are as near to fp32 as single tokens, which round no scores."""
    monkeypatch.setitem(ATTENTION, "near", NearAttention)
    model, ids = tiny_model(attention="near", clamp_len=8, mem_len=20), tokens(2, 72, seed=0)

    def states(precision: InferencePrecision, *, tgt_len: int) -> Tensor:
        reader = Reader(model, tgt_len=12, precision=precision)
        memory = reader.empty_memory(2)
        if tgt_len == 1:
            return torch.stack([reader.step(token, memory) for token in ids.unbind(1)], dim=1)
        return torch.cat([reader.read(part, memory) for part in ids.split(tgt_len, 1)], dim=1)

    full, segments, steps = states("fp32", tgt_len=12), states("bf16", tgt_len=12), states("bf16", tgt_len=1)
    errors = [(h - full).norm() / full.norm() for h in (segments, steps)]
    assert 0 < errors[0] < 1.5 * errors[1]


def test_precisions_are_those_that_were_asked_for() -> None:
    model = tiny_model()
    expected: dict[InferencePrecision, tuple[torch.dtype, torch.dtype]] = {
        "fp32": (torch.float32, torch.float32),
        "bf16": (torch.bfloat16, torch.bfloat16),
        "int8": (torch.bfloat16, torch.int8),
    }
    for precision, (dtype, weights) in expected.items():
        reader = Reader(model, tgt_len=4, precision=precision)
        memory = reader.empty_memory(1)
        assert {x.dtype for x in (*memory.keys, *memory.values)} == {dtype}
        layer = reader.layers[0]
        assert {m.weight.dtype for m in (layer.qkv, layer.output, layer.inner, layer.outer)} == {weights}
        assert logits(reader, reader.read(tokens(1, 3), memory)).dtype == torch.float32


def test_fp32_stands_for_the_type_of_the_weights() -> None:
    reader = Reader(tiny_model().double(), tgt_len=4)
    memory = reader.empty_memory(2)
    h = reader.step(tokens(2), memory)
    assert {x.dtype for x in (*memory.keys, *memory.values, h, logits(reader, h))} == {torch.float64}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["pre_lnorm, final_norm, gelu", "cutoffs, div_val 2", "shaw", "rotary", "alibi"])
def test_models_whose_weights_are_bf16_are_read_too(name: str, precision: InferencePrecision) -> None:
    """Products are rounded to bf16; hidden states, norms and scores are not, as in the other precisions."""
    full, narrow = loss(model_of(name, torch.float32), "fp32")[1], loss(model_of(name, torch.bfloat16), precision)
    assert 0 < abs(narrow[1] - full) < 0.02
    memory = narrow[0].empty_memory(1)
    assert memory.keys[0].dtype == torch.bfloat16
    assert narrow[0].step(torch.tensor([3]), memory).dtype == torch.float32


def test_weights_are_shared_not_copied() -> None:
    model = tiny_model()
    reader = Reader(model, tgt_len=4)
    qkv = [reader.layers[i].qkv.weight.data_ptr() for i in range(2)]
    assert qkv == [layer.get_parameter("attention.qkv_net.weight").data_ptr() for layer in model.layers]


# compiled


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As users have them: compiled loops are shared between threads."""
    with threads(2):
        yield


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(
    ("precision", "batch_size", "tolerance", "changes"),
    [
        ("int8", 1, 0.05, {"shift": "averages", "d_model": 16, "attention": "rotary"}),
        pytest.param("fp32", 2, 1e-5, {"shift": "averages", "d_model": 16, "ngram_rows": (40, 50)}, marks=pytest.mark.slow),
        pytest.param("bf16", 3, 0.05, {"attention": "rotary"}, marks=pytest.mark.slow),
        pytest.param("fp32", 1, 1e-5, {"attention": "alibi", "shift": "averages", "d_model": 16}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("two_threads")
def test_compiled_steps_are_the_interpreted_ones(
    precision: InferencePrecision, batch_size: int, tolerance: float, changes: dict[str, Any]
) -> None:
    """Around the ring, with rows that do not read. The bounds are wide because compiled products round to bf16 less often."""
    model = tiny_model(vocab_size=29, cutoffs=(11,), **changes)
    compiled, plain = (Reader(model, tgt_len=2, precision=precision) for _ in range(2))
    compiled.compile()
    assert compiled.compiled and not plain.compiled
    memories = compiled.empty_memory(batch_size), plain.empty_memory(batch_size)
    for i in range(25):
        ids = torch.randint(29, (batch_size,))
        active = None if i % 3 else torch.arange(batch_size) != i % batch_size
        h = [reader.step(ids, memory, active=active) for reader, memory in zip((compiled, plain), memories, strict=True)]
        for name, actual, right in zip(("own", "tails"), compiled.head(h[0]), plain.head(h[1]), strict=True):
            assert_close(f"{name} of step {i}", actual, right, tolerance)
    for own, right in zip((*memories[0].keys, *memories[0].values), (*memories[1].keys, *memories[1].values), strict=True):
        assert_close("memory", own.float(), right.float(), tolerance)
    compiled.interpret()
    assert not compiled.compiled
    ids = torch.randint(29, (batch_size,))
    actual, right = (reader.step(ids, clone(memories[1])) for reader in (compiled, plain))
    assert torch.equal(actual, right)


@pytest.fixture
def graphs_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace compiled functions as graphs without turning them into machine code, which takes seconds."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, **options, backend="eager"))
    compiled_functions.cache_clear()
    yield
    compiled_functions.cache_clear()


@pytest.mark.usefixtures("graphs_only")
def test_compiled_shapes_may_be_many() -> None:
    """A process may compile for many sizes and numbers of rows; the library's own limit is eight."""
    model = tiny_model()
    for batch_size in range(1, 10):
        reader = Reader(model, tgt_len=2)
        reader.compile()
        h = reader.step(tokens(batch_size), reader.empty_memory(batch_size))
        assert reader.head(h)[0].shape == (batch_size, 13)


@pytest.mark.usefixtures("graphs_only")
def test_graphs_of_several_rows_compute_the_interpreted_steps() -> None:
    """From two rows on, products are the library's; what a compiler makes of them is tested with a single row."""
    model = tiny_model(shift="averages", d_model=16, n_layer=1)
    compiled, plain = (Reader(model, tgt_len=2) for _ in range(2))
    compiled.compile()
    memories = compiled.empty_memory(3), plain.empty_memory(3)
    for i in range(25):
        ids, active = tokens(3), None if i % 3 else torch.arange(3) != i % 3
        h = [reader.step(ids, memory, active=active) for reader, memory in zip((compiled, plain), memories, strict=True)]
        assert_close(f"step {i}", h[0], h[1], 1e-5)
        assert_close(f"head of step {i}", compiled.head(h[0])[0], plain.head(h[1])[0], 1e-5)
