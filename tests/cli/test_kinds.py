"""Models of other kinds go through the same commands: trained, resumed, scored, written with."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Txl
from tests.training.helpers import differing, run_bits
from transformer_xl.checkpoint.run_directory import load

KINDS = {
    "vanilla": ("model.kind=vanilla", "model.intermediate_losses=true", "model.n_target=2"),
    "lstm": ("model.kind=lstm", "model.n_layer=2", "model.dropweight=0.2"),
    "delta": ("model.beyond=delta", "model.compression=3"),
    "conv": ("model.beyond=conv", "model.compressed_len=4"),
}


def sets(kind: str, *more: str) -> list[str]:
    return [part for value in (*KINDS[kind], *more) for part in ("--set", value)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def train(txl: Txl, kind: str, out: str, *more: str) -> None:
    assert txl("train", "tiny.toml", "--corpus", "text.txt", "--out", out, *sets(kind, *more)).status == 0


def test_resumed_is_uninterrupted(txl: Txl, workbench: Path, kind: str) -> None:
    # auxiliary losses end at a share of the budget, which is another where the budget was raised
    constant = ("optim.schedule=constant", *(("model.intermediate_losses=false",) if kind == "vanilla" else ()))
    train(txl, kind, "whole", *constant)
    train(txl, kind, "parts", *constant, "train.max_steps=24")
    answer = txl("train", "--resume", "--out", "parts", "--set", "train.max_steps=40")
    assert answer.status == 0, answer.err
    assert "resumed at step 24" in answer.err
    assert differing(run_bits(workbench / "whole"), run_bits(workbench / "parts")) == ["log"]  # one has a score more


def test_scored_and_written_with(txl: Txl, workbench: Path, kind: str) -> None:
    train(txl, kind, "run2")
    final = json.loads((workbench / "run2" / "metrics.jsonl").read_text().splitlines()[-1])
    assert ("loss_without_memory" in final) == (kind != "vanilla")
    score = json.loads(txl("eval", "run2", "--split", "valid", "--precision", "fp32", "--json").out)
    assert score["loss"] == pytest.approx(final["loss"], abs=1e-6)
    exact = txl("eval", "run2", "--json", *(("--tgt-len", "1", "--ext-len", "4") if kind == "vanilla" else ()))
    assert json.loads(exact.out)["tokens"] == json.loads(txl("eval", "run2", "--json").out)["tokens"]
    written = txl("generate", "run2", "--prompt", "the cat", "--tokens", "12", "--seed", "1")
    assert written.status == 0, written.err
    assert written.out.startswith("the cat")
    assert txl("generate", "run2", "--prompt", "the cat", "--tokens", "12", "--seed", "1").out == written.out


def test_a_session_goes_on(txl: Txl, kind: str) -> None:
    train(txl, kind, "run2")
    options = ("--memory", "book.session", "--temperature", "0")
    first = txl("generate", "run2", "--prompt", "the cat", "--tokens", "6", *options)
    assert first.status == 0, first.err
    second = txl("generate", "run2", "--tokens", "6", *options)
    assert second.status == 0, second.err
    at_once = txl("generate", "run2", "--prompt", "the cat", "--tokens", "12", "--temperature", "0")
    assert first.out.rstrip("\n") + second.out.rstrip("\n") == at_once.out.rstrip("\n")


def test_what_a_kind_does_not_have_is_one_line(txl: Txl, kind: str) -> None:
    train(txl, kind, "run2")
    if kind in ("vanilla", "lstm"):
        assert kind in txl("eval", "run2", "--mem-len", "9").complaint
        assert kind in txl("eval", "run2", "--clamp-len", "9").complaint
    else:
        assert kind in txl("eval", "run2", "--same-length").complaint
        assert kind in txl("generate", "run2", "--precision", "int8").complaint
    assert kind in txl("convert", "run2", "out", "--to", "huggingface").complaint
    if kind == "vanilla":
        assert "6 tokens is longer than the 5 positions" in txl("eval", "run2", "--tgt-len", "6").complaint


@pytest.mark.parametrize(
    ("kind", "setting", "complaint"),
    [
        ("vanilla", "model.max_len=4", "train.tgt_len (5) must be at most model.max_len (4)"),
        ("vanilla", "eval.ext_len=1", "eval.tgt_len and eval.ext_len together (6) must be at most model.max_len (5)"),
        ("vanilla", "eval.mem_len=8", "mem_len (8) must be 0"),
        ("lstm", "eval.clamp_len=9", "clamp_len (9) needs a memory of positions"),
    ],
)
def test_what_validation_would_fail_at_is_refused_at_once(
    txl: Txl, workbench: Path, kind: str, setting: str, complaint: str
) -> None:
    answer = txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "run2", *sets(kind, setting))
    assert complaint in answer.complaint
    assert not (workbench / "run2").exists()


def test_unknown_kind(txl: Txl) -> None:
    answer = txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "new", "--set", "model.kind=vanila")
    assert answer.complaint == (
        "model: kind of model 'vanila' is not registered (did you mean 'vanilla'?); if it is your own, import its module first"
    )


def test_an_exported_model_is_read_as_it_can_be(txl: Txl, workbench: Path, kind: str) -> None:
    train(txl, kind, "run2")
    model, tokenizer = load("run2")
    model.save_pretrained(workbench / "exported")
    tokenizer.save(workbench / "exported" / "tokenizer.json")
    score = json.loads(txl("eval", "exported", "--file", "text.txt", "--json").out)
    assert score["tokens"] > 1000


def test_memory_is_compared_where_there_is_one(txl: Txl, kind: str) -> None:
    train(txl, kind, "run2")
    answer = txl("eval", "run2", "--compare-memory")
    if kind == "vanilla":
        assert answer.complaint == "--compare-memory: 'run2' is read without memory (mem_len 0) already; leave it out"
    else:
        assert "memory is worth" in answer.out


def test_what_is_not_counted_is_said(txl: Txl, kind: str) -> None:
    answer = txl("train", "tiny.toml", "--corpus", "text.txt", "--dry-run", "--set", "model.vocab_size=99", *sets(kind))
    name = f"transformer_xl with beyond '{kind}'" if kind in ("delta", "conv") else kind
    assert f"parameters of kind {name}, " in answer.out
    assert answer.out.endswith(f"memory, operations and time cannot be planned for models of kind {name}\n")
    refused = txl("plan", "tiny.toml", "--set", "model.vocab_size=99", *sets(kind)).complaint
    assert refused.startswith("only transformer_xl models can be planned, and ") and name in refused
