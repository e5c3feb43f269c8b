"""Kinds that were registered from outside the package train, score, are saved and loaded, and write."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transformer_xl as txl
from tests.contract import toy_kinds
from tests.helpers import assert_close
from tests.training.helpers import MODEL, resumed_losses, tiny_model, write_recipe, write_text
from transformer_xl.config.model import KINDS, TransformerXLConfig
from transformer_xl.config.run import RunConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.kernels.equation import Positions
from transformer_xl.kernels.rotation import Turns
from transformer_xl.model.attention import relative
from transformer_xl.model.attention.block import Distances
from transformer_xl.model.attention.kinds import ATTENTION
from transformer_xl.model.attention.relative import RelativeAttention
from transformer_xl.model.attention.rotary import RotaryAttention
from transformer_xl.reading.stream import open_stream
from transformer_xl.training.display import Display
from transformer_xl.training.start import check_model

SETTINGS: dict[str, dict[str, Any]] = {"sloped": {"attention": "sloped"}, "fading": {"kind": "fading"}}
CASES = pytest.mark.parametrize("settings", list(SETTINGS.values()), ids=list(SETTINGS))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    txl.register_attention(toy_kinds.SlopedAttention)
    txl.register_model(toy_kinds.FadingConfig, toy_kinds.Fading)
    yield
    for table, name in ((ATTENTION, "sloped"), (KINDS, "fading")):
        table.pop(name, None)


@CASES
def test_a_run_is_trained_loaded_scored_and_written_on(settings: dict[str, Any], tmp_path: Path) -> None:
    changes = [f"model.{name}={value}" for name, value in settings.items()]
    steps = ["train.max_steps=12", "train.eval_interval=8", "train.checkpoint_interval=8", "train.average=ema"]
    recipe, corpus = str(write_recipe(tmp_path / "tiny.toml")), str(write_text(tmp_path / "text.txt"))
    txl.train(recipe, out=tmp_path / "run", overrides=[*changes, *steps], corpus=corpus, display=Display(quiet=True))
    model, tokenizer = txl.load(tmp_path / "run")
    assert {name: getattr(model.config, name) for name in settings} == settings
    ids = np.asarray(tokenizer.encode("the cat sat on naïve mats — the cat sat on mats " * 3))
    score = txl.evaluate(model, ids, tgt_len=5, batch_size=2)
    assert score.tokens == len(ids) - 1 and 0 < score.loss < 10
    assert len(list(txl.generate(model, torch.as_tensor(ids[:9]), max_new_tokens=7, seed=1))) == 7

    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert txl.evaluate(again, ids, tgt_len=5, batch_size=2).nats == score.nats

    del ATTENTION["sloped"], KINDS["fading"]  # as in a program that does not import their module
    for load, folder in ((txl.load, "run"), (type(model).from_pretrained, "saved")):
        with pytest.raises(CheckpointError, match=r"registered.* if it is your own, import its module first") as caught:
            load(tmp_path / folder)
        assert "damaged" not in str(caught.value)


@CASES
def test_a_resumed_training_is_the_uninterrupted_one(settings: dict[str, Any]) -> None:
    changes: dict[str, Any] = {
        "model": {**settings, "dropout": 0.2},
        "train": {"tbptt_segments": 2, "accumulate": 2, "reset_at_documents": True, "checkpoint_layers": True},
    }
    losses = resumed_losses(2, 2, **changes)
    assert losses[-1] < losses[0]


@CASES
def test_however_a_text_is_cut_a_decoder_says_what_the_model_says(settings: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**settings).eval()
    assert isinstance(model, txl.LanguageModel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits[:, -1].log_softmax(-1)
    decoder = txl.Decoder(model, batch_size=2, tgt_len=4)
    assert (decoder.kept is not None) == model.keeps_keys
    decoder.feed(ids[:, :3])
    decoder.save(tmp_path / "session")
    scores = decoder.feed(ids[:, 3:])
    assert_close("pieces", scores.log_softmax(-1), expected, 1e-5)
    decoder.reset(torch.tensor([True, False]))
    assert_close("after a reset", decoder.feed([ids[0].tolist(), []])[:1].log_softmax(-1), expected[:1], 1e-5)
    decoder.load(tmp_path / "session")
    for token in ids[:, 3:].unbind(1):
        scores = decoder.step(token).full()
    assert_close("token by token", scores.log_softmax(-1), expected, 1e-5)


@CASES
def test_padding_and_documents_are_told_as_to_every_model(settings: dict[str, Any]) -> None:
    model = tiny_model(**settings).eval()
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
    padded = model(ids, rows=txl.Rows(n_pad=torch.tensor([0, 3]))).logits
    assert_close("padded row", padded[1, 3:], model(ids[1:, 3:]).logits[0], 1e-5)
    starts = torch.zeros(2, 7, dtype=torch.bool)
    starts[:, 4] = True
    cut = model(ids, rows=txl.Rows(document_starts=starts)).logits
    assert_close("second document", cut[:, 4:], model(ids[:, 4:]).logits, 1e-5)


def test_a_memory_of_another_kind_is_carried_like_any_other() -> None:
    memory = toy_kinds.Trace(torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), torch.tensor([4, 5]))
    assert (memory.batch_size, memory.n_bytes) == (2, 32)
    assert memory.reset(torch.tensor([False, True])).trace.tolist() == [[1, 2], [0, 0]]
    both = toy_kinds.Trace.concatenate([memory, memory.select(torch.tensor([0]))])
    assert both.trace[:, 0].tolist() == [1, 3, 1]
    first = torch.tensor([True, False])
    assert memory.where(first, toy_kinds.Trace(torch.ones(2, 2), torch.ones(2))).trace.tolist() == [[1, 2], [1, 1]]
    again = toy_kinds.Trace.from_state_dict(memory.to("cpu").detach().state_dict())
    assert torch.equal(again.trace[0], memory.trace[0])
    with pytest.raises(ValueError, match=r"a memory of 2 rows must fit ids of 3 rows; use model.init_mems\(3\)"):
        tiny_model(kind="fading")(torch.zeros(3, 2, dtype=torch.int64), mems=memory)


def test_a_memory_of_another_kind_says_what_its_tensors_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `n_valid` counts no positions, its `keys.trace` has none, and what it refuses is its own affair."""
    model = tiny_model(kind="fading")
    assert isinstance(model, txl.LanguageModel)
    decoder = txl.Decoder(model, batch_size=3)
    decoder.feed([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1], []])
    assert [int(decoder.take(row).tensors["n_valid"]) for row in range(3)] == [9, 1, 0]
    decoder.save(tmp_path / "session")
    other = txl.Decoder(decoder.model, batch_size=3)
    other.load(tmp_path / "session")
    for row in range(3):
        for name, x in decoder.take(row).tensors.items():
            assert torch.equal(other.take(row).tensors[name].nan_to_num(), x.nan_to_num()), name
    state = other.take(0)
    with pytest.raises(ValueError, match="fewer than 0 tokens"):
        other.put(1, replace(state, tensors={**state.tensors, "n_valid": torch.tensor(-1)}))
    monkeypatch.setattr(toy_kinds.Trace, "names", ("last", "n_valid"))
    with pytest.raises(ValueError, match="a tensor of the model's memory cannot be called 'last'; give it another name"):
        decoder.take(0)


