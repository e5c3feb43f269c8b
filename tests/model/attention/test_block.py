"""Dropout and initial weights of the kinds of attention, which the loops of tests/reference leave out."""

import pytest
import torch

from tests.helpers import tiny_model
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.model.attention.block import AttentionBlock
from transformer_xl.model.transformer_xl import TransformerXL

KINDS = {
    "transformer_xl": {},
    "shaw": {"attention": "shaw", "max_klen": 9},
    "vaswani": {"attention": "vaswani"},
    "al_rfou": {"attention": "al_rfou", "max_klen": 9, "n_head": 2, "d_head": 5},
    "rotary": {"attention": "rotary"},
    "alibi": {"attention": "alibi"},
}
IDS = torch.randint(13, (2, 6), generator=torch.Generator().manual_seed(0))


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
    entered, project = [], AttentionBlock.project
    monkeypatch.setattr(AttentionBlock, "project", lambda self, h, *rest: entered.append(h) or project(self, h, *rest))
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
