"""The wrapped model: the same numbers as ours, padding that changes nothing, files that both sides read."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.helpers import assert_close, examples, tiny_model
from tests.huggingface.conftest import Saved, edit, wrapped
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.model.transformer_xl import TransformerXL

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from transformer_xl.huggingface import (  # noqa: E402
    MemoryCache,
    TransformerXLForCausalLM,
    TransformerXLPretrainedConfig,
)

IDS = torch.arange(12).view(2, 6)
ADAPTIVE = {"cutoffs": (4, 9), "div_val": 2, "d_embed": 10}


@pytest.mark.parametrize("changes", [{}, ADAPTIVE], ids=["plain", "adaptive"])
def test_a_directory_of_ours_loads_with_the_auto_classes(changes: dict[str, Any], save: Callable[..., Saved]) -> None:
    saved = save(**changes)
    assert isinstance(AutoConfig.from_pretrained(saved.path), TransformerXLPretrainedConfig)
    model, ids = AutoModelForCausalLM.from_pretrained(saved.path), IDS % 13
    assert isinstance(model, TransformerXLForCausalLM) and not model.training
    out, expected = model(ids), saved.model(ids)
    assert torch.equal(out.logits, expected.logits)
    again, then = model(ids, mems=out.mems), saved.model(ids, mems=expected.mems)
    assert torch.equal(again.logits, then.logits)
    assert torch.equal(again.mems.hidden[1], then.mems.hidden[1])
    assert not torch.allclose(again.logits, out.logits)
    (saved.path.parent / "model.safetensors").write_bytes(b"of another model")
    model = AutoModelForCausalLM.from_pretrained(saved.path.parent, subfolder=saved.path.name)
    assert torch.equal(model(ids).logits, expected.logits)


def test_what_transformers_saves_both_sides_load(saved: Saved, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved.path)
    with torch.no_grad():
        model.get_parameter("transformer.r_w_bias").add_(1)
    model.save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_bytes((saved.path / "tokenizer.json").read_bytes())
    native, _ = load(tmp_path / "out")
    assert native.config == saved.model.config
    for other in (native(IDS), AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS)):
        assert torch.equal(other.logits, model(IDS).logits)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == native.state_dict().keys()


def test_fields_of_the_config_are_arguments(saved: Saved) -> None:
    model = saved.in_transformers(mem_len=2, clamp_len=3, dtype=torch.bfloat16)
    assert (model.transformer.mem_len, model.transformer.clamp_len, model.dtype) == (2, 3, torch.bfloat16)
    assert model(IDS).mems.length == 2
    with pytest.raises(ConfigError, match="clamp_len"):
        AutoModelForCausalLM.from_pretrained(saved.path, clamp_len=0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("changes", [{}, ADAPTIVE], ids=["plain", "adaptive"])
def test_the_loss_is_the_mean_of_ours_with_labels_shifted(changes: dict[str, Any], training: bool) -> None:
    model = wrapped(**changes).train(training)
    labels = torch.randint(13, (2, 6))
    labels[0, 3] = -100
    out = model(labels.clamp(min=0), labels=labels)
    shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], dim=1)
    nll = model.transformer(labels.clamp(min=0), labels=shifted).nll
    assert nll is not None
    assert_close("loss", out.loss, nll.sum() / 9, 1e-6)
    assert_close("loss", model(labels.clamp(min=0), labels=labels, num_items_in_batch=4).loss, nll.sum() / 4, 1e-6)
    assert (out.logits is None) == bool(changes), "an adaptive softmax scores labels alone"
    if out.logits is not None:
        assert_close("logits", out.logits, model.transformer(labels.clamp(min=0)).logits, 1e-6)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_tuple_begins_with_the_loss() -> None:
    model = wrapped()
    loss, logits, mems = model(IDS, labels=IDS, return_dict=False)
    assert loss.shape == () and logits.shape == (2, 6, 13) and mems.length == 5
    assert model(IDS, use_cache=False).mems is None
    assert model(IDS, labels=torch.full_like(IDS, -100)).loss == 0


@st.composite
def padded_rows(draw: Any) -> list[tuple[int, int, int]]:
    """Rows as (places before, tokens, places after), all of one length."""
    width = draw(st.integers(1, 7))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, width))
        before = draw(st.integers(0, width - n))
        rows.append((before, n, width - n - before))
    return rows


@settings(max_examples=examples(40))
@given(
    st.lists(padded_rows(), min_size=1, max_size=3).filter(lambda segments: len({len(rows) for rows in segments}) == 1),
    st.sampled_from([{}, {"same_length": True}, {"zero_first_memory": True}, {"pre_lnorm": True, "clamp_len": 3}, ADAPTIVE]),
    st.booleans(),
)
def test_a_padded_row_scores_as_it_does_alone(
    segments: list[list[tuple[int, int, int]]], changes: dict[str, Any], by_id: bool
) -> None:
    torch.manual_seed(0)
    model = wrapped(**changes)
    mems, alone = None, [None] * len(segments[0])
    for rows in segments:  # memory is carried from segment to segment, each padded in its own way
        texts = [torch.randint(13, (1, n)) for _, n, _ in rows]
        padding = 13 if by_id else 5  # our tokenizer's <pad>, or any token under a mask
        ids = torch.full((len(rows), sum(rows[0])), padding)
        for i, ((b, n, _), text) in enumerate(zip(rows, texts, strict=True)):
            ids[i, b : b + n] = text
        mask = torch.tensor([[0] * b + [1] * n + [0] * a for b, n, a in rows])
        labels = ids.masked_fill(ids == 13, -100)
        logits = model(ids, attention_mask=None if by_id else mask, mems=mems).logits
        out = model(ids, attention_mask=None if by_id else mask, mems=mems, labels=labels)
        mems, nats, count = out.mems, 0.0, 0
        assert logits.isfinite().all()
        for i, ((b, n, _), text) in enumerate(zip(rows, texts, strict=True)):
            if n == 0:
                continue
            own, own_logits = model(text, mems=alone[i], labels=text), model(text, mems=alone[i]).logits
            alone[i] = own.mems
            assert_close(f"row {i}", logits[i, b : b + n], own_logits[0], 1e-5)
            nats, count = nats + own.loss.item() * (n - 1), count + n - 1
        assert_close("loss", out.loss, torch.tensor(nats / max(count, 1)), 1e-5)


def test_a_mask_that_covers_the_memory_too() -> None:
    model = wrapped()
    first = model(IDS[:, :4], attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]))
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    out = model(IDS[:, 4:], attention_mask=mask, mems=first.mems)
    assert_close("row", out.logits[1], model(IDS[1:, 2:]).logits[0, 2:], 1e-5)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]])},
            "row 1 of attention_mask has padding between",
        ),
        ({"attention_mask": torch.ones(2, 7)}, r"attention_mask \(2, 7\) must have the shape of input_ids \(2, 6\)"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask \(2, 5\) must have the shape"),
        ({"attention_mask": torch.ones(1, 6)}, r"attention_mask \(1, 6\) must have the shape"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, "must have the shape"),
        ({"labels": IDS[:, 1:]}, r"labels \(2, 5\) must have the shape of input_ids \(2, 6\)"),
        ({"cache": MemoryCache(), "mems": tiny_model().init_mems(2)}, "two memories; give one of them"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        wrapped()(IDS, **arguments)


def test_the_vocabulary_is_not_resized() -> None:
    with pytest.raises(ConfigError, match=r"the vocabulary \(13\) cannot be resized"):
        wrapped().resize_token_embeddings(14)


def rename(path: Path) -> None:
    weights = load_file(path)
    weights["r_w_bia"] = weights.pop("r_w_bias")
    save_file(weights, path)


def spoil(path: Path) -> None:
    weights = load_file(path)
    weights["r_w_bias"][0] = math.nan
    save_file(weights, path, metadata={"format": "pt"})
    (path.parent / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (
            lambda d: rename(d / "model.safetensors"),
            "tensor 'r_w_bia' has shape .*, its config asks for None",
        ),
        (lambda d: edit(d / "config.json", d_inner=15), r"tensor '.*layers.0.*' has shape .*14.*, its config asks for .*15"),
        (lambda d: edit(d / "config.json", n_layer=10**9), "26 tensors, its config asks for 1,000,000,000 layers"),
        (lambda d: spoil(d / "model.safetensors"), "weights of '.*' are not finite numbers: r_w_bias, 1 of its tensors in all"),
    ],
)
def test_misfits_are_named_in_one_line(saved: Saved, damage: Any, match: str) -> None:
    damage(saved.path)
    with pytest.raises(CheckpointError, match=match) as caught:
        AutoModelForCausalLM.from_pretrained(saved.path)
    assert "\n" not in str(caught.value)


def test_a_small_file_cannot_ask_for_a_huge_memory(saved: Saved) -> None:
    edit(saved.path / "config.json", mem_len=10**12, zero_first_memory=True)
    greedy: Any = AutoModelForCausalLM.from_pretrained(saved.path)
    with pytest.raises(ConfigError, match="a memory of mem_len 1000000000000 and batch_size 2 takes"):
        greedy.generate(IDS % 13, max_new_tokens=1)
    assert AutoModelForCausalLM.from_pretrained(saved.path, mem_len=7)(IDS % 13).mems.length == 7


def test_pickles_are_not_read(saved: Saved) -> None:
    torch.save(saved.model.state_dict(), saved.path / "pytorch_model.bin")
    (saved.path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(saved.path)


def test_a_new_model_is_drawn_as_ours() -> None:
    config = TransformerXLPretrainedConfig(vocab_size=13, n_layer=1, d_model=64, n_head=2, d_head=8, d_inner=64, init_std=0.5)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(3)
    assert isinstance(config.native, TransformerXLConfig)
    native = TransformerXL(config.native)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), native.parameters(), strict=True))
