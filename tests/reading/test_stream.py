"""The three ways to read on give the states of every token, as the model itself has them, and keep rows apart."""

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers import assert_close, tiny_model
from transformer_xl.config.model import LstmConfig, VanillaConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.reading.stream import CarriedState, KeptKeys, ReadAgain, open_stream, scoring

ABSOLUTE = {"attention": "al_rfou", "max_klen": 12, "n_head": 2, "d_head": 5}
KINDS: dict[str, dict[str, Any]] = {
    "transformer_xl": {},
    "zero_first_memory": {"zero_first_memory": True},
    "al_rfou": ABSOLUTE,
    "al_rfou that begins with zeros": {**ABSOLUTE, "zero_first_memory": True},
    "no memory": {"mem_len": 0},
    "averages": {"shift": "averages", "d_model": 16},
    "averages, same_length": {"shift": "averages", "d_model": 16, "same_length": True},
    "pairs": {"ngram_rows": (50,)},
    "pairs and triples after averages": {"ngram_rows": (50, 60), "shift": "averages", "d_model": 16, "mem_len": 7},
    "absolute after a shift": {**ABSOLUTE, "shift": "averages", "d_model": 16, "d_head": 8},
    "lstm": {},
    "vanilla": {},
}
TEXT = torch.tensor([[(5 * i * i + b) % 13 for i in range(24)] for b in range(3)])


