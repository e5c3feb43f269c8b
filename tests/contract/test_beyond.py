"""What becomes of positions that leave the memory: every kind trains, resumes, is saved, scored and read on like any model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import transformer_xl as txl
from tests.helpers import TINY, assert_close, random_weights, without_seal
from tests.training.helpers import resumed_losses, tiny_trainer, write_recipe, write_text
from transformer_xl.conversion.export import export
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.kinds import BEYOND
from transformer_xl.model.beyond.compressed import Pooling
from transformer_xl.model.beyond.memory import BeyondMems
from transformer_xl.onnx import export_onnx
from transformer_xl.reading.stream import CarriedState, open_stream
from transformer_xl.training.display import Display

KINDS = ["linear", "delta", "mean", "max", "conv", "delta, shift token", "mean, shift conv"]
SIZES: dict[str, Any] = {"mem_len": 3, "compression": 2, "compressed_len": 3}
TEXT = torch.tensor([[(5 * i * i + b) % 13 for i in range(31)] for b in range(3)])


class FirstOfBlock(Pooling):
    """A kind of one's own: of each block the first state is kept."""

    def compress(self, h_BnCD: Tensor) -> Tensor:
        return h_BnCD[:, :, 0]


OWN = txl.BeyondKind("first", f"{__name__}:FirstOfBlock")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    txl.register_beyond(OWN)
    yield
    BEYOND.pop("first")


def settings(kind: str) -> dict[str, str]:
    beyond, _, shift = kind.partition(", shift ")
    return {"beyond": beyond, "shift": shift or "none"}


def tiny(kind: str, **changes: Any) -> txl.BeyondTransformerXL:
    torch.manual_seed(len(kind))
    config = txl.TransformerXLConfig(**{**TINY, **SIZES, **settings(kind), **changes})
    return random_weights(txl.BeyondTransformerXL(config).eval())


@torch.no_grad()
def read(model: txl.BeyondTransformerXL, cuts: list[int]) -> tuple[Tensor, BeyondMems]:
    """Read the text in segments of these lengths."""
    mems, states = model.init_mems(3), []
    for ids in TEXT[:, : sum(cuts)].split(cuts, dim=1):
        h_BTD, mems = model.read(ids, mems=mems)
        states.append(h_BTD)
    return torch.cat(states, dim=1), mems


CUTS = [[31], [1] * 31, [2, 9, 1, 4, 15], [7, 7, 7, 7, 3]]


@pytest.mark.parametrize("kind", [*KINDS, "first"])
def test_what_the_first_layer_keeps_depends_on_the_text_alone(kind: str) -> None:
    """Its input does not depend on what is seen; what waits and what was written do not depend on the cuts."""
    results = [read(tiny(kind), cuts)[1] for cuts in CUTS]
    for mems in results[1:]:
        assert (mems.n_valid.tolist(), mems.n_block.tolist()) == (results[0].n_valid.tolist(), results[0].n_block.tolist())
        assert_close("hidden", mems.hidden[0], results[0].hidden[0], 1e-5)
        assert_close("beyond", mems.beyond[0], results[0].beyond[0], 1e-5)
    assert results[0].n_block.min() > 3


def test_with_a_window_everything_depends_on_the_text_alone() -> None:
    model = tiny("linear", same_length=True)
    results = [read(model, cuts) for cuts in CUTS]
    for states, mems in results[1:]:
        assert_close("states", states, results[0][0], 1e-4)
        for name, x in results[0][1].state_dict().items():
            assert_close(name, mems.state_dict()[name].double(), x.double(), 1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "first"])
def test_what_left_is_still_read(kind: str) -> None:
    """Tokens 2 to 4 have left the only layer's memory after 12; a full queue forgets them, a matrix does not."""
    model = tiny(kind, n_layer=1)
    other = TEXT.clone()
    other[:, 2:5] = (other[:, 2:5] + 1) % 13
    differences = []
    mems = [model.init_mems(3), model.init_mems(3)]
    for t in range(31):
        with torch.no_grad():
            reads = [model.read(ids[:, t : t + 1], mems=own) for ids, own in zip((TEXT, other), mems, strict=True)]
        mems = [own for _, own in reads]
        differences.append(float((reads[0][0] - reads[1][0]).abs().max()))
    assert differences[0] == 0 and differences[8] > 1e-4
    assert (differences[-1] == 0) == (not kind.startswith(("linear", "delta")))


