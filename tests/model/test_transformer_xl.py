"""A Transformer-XL reads segment by segment; padding, documents and rows of mixed age see only their own text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_close, examples, tiny_model, tokens
from transformer_xl.batch import Rows
from transformer_xl.model.memory import Mems

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("changes", [{}, {"same_length": True}, {"pre_lnorm": True, "clamp_len": 2}])
def test_empty_memory_contributes_nothing_whatever_its_length(changes):
    model = tiny_model(**changes)
    ids = tokens(2, 4)
    grown = model(ids)
    fixed = model(ids, mems=model.init_mems(2))
    assert grown.mems.length == 4 and fixed.mems.length == model.mem_len
    assert_close("logits", fixed.logits, grown.logits, 1e-12)
    assert fixed.mems.n_valid.tolist() == [4, 4]
    again = tokens(2, 3)
    assert_close("next logits", model(again, mems=fixed.mems).logits, model(again, mems=grown.mems).logits, 1e-12)


def test_shapes_stay_constant_from_the_first_segment_on():
    model = tiny_model()
    mems = model.init_mems(2)
    for T in (1, 3, 9):
        mems = model(tokens(2, T), mems=mems).mems
        assert [h.shape for h in mems.hidden] == [(2, 5, 10)] * 2
    assert mems.n_valid.tolist() == [5, 5]


def test_stale_places_are_never_read():
    model = tiny_model()
    mems = model(tokens(2, 3), mems=model.init_mems(2)).mems
    poisoned = Mems(tuple(h.clone() for h in mems.hidden), mems.n_valid)
    for h in poisoned.hidden:
        h[:, :2] = 1e6
    ids = tokens(2, 4)
    assert torch.equal(model(ids, mems=poisoned).logits, model(ids, mems=mems).logits)


KINDS = [
    {},
    {"zero_first_memory": True},
    {"attention": "shaw", "max_klen": 7},
    {"attention": "vaswani"},
    {"attention": "al_rfou", "max_klen": 7, "n_head": 2, "d_head": 5},
    {"shift": "averages", "d_model": 16, "pre_lnorm": True},
    {"ngram_rows": (40,)},
    {"ngram_rows": (40, 50, 60), "shift": "averages", "d_model": 16},
    {"attention": "shaw", "max_klen": 7, "shift": "averages", "d_model": 16},
    {"attention": "rotary"},
    {"attention": "alibi"},
]


@settings(max_examples=examples(60))
@given(data=st.data())
def test_left_padded_rows_read_as_if_alone(data):
    """Rows are fed different numbers of tokens, call after call; each must equal the row fed alone without padding."""
    kind = data.draw(st.sampled_from(KINDS))
    clamp_len = None if kind.get("attention") == "rotary" else data.draw(st.sampled_from([None, 2]))
    model = tiny_model(**{"mem_len": data.draw(st.integers(0, 6)), "clamp_len": clamp_len, **kind})
    B = 3
    length = None if model.config.zero_first_memory else 0
    mems, alone = model.init_mems(B), [model.init_mems(1, length=length) for _ in range(B)]
    for _ in range(data.draw(st.integers(1, 3))):
        lengths = data.draw(st.lists(st.integers(1, 5), min_size=B, max_size=B))
        T = max(lengths)
        ids = tokens(B, T)
        n_pad = T - torch.tensor(lengths)
        out = model(ids, mems=mems, rows=Rows(n_pad=n_pad))
        assert torch.isfinite(out.logits).all()
        mems = out.mems
        for row, length in enumerate(lengths):
            single = model(ids[row : row + 1, T - length :], mems=alone[row])
            alone[row] = single.mems
            assert_close("logits", out.logits[row, T - length :], single.logits[0], 1e-12)
            assert int(mems.n_valid[row]) == int(alone[row].n_valid[0])


def test_the_oldest_key_of_a_memory_that_grows_looks_back_to_nothing():
    """Where padding moves memory up, copies of its oldest state fill the places before it."""
    model, ids = tiny_model(mem_len=6, shift="averages", d_model=16), tokens(2, 9)
    mems = model(ids[:, :4]).mems
    padded = model(ids[:, 4:], mems=mems, rows=Rows(n_pad=torch.tensor([0, 3])))
    alone = model(ids[1:, 7:], mems=mems.select(slice(1, 2)))
    assert_close("logits", padded.logits[1, 3:], alone.logits[0], 1e-12)


@settings(max_examples=examples(30))
@given(data=st.data())
def test_documents_inside_a_segment_see_only_themselves(data):
    """One lane with borders anywhere equals each document read by itself with the same segment borders."""
    others = [{"attention": "rotary"}, {"attention": "alibi"}, {"shift": "averages", "d_model": 16, "pre_lnorm": True}]
    others += [{"shift": "averages", "d_model": 16}, {"ngram_rows": (40, 50)}]
    kind = data.draw(st.sampled_from([{}, {"attention": "shaw", "max_klen": 5}, *others]))
    model = tiny_model(**{"mem_len": 4, "same_length": data.draw(st.booleans()), **kind})
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    T = data.draw(st.integers(1, 6))
    ids = tokens(1, sum(lengths))
    starts = torch.zeros(1, sum(lengths), dtype=torch.bool)
    starts[0, torch.tensor([0, *lengths]).cumsum(0)[:-1]] = True
    mems, logits = model.init_mems(1), []
    for at in range(0, sum(lengths), T):
        out = model(ids[:, at : at + T], mems=mems, rows=Rows(document_starts=starts[:, at : at + T]))
        mems = out.mems
        logits.append(out.logits)
    logits = torch.cat(logits, dim=1)
    begin = 0
    for length in lengths:
        own, at = None, begin
        while at < begin + length:  # the same segment borders, so that memory is cut at the same places
            end = min(begin + length, (at // T + 1) * T)
            out = model(ids[:, at:end], mems=own)
            assert_close("document", logits[:, at:end], out.logits, 1e-12)
            own, at = out.mems, end
        begin += length


@pytest.mark.parametrize("changes", [{}, {"shift": "averages", "d_model": 16}, {"ngram_rows": (40, 50)}])
@pytest.mark.parametrize("mem_len", [7, 30])
def test_segment_size_does_not_matter_while_memory_holds_everything(mem_len, changes):
    model = tiny_model(mem_len=30, **changes)
    ids = tokens(2, 20)
    whole = model(ids).logits
    mems, parts = model.init_mems(2), []
    for chunk in ids.split(mem_len % 8, dim=1):
        out = model(chunk, mems=mems)
        mems = out.mems
        parts.append(out.logits)
    assert_close("logits", torch.cat(parts, dim=1), whole, 1e-12)


def test_no_gradient_flows_into_memory():
    model = tiny_model()
    first = model(tokens(2, 4))
    assert not any(h.requires_grad for h in first.mems.hidden)


def test_the_future_changes_nothing():
    model = tiny_model()
    ids = tokens(1, 6)
    changed = ids.clone()
    changed[0, 4] = (ids[0, 4] + 1) % 13
    before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.equal(before[:, 4:], after[:, 4:])