@cache
def model_of(kind: str) -> LanguageModel:
    torch.manual_seed(len(kind))
    if kind == "lstm":
        return Lstm(LstmConfig(vocab_size=13, n_layer=2, d_model=10)).eval()
    if kind == "vanilla":
        sizes: dict[str, Any] = {"n_layer": 2, "d_model": 10, "n_head": 2, "d_head": 5, "d_inner": 14}
        return Vanilla(VanillaConfig(vocab_size=13, max_len=12, **sizes)).eval()
    return tiny_model(**KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_read_as_the_model_reads_them(kind: str) -> None:
    model, mems = model_of(kind), None
    stream = open_stream(model, 3, tgt_len=6)
    for ids, labels in zip(TEXT[:, :18].split(6, dim=1), TEXT[:, 1:19].split(6, dim=1), strict=True):
        with torch.no_grad():
            h_BTD, mems_after = model.read(ids, mems=mems)
            out = model(ids, mems=mems, labels=labels)
        mems = mems_after
        states = stream.read(ids)
        assert_close("states", states, h_BTD, 1e-5)
        assert_close("nats", stream.nll(states, labels), out.nll, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_a_segment_is_reading_it_and_looking_at_labels(kind: str) -> None:
    one, other = (open_stream(model_of(kind), 3, tgt_len=6) for _ in range(2))
    labels = TEXT[:, 1:7].clone()
    labels[:, :2] = -100
    for ids in (TEXT[:, :6], TEXT[:, 6:12]):
        assert_close("nats", one.score(ids, labels), other.nll(other.read(ids), labels), 1e-6)
    assert not one.score(TEXT[:, :6], torch.full((3, 6), -100)).any()


@pytest.mark.parametrize("token_by_token", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_was_reset_begins_as_a_new_one(kind: str, token_by_token: bool) -> None:
    used, new = (open_stream(model_of(kind), 3, tgt_len=6, token_by_token=token_by_token) for _ in range(2))
    used.read(TEXT[:, :6])
    used.reset(torch.tensor([True, True, True]))
    assert torch.equal(used.read(TEXT[:, 6:12]), new.read(TEXT[:, 6:12]))


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_it_does_not_matter_how_a_text_is_cut(kind: str) -> None:
    whole, steps, last = (open_stream(model_of(kind), 3, tgt_len=6, token_by_token=True) for _ in range(3))
    text = TEXT[:, :16]
    states = whole.read(text)
    assert states.shape[:2] == text.shape
    for i in range(text.shape[1]):
        assert_close(f"token {i}", steps.step(text[:, i]), states[:, i], 1e-5)
    assert_close("the last", last.advance(text), states[:, -1], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_before_the_others_have_read_nothing(kind: str) -> None:
    grown, new = open_stream(model_of(kind), 2, tgt_len=6), open_stream(model_of(kind), 1, tgt_len=6)
    grown.read(TEXT[1:, :6])
    grown.prepend(1)
    assert grown.together()
    assert_close("the new row", grown.read(TEXT[:, 6:12])[:1], new.read(TEXT[:1, 6:12]), 1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "in_segments", "by_token"),
    [
        ("transformer_xl", {}, KeptKeys, KeptKeys),
        ("transformer_xl", {"ext_len": 2}, CarriedState, ReadAgain),
        ("no memory", {}, KeptKeys, ReadAgain),
        ("al_rfou", {}, CarriedState, ReadAgain),
        ("vanilla", {}, CarriedState, ReadAgain),
        ("lstm", {}, CarriedState, CarriedState),
        ("lstm", {"mem_len": 0}, CarriedState, ReadAgain),
    ],
)
def test_the_model_chooses_the_way(kind: str, changes: dict[str, Any], in_segments: type, by_token: type) -> None:
    view = model_of(kind).with_context(**changes)
    assert type(open_stream(view, 1, tgt_len=4)) is in_segments
    assert type(open_stream(view, 1, tgt_len=4, token_by_token=True)) is by_token
    if by_token is not KeptKeys:
        why = r"ext_len \(2\)" if "ext_len" in changes else r"mem_len \(0\)" if kind == "no memory" else f"'{kind}'"
        with pytest.raises(ConfigError, match=f"precision int8 needs keys that stay the same, which .*{why}.* does not allow"):
            open_stream(view, 1, tgt_len=4, token_by_token=True, precision="int8")


@pytest.mark.parametrize("kind", ["transformer_xl", "averages", "lstm", "no memory"])
def test_refreshed_it_reads_on_with_weights_that_have_changed(kind: str) -> None:
    model = copy.deepcopy(model_of(kind))
    stream = open_stream(model, 3, tgt_len=1, token_by_token=True)
    stream.nll(stream.step(TEXT[:, 0]).unsqueeze(1), TEXT[:, 1:2])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    stream.refresh()
    stream.reset(torch.ones(3, dtype=torch.bool))
    new = open_stream(copy.deepcopy(model), 3, tgt_len=1, token_by_token=True)
    for ids, labels in zip(TEXT[:, :4].T, TEXT[:, 1:5].T, strict=True):
        states = stream.step(ids)
        assert torch.equal(states, new.step(ids))
        label = labels.unsqueeze(1)
        assert torch.equal(stream.nll(states.unsqueeze(1), label), new.nll(states.unsqueeze(1), label))


def test_views_made_while_scoring_are_in_evaluation_mode() -> None:
    model = tiny_model().train()
    with scoring(model):
        assert not model.with_context(mem_len=2).training and not torch.is_grad_enabled()
    assert model.training and torch.is_grad_enabled()


@pytest.mark.parametrize("kind", ["transformer_xl", "averages", "pairs", "pairs and triples after averages"])
def test_a_row_goes_back_several_times_and_after_it_was_put(kind: str) -> None:
    """What the rings of inputs and tokens no longer hold is not gone back to in two steps either."""
    model, chance = model_of(kind), random.Random(kind)
    for _ in range(12):
        stream, text = open_stream(model, 1, tgt_len=6, token_by_token=True), [0]
        stream.step(torch.tensor([0]))
        for _ in range(6):
            n = stream.n_rewindable(0)
            what = chance.choice(["read", "back", "put"])
            if what == "read":
                new = [chance.randrange(13) for _ in range(chance.randrange(1, 14))]
                text += new
                for token in new:
                    stream.step(torch.tensor([token]))
            elif what == "back" and n and len(text) > 1:
                back = min(n, len(text) - 1, chance.choice([n, chance.randint(1, n)]))
                stream.rewind(0, back)
                text = text[:-back]
            elif what == "put":
                stream.put(0, stream.take(0))
        other = open_stream(model, 1, tgt_len=6, token_by_token=True)
        for token in text:
            other.step(torch.tensor([token]))
        assert_close("states", stream.step(torch.tensor([5])), other.step(torch.tensor([5])), 1e-5)