@pytest.mark.parametrize("kind", [*KINDS, "first"])
@pytest.mark.parametrize(("ext_len", "cuts"), [(0, [5, 4, 2]), (2, [5, 4, 2]), (4, [5, 4, 2]), (4, [5, 6])])
def test_rows_may_be_padded_and_documents_begin_anywhere(kind: str, ext_len: int, cuts: list[int]) -> None:
    """The end that is left out may be longer than a segment, or than what a row has of it."""
    model = tiny(kind).with_context(ext_len=ext_len)
    mems = read(model, cuts)[1]
    pad = torch.tensor([0, 3, 6])
    with torch.no_grad():
        together, after = model.read(TEXT[:, 11:17], mems=mems, rows=txl.Rows(n_pad=pad))
        for row, n in enumerate(pad.tolist()):
            own = mems.select(slice(row, row + 1))
            if n < 6:
                alone, own = model.read(TEXT[row : row + 1, 11 + n : 17], mems=own)
                assert_close(f"row {row}", together[row, n:], alone[0], 1e-5)
                same(after.select(slice(row, row + 1)), own)
        starts = torch.zeros(3, 6, dtype=torch.bool)
        starts[1, 2] = starts[2, 0] = True
        cut, after = model.read(TEXT[:, 11:17], mems=mems, rows=txl.Rows(document_starts=starts))
        for row, first in ((1, 2), (2, 0)):
            new, own = model.read(TEXT[row : row + 1, 11 + first : 17], mems=model.init_mems(1))
            assert_close(f"document of row {row}", cut[row, first:], new[0], 1e-5)
            same(after.select(slice(row, row + 1)), own)


def same(one: BeyondMems, other: BeyondMems) -> None:
    """Compare what is valid of two memories of one row."""
    n = int(other.n_valid)
    assert (int(one.n_valid), int(one.n_block)) == (n, int(other.n_block))
    for x, y in zip(one.hidden, other.hidden, strict=True):
        assert_close("hidden", x[:, x.shape[1] - n :], y[:, y.shape[1] - n :], 1e-5)
    for x, y in zip((*one.beyond, *one.inputs), (*other.beyond, *other.inputs), strict=True):
        assert_close("beyond", x, y, 1e-5)


@pytest.mark.parametrize("kind", ["linear", "conv", "delta, shift token"])
def test_a_reset_row_knows_nothing(kind: str) -> None:
    model = tiny(kind)
    mems = read(model, [9, 8])[1].reset(torch.tensor([False, True, False]))
    with torch.no_grad():
        h_BTD = model.read(TEXT[:, 17:21], mems=mems)[0]
        new = model.read(TEXT[:, 17:21])[0]
    assert_close("reset", h_BTD[1], new[1], 1e-5)
    assert (h_BTD[0] - new[0]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="impossible lengths"):
        replace(mems, n_block=mems.n_block - 2**40).check_values()
    with pytest.raises(ValueError, match="longer than the model's"):
        model.with_context(mem_len=1).read(TEXT[:, :2], mems=mems)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_close_to_fp32_and_sums_stay_in_fp32(kind: str) -> None:
    model = tiny(kind).train()
    mems, exact, loss = model.init_mems(3), model.init_mems(3), torch.zeros(())
    for ids, labels in zip(TEXT[:, :30].split(6, 1), TEXT[:, 1:].split(6, 1), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids, mems=mems, labels=labels)
        wanted = model(ids, mems=exact, labels=labels)
        mems, exact = cast("BeyondMems", out.mems), cast("BeyondMems", wanted.mems)
        assert not any(x.requires_grad for x in mems.state_dict().values())
        assert_close("nats", out.nll.float().mean(), wanted.nll.mean(), 0.05)
        loss = out.nll.sum() if out.auxiliary is None else out.nll.sum() + out.auxiliary
    assert {x.dtype for x in mems.beyond} == {torch.float32}
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_matrix_teaches_keys_and_values_by_its_newest_write() -> None:
    """What waits to leave is read by the matrix alone, and W_k gets a gradient through it; what left has none."""
    model = tiny("linear", n_layer=1, mem_len=1).train()
    mems = read(model, [9])[1]
    gradients = []
    for own in (mems, replace(mems, n_valid=mems.n_valid.clamp(max=1))):  # the second has nothing that waits
        model.zero_grad()
        model(TEXT[:, 9:10], mems=own, labels=TEXT[:, 10:11]).nll.sum().backward()
        grad = model.attention_blocks()[0].qkv_net.weight.grad
        assert grad is not None
        gradients.append(grad[12:24].clone())  # W_k
    assert (gradients[0] - gradients[1]).abs().max() > 1e-4