def test_names_are_those_of_one_kind() -> None:
    txl.register_attention(toy_kinds.SlopedAttention)  # the same once more
    with pytest.raises(ConfigError, match="another kind of attention 'sloped' already; choose another name"):
        txl.register_attention(type("Other", (toy_kinds.SlopedAttention,), {}))
    with pytest.raises(ConfigError, match="another kind of model 'fading' already; choose another name"):
        txl.register_model(type("Other", (toy_kinds.FadingConfig,), {}), toy_kinds.Fading)
    with pytest.raises(
        ConfigError, match=r"attention 'slopes' is not registered \(did you mean 'sloped'\?\); if it is your own, import"
    ):
        tiny_model(attention="slopes")


def test_a_kind_of_attention_sets_its_own_parameters() -> None:
    assert (tiny_model(attention="sloped").get_parameter("slopes") == 0.25).all()


def test_a_kind_that_reads_otherwise_than_its_parent_does_not_inherit_its_frozen_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(self: Any, *heads: Any, **seen: Any) -> torch.Tensor:
        return 2 * txl.AttentionKind.attend(self, *heads, **seen)

    for parent in (txl.AttentionKind, toy_kinds.SlopedAttention):
        monkeypatch.setitem(ATTENTION, "plain", type("Plain", (parent,), {"name": "plain"}))
        assert tiny_model(attention="plain").keeps_keys
        monkeypatch.setitem(ATTENTION, "plain", type("Plain", (parent,), {"name": "plain", "attend": attend}))
        model = tiny_model(attention="plain")
        assert isinstance(model, txl.TransformerXL) and not model.keeps_keys
        with pytest.raises(ConfigError, match=r"with attention 'plain' cannot be kept: they change with the segment"):
            txl.Reader(model, tgt_len=4)


