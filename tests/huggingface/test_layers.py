"""What layers read and where heads look, behind transformers' interface: the numbers are ours, wherever a row is padded."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import assert_close, random_weights
from tests.huggingface.conftest import Saved, wrapped
from tests.parity.test_live import PYTHON
from transformer_xl.conversion.convert import convert

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import AutoModel, pipeline  # noqa: E402

IDS = torch.arange(12).view(2, 6)
MANY = {"output_hidden_states": True, "output_attentions": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "same_length": {"same_length": True, "clamp_len": 3},
    "norms": {"pre_lnorm": True, "final_norm": True, "zero_first_memory": True},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2, "d_embed": 10},
    "shaw": {"attention": "shaw", "max_klen": 12},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_layers_and_heads_are_those_of_our_model(name: str) -> None:
    model = wrapped(**OPTIONS[name])
    mems = model(IDS).mems
    out = model(IDS, mems=mems, labels=IDS, **MANY)
    states, _ = model.transformer.hidden_states(IDS, mems=mems)
    weights, _ = model.transformer.attention_weights(IDS, mems=mems)
    assert len(out.hidden_states) == model.config.n_layer + 1
    assert all(torch.equal(x, y) for x, y in zip(out.hidden_states, states, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(out.attentions, weights, strict=True))
    assert_close("sums", out.attentions[1].sum(-1), torch.ones(2, model.config.n_head, 6), 1e-5)
    assert out.hidden_states[1].requires_grad and not out.attentions[1].requires_grad
    assert model(IDS, mems=mems).hidden_states is None
    assert model(IDS, output_attentions=True).hidden_states is None


@pytest.mark.parametrize("name", OPTIONS)
def test_a_padded_row_has_the_layers_and_heads_that_it_has_alone(name: str) -> None:
    """Padding is at the left in the first segment, and at the right in the second one, which has a memory."""
    model, lengths = wrapped(**OPTIONS[name]), [6, 4, 1]
    alone: list[Any] = [None] * 3
    mems = None
    for side in ("left", "right"):
        ids = torch.full((3, 6), 13)
        for row, n in enumerate(lengths):
            ids[row, slice(6 - n, 6) if side == "left" else slice(n)] = torch.randint(13, (n,))
        out = model(ids, mems=mems, **MANY)
        for row, n in enumerate(lengths):
            place = torch.arange(6 - n, 6) if side == "left" else torch.arange(n)
            own = model(ids[row : row + 1, place], mems=alone[row], **MANY)
            for x, y in zip(out.hidden_states, own.hidden_states, strict=True):
                assert_close("states", x[row, place], y[0], 1e-5)
            for x, y in zip(out.attentions, own.attentions, strict=True):
                M, n_memory = x.shape[3] - 6, y.shape[3] - n  # rows alone have memories of their own lengths
                keys = torch.cat([torch.arange(M - min(n_memory, M), M), M + place])
                assert_close("heads", x[row][:, place][..., keys], y[0][..., max(0, n_memory - M) :], 1e-5)
                is_seen = torch.zeros(M + 6).index_fill(0, keys, 1)
                assert not bool((x[row][:, place] * (1 - is_seen)).any()), "padding is not attended to"
            alone[row] = own.mems
        mems = out.mems


@pytest.mark.parametrize("name", ["plain", "norms", "adaptive", "shaw"])
def test_vectors_stand_for_ids(name: str) -> None:
    model = wrapped(**OPTIONS[name])
    mems, vectors = model(IDS).mems, model.get_input_embeddings()(IDS).detach().requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    expected = model(IDS, mems=mems, attention_mask=mask, labels=IDS, **MANY)
    out = model(inputs_embeds=vectors, mems=mems, attention_mask=mask, labels=IDS, **MANY)
    assert torch.equal(out.loss, expected.loss)
    for x, y in zip(out.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(x[mask == 1], y[mask == 1])
    for x, y in zip(out.attentions, expected.attentions, strict=True):
        assert torch.equal(x.transpose(1, 2)[mask == 1], y.transpose(1, 2)[mask == 1])
    out.loss.backward()
    assert vectors.grad is not None and bool((vectors.grad[1] != 0).any()) and not bool(vectors.grad[0, 4:].any())
    padding = model.get_input_embeddings()(torch.tensor([[model.config.vocab_size]]))
    assert torch.equal(padding, model.get_input_embeddings()(torch.tensor([[0]])))


def test_what_vectors_cannot_say_is_refused() -> None:
    vectors = torch.zeros(2, 3, 10)
    for given in ({}, {"input_ids": IDS, "inputs_embeds": vectors}):
        with pytest.raises(ValueError, match="two forms of a text; give one of them"):
            wrapped()(**given)
    with pytest.raises(ValueError, match=r"inputs_embeds \(2, 3\) must have shape \(batch, length, 10\)"):
        wrapped()(inputs_embeds=vectors[..., 0])
    with pytest.raises(ValueError, match="which ngram_rows and, in training, dropemb need; give input_ids"):
        wrapped(ngram_rows=(5,))(inputs_embeds=vectors)
    with pytest.raises(ValueError, match="a memory of 2 rows must fit ids of 1 rows"):
        wrapped()(inputs_embeds=vectors[:1], mems=wrapped()(IDS).mems)
    model = wrapped(dropemb=0.5)
    assert model(inputs_embeds=vectors).logits.shape == (2, 3, 13)
    with pytest.raises(ValueError, match="dropemb need; give input_ids"):
        model.train()(inputs_embeds=vectors)


def test_automodel_gives_states(saved: Saved) -> None:
    model = AutoModel.from_pretrained(saved.path, output_hidden_states=True)
    out = model(IDS)
    states, _ = saved.model.hidden_states(IDS)
    mems = saved.model(IDS).mems
    assert torch.equal(out.last_hidden_state, states[-1]) and torch.equal(out.hidden_states[1], states[1])
    assert torch.equal(out.mems.hidden[1], mems.hidden[1]) and out.attentions is None
    last, *_ = model(IDS, mems=out.mems, use_cache=False, output_hidden_states=False, return_dict=False)
    assert_close("next segment", last, saved.model.hidden_states(IDS, mems=mems)[0][-1], 1e-6)
    (features,) = pipeline("feature-extraction", str(saved.path))("hello")
    ids = torch.from_numpy(saved.tokenizer.encode("hello"))[None]
    assert_close("features", torch.tensor(features), saved.model.hidden_states(ids)[0][-1][0], 1e-5)


def test_states_of_an_xlnet_are_those_of_transformers_own(tmp_path: Path) -> None:
    """Its own `XLNetModel`, converted; rows that are padded at either side have the states that they have alone."""
    sizes = {"vocab_size": 13, "d_model": 6, "n_layer": 2, "n_head": 2, "d_inner": 7, "mem_len": 4, "dropout": 0.0}
    theirs = random_weights(transformers.XLNetModel(transformers.XLNetConfig(**sizes, num_labels=3))).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    ours = AutoModel.from_pretrained(tmp_path / "ours")
    texts = torch.tensor([[0, 0, 1, 1, 2, 2]]).expand(2, 6)
    first = theirs(IDS, token_type_ids=texts, output_hidden_states=True, use_mems=True)
    out = ours(IDS, token_type_ids=texts, output_hidden_states=True)
    for x, y in zip(out.hidden_states, first.hidden_states, strict=True):
        assert_close("states", x, y, 1e-5)
    assert torch.equal(out.last_hidden_state, out.hidden_states[-1])
    then = theirs(IDS, mems=first.mems).last_hidden_state
    last, *_ = ours(IDS, mems=out.mems, use_cache=False, return_dict=False)
    assert_close("after a memory", last, then, 1e-5)
    for side in (slice(2, 6), slice(4)):
        ids = torch.full((2, 6), 13)
        ids[0], ids[1, side] = IDS[0], IDS[1, :4]
        states = ours(ids).last_hidden_state
        assert_close("padded", states[1, side], ours(IDS[1:, :4]).last_hidden_state[0], 1e-5)
        assert_close("beside it", states[0], ours(IDS[:1]).last_hidden_state[0], 1e-5)


def test_generation_returns_states_and_heads(saved: Saved) -> None:
    model = saved.in_transformers()
    out = model.generate(IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, **MANY)
    assert len(out.hidden_states) == len(out.attentions) == 3
    assert out.hidden_states[1][0].shape == (2, 1, 10)  # each new token alone, after a memory


PEER = """
import sys, torch
from safetensors.torch import save_file
from transformers import TransfoXLModel
model, ids = TransfoXLModel.from_pretrained(sys.argv[1]).eval(), torch.arange(12).view(2, 6)
mems = model(ids).mems
out = model(ids, mems=mems, output_hidden_states=True, output_attentions=True)
parts = {"state": out.hidden_states, "heads": out.attentions}
save_file({f"{name}.{i}": x.contiguous() for name, xs in parts.items() for i, x in enumerate(xs)}, sys.argv[2])
"""


@pytest.mark.parity
@pytest.mark.parametrize("golden", ["plain", "same_length", "clamp_len", "div_val_2_three_tails"])
def test_they_are_those_of_the_old_classes(golden: str, tmp_path: Path) -> None:
    """TransfoXL of transformers 4.35.2, where it runs; the first memory of both is zeros."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing; `make parity` makes this environment of the peer")
    source = Path(__file__).parents[1] / "parity" / "goldens" / "huggingface" / golden / "checkpoint"
    subprocess.run([PYTHON, "-W", "ignore", "-c", PEER, source, tmp_path / "theirs"], check=True, capture_output=True)
    theirs = load_file(tmp_path / "theirs")
    convert(source, tmp_path / "native")
    model = AutoModel.from_pretrained(tmp_path / "native")
    out = model(IDS, mems=model(IDS).mems, **MANY)
    for i, x in enumerate(out.hidden_states):
        assert_close(f"states {i}", x, theirs[f"state.{i}"], 1e-5)
    for i, x in enumerate(out.attentions):
        assert_close(f"heads {i}", x, theirs[f"heads.{i}"], 1e-5)
    assert len(theirs) == len(out.hidden_states) + len(out.attentions)
