"""Dropout and initial weights of the kinds of attention, which the loops of tests/reference leave out."""

import pytest
import torch

from tests.helpers import tiny_model
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.transformer_xl import TransformerXL

KINDS = {
    "transformer_xl": {},
    "shaw": {"attention": "shaw", "max_klen": 9},
    "vaswani": {"attention": "vaswani"},
    "al_rfou": {"attention": "al_rfou", "max_klen": 9, "n_head": 2, "d_head": 5},
    "rotary": {"attention": "rotary"},
    "alibi": {"attention": "alibi"},
}
MISTAKES = [
    (
        {"attention": "shav"},
        r"^attention 'shav' is not registered \(did you mean 'shaw'\?\); if it is your own, import its module",
    ),
    ({"attention": "rotary", "d_head": 63}, r"^d_head \(63\) must be even, because attention 'rotary' turns pairs.*; use 64$"),
    ({"attention": "rotary", "clamp_len": 9}, r"^clamp_len \(9\) must be none: attention 'rotary' tells all distances apart$"),
    ({"attention": "al_rfou", "max_klen": 9, "d_head": 63}, r"n_head x d_head \(189\).*d_model \(10\); make them equal$"),
    ({"attention": "shaw"}, r"^attention 'shaw' learns positions: max_klen \(None\) must say how many"),
    ({"same_length": True, "mem_len": 0}, r"^same_length \(True\) needs mem_len \(0\) of at least 1"),
]
IDS = torch.randint(13, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_a_kind_refuses_settings_that_it_cannot_have(options, message):
    with pytest.raises(ConfigError, match=message):
        tiny_model(**options)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_weights_are_dropped_in_training_only(kind):
    model = tiny_model(**KINDS[kind], dropatt=0.5)
    quiet = model(IDS).logits
    assert torch.equal(quiet, model(IDS).logits)
    model.train()
    assert not torch.allclose(quiet, model(IDS).logits)
    assert not torch.allclose(model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["transformer_xl", "shaw", "vaswani", "rotary", "alibi"])
def test_what_enters_the_first_layer_is_dropped_once(kind, monkeypatch):
    """Dropout zeros half of the numbers and doubles the others: of embeddings, and with vaswani of their sum with positions."""
    model = tiny_model(**KINDS[kind], dropout=0.5, d_model=60, n_layer=1).train()
    entered, project = [], AttentionKind.project
    monkeypatch.setattr(AttentionKind, "project", lambda self, h, *rest: entered.append(h) or project(self, h, *rest))
    model(torch.randint(13, (20, 20)))
    assert (entered[0] == 0).double().mean().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_are_those_of_the_authors(kind):
    sizes = {"vocab_size": 50, "n_layer": 3, "d_model": 60, "n_head": 2, "d_head": 30, "d_inner": 60, "max_klen": 40}
    attention = {name: value for name, value in KINDS[kind].items() if name == "attention"}
    model = TransformerXL(TransformerXLConfig(**sizes, **attention, init_std=0.3))
    for name in ("r_emb", "r_w_bias", "r_r_bias"):
        if hasattr(model, name):
            assert getattr(model, name).std().item() == pytest.approx(0.3, rel=0.25), name
    if kind == "shaw":
        assert not model.get_parameter("r_bias").any()