def test_a_kind_that_projects_other_queries_is_read_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    unusual = type("Unusual", (txl.AttentionKind,), {"name": "unusual", "normalizes_queries": False})
    monkeypatch.setitem(ATTENTION, "unusual", unusual)
    assert not tiny_model(attention="unusual").keeps_keys


class Turning(RotaryAttention):
    """Turns queries and keys by another base than its parent, and in the first layer not at all."""

    name = "turning"

    @classmethod
    def turns(cls, config: TransformerXLConfig, position: torch.Tensor, dtype: torch.dtype) -> list[Turns | None]:
        angles = position[..., None, None] * 100.0 ** -(torch.arange(0, config.d_head, 2) / config.d_head)
        return [None, *[(angles.cos(), angles.sin())] * (config.n_layer - 1)]


@pytest.mark.parametrize("zero_first_memory", [False, True])
def test_kept_keys_are_turned_as_their_kind_turns_them(zero_first_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION, "turning", Turning)
    sizes: dict[str, Any] = {"d_head": 4, "same_length": True, "pre_lnorm": True, "zero_first_memory": zero_first_memory}
    model, parent = (tiny_model(attention=name, **sizes).eval() for name in ("turning", "rotary"))
    assert isinstance(model, txl.TransformerXL) and isinstance(parent, txl.TransformerXL) and model.keeps_keys
    ids = torch.randint(11, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)  # norms, too, so that keys of zeros are not zeros
        first = model(ids[:, :7])
        second = model(ids[:, 7:], mems=first.mems).logits
        parent.load_state_dict(model.state_dict())
        assert (parent(ids[:, :7]).logits - first.logits).abs().max() > 0.1
    reader = txl.Reader(model, tgt_len=7)
    memory = reader.empty_memory(1)
    assert_close("segment", reader.softmax.logits(reader.read(ids[:, :7], memory)[0]), first.logits[0], 1e-5)
    for kept in (memory, reader.from_mems(first.mems)):
        steps = torch.cat([reader.softmax.logits(reader.step(token, kept)) for token in ids[:, 7:].unbind(1)])
        assert_close("token by token", steps, second[0], 1e-5)