def test_a_convolution_learns_from_its_own_loss_alone_and_nothing_else_does() -> None:
    model = tiny("conv").train()
    first = model(TEXT[:, :12], labels=TEXT[:, 1:13], keep_graph=True)
    out = model(TEXT[:, 12:24], mems=first.mems, labels=TEXT[:, 13:25])
    conv = {name for name, _ in model.named_parameters() if ".beyond." in name}
    out.nll.sum().backward(retain_graph=True)
    assert all(p.grad is None for name, p in model.named_parameters() if name in conv)
    model.zero_grad()
    out.auxiliary.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0} == conv
    with pytest.raises(ValueError, match="must have the shape of ids"):
        model(TEXT[:, :12], labels=TEXT[:, 1:12])
    assert model.eval()(TEXT[:, :12], labels=TEXT[:, 1:13]).auxiliary is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_call_uses_all_parameters(kind: str) -> None:
    """Processes that share gradients wait for each of them."""
    model = tiny(kind).train()
    out = model(**model.smallest_call())
    (out.nll.sum() if out.auxiliary is None else out.nll.sum() + out.auxiliary).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["linear", "conv", "delta, shift token"])  # a matrix; a loss of its own; tokens kept
def test_a_resumed_training_is_the_uninterrupted_one(kind: str) -> None:
    changes: dict[str, Any] = {
        "model": {**SIZES, **settings(kind), "dropout": 0.2},
        "train": {"tbptt_segments": 2, "accumulate": 2, "reset_at_documents": True, "checkpoint_layers": True},
    }
    losses = resumed_losses(2, 2, **changes)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_reads_on_token_by_token_and_its_sessions_are_exact(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    stream = open_stream(model, 3, tgt_len=4, token_by_token=True)
    assert isinstance(stream, CarriedState)
    n_bytes = stream.mems.n_bytes
    decoder = txl.Decoder(model, batch_size=3, tgt_len=4)
    decoder.feed(TEXT[:, :13])
    decoder.save(tmp_path / "session")
    scores = [decoder.step(token).full() for token in TEXT[:, 13:20].unbind(1)]
    again = txl.Decoder(model, batch_size=3, tgt_len=4)
    again.load(tmp_path / "session")
    for token, wanted in zip(TEXT[:, 13:20].unbind(1), scores, strict=True):
        assert torch.equal(again.step(token).full(), wanted)
    for t in range(31):
        stream.step(TEXT[:, t], torch.tensor([True, t % 2 == 0, True]))
    assert stream.mems.n_bytes == n_bytes
    state = decoder.take(0)
    for name in ("n_valid", "n_block"):
        with pytest.raises(ValueError, match="impossible lengths"):
            again.put(1, replace(state, tensors={**state.tensors, name: torch.tensor(-1)}))


@pytest.mark.parametrize("kind", [*KINDS, "first"])
def test_lanes_do_not_change_the_score(kind: str) -> None:
    """Blocks count from where a lane begins to read, so `tgt_len` is a multiple of `compression` here."""
    model = tiny(kind, n_layer=1)
    ids = np.random.default_rng(0).integers(0, 13, 80)
    one, several = (txl.evaluate(model, ids, tgt_len=4, batch_size=n) for n in (1, 2))
    if kind.startswith(("linear", "delta")):
        assert model.reach(4) > 4096 and several.nats == pytest.approx(one.nats)
    else:
        assert model.reach(4) < 40 and several.nats == pytest.approx(one.nats, rel=1e-6)
    without = txl.evaluate(model, ids, tgt_len=4, mem_len=0)
    assert model.with_context(mem_len=0).init_mems(1).length == 0
    plain = txl.TransformerXL(model.config.model_copy(update={"beyond": None}))
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if ".beyond." not in name})
    assert without.nats == pytest.approx(txl.evaluate(plain.eval(), ids, tgt_len=4, mem_len=0).nats, rel=1e-6)
    assert abs(without.nats - one.nats) > 1e-2


@pytest.mark.parametrize("kind", ["linear", "first"])
def test_a_run_is_trained_loaded_scored_and_written_on(kind: str, tmp_path: Path) -> None:
    changes = [f"model.beyond={kind}", "model.compression=3", "train.max_steps=12", "train.eval_interval=8"]
    recipe, corpus = str(write_recipe(tmp_path / "tiny.toml")), str(write_text(tmp_path / "text.txt"))
    txl.train(recipe, out=tmp_path / "run", overrides=changes, corpus=corpus, display=Display(quiet=True))
    model, tokenizer = txl.load(tmp_path / "run")
    assert isinstance(model, txl.BeyondTransformerXL)
    ids = np.asarray(tokenizer.encode("the cat sat on naïve mats — the cat sat on mats " * 3))
    assert len(list(txl.generate(model, torch.as_tensor(ids[:9]), max_new_tokens=7, seed=1))) == 7
    model.save_pretrained(tmp_path / "saved")
    again = txl.BeyondTransformerXL.from_pretrained(tmp_path / "saved")
    assert txl.evaluate(again, ids, tgt_len=5).nats == txl.evaluate(model, ids, tgt_len=5).nats
    with pytest.raises(ConfigError, match="is no part of TransformerXL; build a BeyondTransformerXL"):
        txl.TransformerXL.from_pretrained(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=rf"cannot express model.beyond={kind} \(only None\)"):
        export(tmp_path / "saved", tmp_path / "elsewhere", kind="huggingface")