def test_a_kind_that_turns_keys_unknown_to_a_reader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def positions(config: TransformerXLConfig, _learned: Any, distances: Distances) -> list[Positions]:
        return [Positions(turns=turns) for turns in Turning.turns(config, distances.tokens.flip(0), distances.dtype)]

    monkeypatch.setitem(
        ATTENTION, "turning", type("Other", (txl.AttentionKind,), {"name": "turning", "positions": staticmethod(positions)})
    )
    model = tiny_model(attention="turning", d_head=4)
    with pytest.raises(ConfigError, match="attention 'turning' must give turns by its method `turns`, not by `positions`"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_keys_of_a_subclass_are_its_own_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU multiplies the distances of all layers by W_kR at once; a subclass may make other keys of them."""

    def complete(self: Any, positions: Positions) -> Positions:
        assert positions.r is not None and positions.r.dim() == 2, "the encoded distances themselves"
        return positions._replace(r=self.r_net(2 * positions.r).unflatten(-1, (self.n_head, self.d_head)))

    monkeypatch.setitem(ATTENTION, "other", type("Other", (RelativeAttention,), {"name": "other", "complete": complete}))
    ids = torch.arange(9)[None] % 7
    for name in ("other", "transformer_xl"):
        model = tiny_model(attention=name).eval()
        expected = model(ids).logits
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(relative, "is_fused", lambda x: True)
            assert_close(name, model(ids).logits, expected, 1e-5)


def test_a_transformer_xl_with_another_memory_is_read_with_that_memory() -> None:
    """Its settings say that keys of its attention stay the same, but keys are not all that it remembers."""
    model = toy_kinds.Summary(toy_kinds.SummaryConfig(**MODEL, init_std=0.5)).eval()
    ids = torch.randint(11, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = model(ids[:, :4], labels=ids[:, 1:5])
        second = model(ids[:, 4:8], mems=first.mems, labels=ids[:, 5:])
        scores = model(ids[:, 4:8], mems=first.mems).logits[:, -1]
    assert txl.evaluate(model, ids[0], tgt_len=4).nats == pytest.approx(float(first.nll.sum() + second.nll.sum()), rel=1e-6)
    assert_close("decoder", txl.Decoder(model, tgt_len=4).feed(ids[:, :8]), scores, 1e-5)
    reads = "a model of kind 'summary' with attention 'transformer_xl'"
    with pytest.raises(ConfigError, match=f"precision int8 needs keys that stay the same, which {reads} does not allow"):
        open_stream(model, 1, tgt_len=4, precision="int8")
    with pytest.raises(ConfigError, match=rf"keys of {reads} cannot be kept: they change with the segment"):
        txl.Reader(model, tgt_len=4)


def test_settings_that_a_kind_cannot_have_are_refused() -> None:
    config = RunConfig(**{"model": {"attention": "sloped"}, "train": {"attention": "triton", "max_steps": 1}})
    with pytest.raises(ConfigError, match="'triton' cannot run here: it computes positions as the paper does, and this kind"):
        check_model(config)


def test_the_kind_of_the_design_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(page[page.index("# mine.py") :].partition("```")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    del ATTENTION["sloped"]  # the toy of that name; `_registered` takes the other one out
    import_module("mine")
    sizes: dict[str, Any] = {"vocab_size": 7, "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8}
    sizes |= {"mem_len": 16, "init_std": 0.5}
    model = txl.TransformerXL(txl.TransformerXLConfig(**sizes, attention="sloped")).eval()
    ids = torch.arange(12)[None] % 7
    with torch.no_grad():
        flat = model(ids, mems=model.init_mems(1)).logits[0, -1].softmax(-1)
        model.learned_positions["slopes"].fill_(3.0)
        sloped = model(ids, mems=model.init_mems(1)).logits[0, -1].softmax(-1)
    assert (sloped - flat).abs().max() > 1e-2
    scores = txl.Decoder(model, tgt_len=4).read(ids)
    read = torch.stack([scores.log_probability(torch.tensor([token]))[0] for token in range(7)]).exp()
    assert_close("what the decoder reads", read, sloped, 1e-6)
    drops = txl.TransformerXL(txl.TransformerXLConfig(**sizes, attention="sloped", dropatt=0.9, dropout=0))
    assert not torch.equal(drops(ids).logits, drops(ids).logits)
    elsewhere = drops.to("meta")  # any device but the processor's
    assert {x.device.type for x in elsewhere.positions(8)[0] if isinstance(x, torch.Tensor)} == {"meta"}