def test_a_fine_tuned_model_reads_what_left(tmp_path: Path) -> None:
    head = {"kind": "classification", "labels": ("a", "b"), "tgt_len": 4}
    for kind in ("linear", "conv"):
        trainer = tiny_trainer(model={**SIZES, "beyond": kind, "head": head, "init_std": 0.3}, train={"batch_size": 4})
        frozen = {name for name, p in trainer.model.named_parameters() if not p.requires_grad}
        assert any(".beyond." in name for name in frozen) == (kind == "conv")
        losses = [trainer.train_step().nats for _ in range(3)]
        assert np.isfinite(losses).all()


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path) -> None:
    refused = [
        ({"beyond": "lineal"}, r"beyond \('lineal'\) must be 'linear', 'delta', .* or None; no other is registered"),
        ({"beyond": "mean", "mem_len": 0}, r"beyond \('mean'\) needs mem_len \(0\) of at least 1"),
        ({"beyond": "mean", "zero_first_memory": True}, r"would keep the zeros of zero_first_memory \(True\); set it to False"),
        ({"beyond": "mean", "same_length": True}, r"beyond \('mean'\) has no same_length \(True\); .* use beyond='linear'"),
        ({"beyond": "delta", "same_length": True}, r"beyond \('delta'\) has no same_length"),
        ({"beyond": "linear", "attention": "vaswani"}, r"attention 'vaswani' adds them; use attention='transformer_xl'"),
        ({"beyond": "mean", "compression": 0}, "compression"),
        ({"beyond": "mean", "compressed_len": 0}, "compressed_len"),
    ]
    for changes, message in refused:
        with pytest.raises(ConfigError, match=message) as caught:
            txl.TransformerXLConfig(**{**TINY, **cast("dict[str, Any]", changes)})
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"beyond \('max'\) has no same_length \(True\)"):
        tiny("max").with_context(same_length=True)
    with pytest.raises(ConfigError, match=r"beyond \(None\) must say what becomes of positions"):
        txl.BeyondTransformerXL(txl.TransformerXLConfig(**TINY))
    with pytest.raises(ConfigError, match="another kind of beyond 'first' already; choose another name"):
        txl.register_beyond(replace(OWN, layer="somewhere:Else"))
    with pytest.raises(
        ConfigError, match=r"precision int8 needs .* attention 'transformer_xl' with beyond 'mean' does not allow"
    ):
        open_stream(tiny("mean"), 1, tgt_len=4, precision="int8")
    with pytest.raises(ConfigError, match=r"keys of .* with beyond 'mean' cannot be kept"):
        txl.Reader(tiny("mean"), tgt_len=4)


def test_other_programs_get_no_model_that_they_cannot_read() -> None:
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    with pytest.raises(ConfigError, match=r"beyond \('delta'\) has no place in the ONNX file"):
        export_onnx(tiny("delta"), "model.onnx")


def test_transformers_gets_no_such_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
    from transformer_xl.huggingface import TransformerXLForCausalLM, TransformerXLPretrainedConfig

    config = TransformerXLPretrainedConfig(**{**TINY, "beyond": "mean"})
    with pytest.raises(ConfigError, match=r"with beyond 'mean', which transformers cannot carry; use txl.load"):
        TransformerXLForCausalLM(config)


def test_a_small_file_cannot_ask_for_huge_matrices_or_queues(tmp_path: Path) -> None:
    tiny("mean").save_pretrained(tmp_path)
    without_seal(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for name in ("compressed_len", "compression"):
        (tmp_path / "config.json").write_text(json.dumps(values | {name: 10**9}))
        model = txl.BeyondTransformerXL.from_pretrained(tmp_path)
        for use in (txl.Decoder, lambda model: model.init_mems(1), lambda model: model(TEXT[:1])):
            with pytest.raises(ConfigError, match=rf"{name} 1000000000.*a file may ask for 268 MB at most; if that is right"):
                use(model)
