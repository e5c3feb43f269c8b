"""`txl bench` as a person and a script use it; the machine's own figures are made up, for measuring them takes a while."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.conftest import Txl, change_settings, save
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.cost import bench, hardware
from transformer_xl.model.transformer_xl import TransformerXL

DECODE = ("bench", "decode", "run", "--no-compile", "--tokens", "3")
EVAL = ("bench", "eval", "run", "--tokens", "20")


@pytest.fixture(autouse=True)
def made_up_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_N_WARM_UP", 1)
    monkeypatch.setattr(hardware, "memory_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(hardware, "matmul_rate", lambda device, dtype: 4e9 if dtype == torch.bfloat16 else 1e9)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TransformerXL, np.ndarray]]:
    """What is measured, and what it reads."""
    seen: list[tuple[TransformerXL, np.ndarray]] = []
    for name in ("measure_decoding", "measure_scoring"):
        original = getattr(bench, name)

        def watched(model: TransformerXL, ids: np.ndarray, original: Any = original, **options: Any) -> Any:
            seen.append((model, ids))
            return original(model, ids, **options)

        monkeypatch.setattr(bench, name, watched)
    return seen


def test_table_of_decoding(txl: Txl, home: Path) -> None:
    answer = txl(*DECODE, "--rows", "2,1")
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0] == (
        f"run: {sum(p.numel() for p in load('run')[0].parameters()):,} parameters, 6 positions of memory; "
        f"reads validation split of {home / 'text.txt'}"
    )
    assert f"torch {torch.__version__}; memory is read at 1.0 GB/s" in lines[1]
    modes = [[precision, "eager", rows] for precision in ("fp32", "bf16", "int8") for rows in ("2", "1")]
    assert [line.split()[:3] for line in lines[4:10]] == modes


def test_json_of_decoding_is_consistent(txl: Txl) -> None:
    answer = txl(*DECODE, "--rows", "1,4", "--precision", "fp32,int8", "--json")
    assert (answer.status, answer.err) == (0, "")
    result = json.loads(answer.out)
    assert (result["run"], result["mem_len"], result["bandwidth"]) == ("run", 6, 1e9)
    assert (result["skipped"], result["interrupted"]) == ({}, False)
    assert result["machine"]["torch"] == torch.__version__
    modes = [(figures["precision"], figures["compiled"], figures["rows"]) for figures in result["figures"]]
    assert modes == [("fp32", False, 1), ("fp32", False, 4), ("int8", False, 1), ("int8", False, 4)]
    for one, four in (result["figures"][:2], result["figures"][2:]):
        for figures in (one, four):
            assert figures["limit_seconds"] == pytest.approx(figures["bytes_per_step"] / 1e9)
        assert four["held_bytes"]["memory"] == 4 * one["held_bytes"]["memory"]


def test_memory_of_another_length(txl: Txl, read: list[Any]) -> None:
    result = json.loads(txl(*DECODE, "--precision", "fp32", "--mem-len", "100", "--json").out)
    assert result["mem_len"] == 100
    assert [model.mem_len for model, _ in read] == [100]
    slots = 176  # 101 keys in sight and pieces of 64, in multiples of 16
    assert result["figures"][0]["held_bytes"]["memory"] == 2 * 2 * slots * 8 * 4 + 16


def test_what_is_read(txl: Txl, workbench: Path, read: list[Any]) -> None:
    one = ("--precision", "fp32")
    save(*load("run"), "exported")
    text = (workbench / "text.txt").read_bytes()
    assert "; reads validation split of " in txl(*DECODE, *one).out.splitlines()[0]
    assert txl(*DECODE, *one, "--file", "tiny.toml").out.splitlines()[0].endswith("; reads file tiny.toml")
    exported = ("bench", "decode", "exported", "--no-compile", "--tokens", "3")
    assert txl(*exported, *one).out.splitlines()[0].endswith("; reads random tokens")
    change_settings(workbench / "run", "data", corpus="x" * 300)
    assert txl(*DECODE, *one).err.endswith("cannot be: '" + "x" * 300 + "': File name too long; give a shorter name\n")
    read.pop()
    change_settings(workbench / "run", "data", corpus=str(workbench / "gone.txt"))
    answer = txl(*DECODE, *one)
    assert answer.out.splitlines()[0].endswith("; reads random tokens")
    assert answer.err.startswith("warning: random tokens are read, because the run's text cannot be: corpus ")
    valid, file, random, instead = (ids for _, ids in read)
    assert bytes(valid.tolist()) in text
    assert bytes(file.tolist()) == (workbench / "tiny.toml").read_bytes()
    assert len(set(random.tolist())) == 256
    np.testing.assert_array_equal(random, instead)


def test_without_a_compiler_the_rest_is_measured(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.cost.bench.cannot_compile", lambda device: "no C++ compiler is found")
    options = ("bench", "decode", "run", "--tokens", "2", "--precision", "fp32,bf16")
    result = json.loads(txl(*options, "--json").out)
    assert [(figures["precision"], figures["compiled"]) for figures in result["figures"]] == [("fp32", False), ("bf16", False)]
    assert result["skipped"] == {"compiled": "no C++ compiler is found"}
    assert txl(*options).out.splitlines()[-1] == "not measured: compiled: no C++ compiler is found"
    assert txl(*options, "--compile").complaint == "nothing could be measured: no C++ compiler is found"


def test_compiled_code_is_asked_for(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def not_compiled(model: TransformerXL, ids: np.ndarray, *, compile: bool, n_row: int, **_: Any) -> dict[str, Any]:
        asked.append((compile, n_row))
        return {"compiled": compile, "rows": n_row}

    monkeypatch.setattr(bench, "measure_decoding", not_compiled)
    monkeypatch.setattr("transformer_xl.cost.bench.cannot_compile", lambda device: None)
    options = ("bench", "decode", "run", "--precision", "fp32", "--rows", "1,2", "--json")
    both = json.loads(txl(*options).out)["figures"]
    assert asked == [(figures["compiled"], figures["rows"]) for figures in both]
    assert asked == [(False, 1), (False, 2), (True, 1), (True, 2)]
    asked.clear()
    txl(*options, "--compile")
    assert asked == [(True, 1), (True, 2)]


@pytest.mark.parametrize("changes", [{"attention": "vaswani"}, {"mem_len": 0}])
def test_models_that_read_again(txl: Txl, workbench: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.cost.bench.cannot_compile", lambda device: None)
    size = {"n_layer": 1, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "mem_len": 4}
    config = TransformerXLConfig(vocab_size=256, **{**size, **changes})
    save(TransformerXL(config), load("run")[1], "again")
    result = json.loads(txl("bench", "decode", "again", "--tokens", "2", "--json").out)
    modes = [(figures["precision"], figures["compiled"]) for figures in result["figures"]]
    assert modes == [("fp32", False), ("bf16", False)]
    assert all(figures["bytes_per_step"] is None for figures in result["figures"])
    assert set(result["skipped"]) == {"fp32 compiled", "bf16 compiled", "int8 eager", "int8 compiled"}
    assert all("needs keys that stay the same" in why for why in result["skipped"].values())


def test_without_memory(txl: Txl, workbench: Path) -> None:
    change_settings(workbench / "run", "model", same_length=True)  # which cannot be without memory
    result = json.loads(txl(*DECODE, "--mem-len", "0", "--precision", "fp32", "--json").out)
    assert (result["mem_len"], len(result["figures"])) == (0, 1)
    assert json.loads(txl(*EVAL, "--mem-len", "0", "--tgt-len", "8", "--json").out)["mem_len"] == 0


def test_interrupted_it_shows_what_it_has(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    original = bench.measure_decoding

    def interrupted(*arguments: Any, precision: Any, **options: Any) -> dict[str, Any]:
        if precision == stop_at:
            raise KeyboardInterrupt
        return original(*arguments, precision=precision, **options)

    monkeypatch.setattr(bench, "measure_decoding", interrupted)
    stop_at = "int8"
    answer = txl(*DECODE, "--json")
    assert (answer.status, answer.err) == (130, "")
    result = json.loads(answer.out)
    assert [figures["precision"] for figures in result["figures"]] == ["fp32", "bf16"]
    assert result["interrupted"]
    stop_at = "fp32"
    answer = txl(*DECODE)
    assert (answer.status, answer.out, answer.err) == (130, "", "")


def test_it_says_how_long_compiling_takes(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_decoding", interrupted)
    monkeypatch.setattr(bench, "cannot_compile", lambda device: None)
    first = txl("bench", "decode", "run", "--rows", "1,2").err.splitlines()[0]
    assert first == "6 of 12 measurements compile first, about half a minute each; --no-compile leaves them out"


def test_table_of_scoring(txl: Txl) -> None:
    answer = txl(*EVAL, "--tgt-len", "8,16", "--batch-size", "1,2", "--precision", "fp32,bf16")
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[1].endswith("multiplies 1 GFLOP/s in fp32, 4 GFLOP/s in bf16")
    expected = [[name, length, size] for name in ("fp32", "bf16") for size in "12" for length in ("8", "16")]
    assert [line.split()[:3] for line in lines[4:12]] == expected


def test_json_of_scoring_is_consistent(txl: Txl, read: list[Any]) -> None:
    result = json.loads(txl(*EVAL, "--tgt-len", "8,16", "--batch-size", "3", "--precision", "fp32,int8", "--json").out)
    assert result["matmul_rates"] == {"fp32": 1e9, "int8": 4e9}  # rounded weights are multiplied in bf16
    assert [(figures["tgt_len"], figures["batch_size"]) for figures in result["figures"]] == [(8, 3), (16, 3)] * 2
    for figures in result["figures"]:
        rate = result["matmul_rates"][figures["precision"]]
        assert figures["limit_tokens_per_second"] == pytest.approx(rate / figures["flops_per_token"])
    assert result["figures"][1]["flops_per_token"] > result["figures"][0]["flops_per_token"]
    assert all(model.mem_len == 6 for model, _ in read)


def test_scoring_is_measured_as_the_run_is_evaluated(txl: Txl, workbench: Path, read: list[Any]) -> None:
    change_settings(workbench / "run", "eval", mem_len=3, same_length=True, clamp_len=2)
    options = (*EVAL, "--tgt-len", "8", "--batch-size", "1", "--precision", "fp32")
    for more in ((), ("--mem-len", "4"), ("--mem-len", "0")):
        assert txl(*options, *more).status == 0
    assert [(model.mem_len, model.same_length, model.clamp_len) for model, _ in read] == [
        (3, True, 2),
        (4, True, 2),
        (0, False, 2),
    ]


def test_precision_auto_is_measured_once(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", dict, raising=False)
    assert [f["precision"] for f in json.loads(txl(*EVAL, "--tgt-len", "8", "--json").out)["figures"]] == ["fp32"]
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    assert {f["precision"] for f in json.loads(txl(*EVAL, "--tgt-len", "8", "--json").out)["figures"]} == {"fp32", "bf16"}


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("decode run --precision fp32,int9", "unknown --precision 'int9'; did you mean 'int8'?"),
        ("decode run --precision auto", "unknown --precision 'auto'; known: bf16, fp16, fp32, int8"),
        ("decode run --precision fp16", "precision fp16 is for GPUs"),
        ("decode run --rows 1;4", "--rows '1;4' must be numbers of at least 1 with commas between, such as 1,4,16"),
        ("decode run --rows 0", "--rows '0' must be numbers of at least 1"),
        ("eval run --tgt-len 32,x", "--tgt-len '32,x' must be numbers of at least 1"),
        ("eval run --batch-size=-1", "--batch-size '-1' must be numbers of at least 1"),
        ("eval run --precision aut", "unknown --precision 'aut'; did you mean 'auto'?"),
    ],
)
def test_errors_are_one_line(txl: Txl, workbench: Path, command: str, complaint: str) -> None:
    (workbench / "empty.txt").touch()
    answer = txl("bench", *command.split())
    assert (answer.status, answer.out) == (1, "")
    assert complaint in answer.complaint


def test_on_a_terminal_it_shows_how_far_it_is(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setattr("transformer_xl.console.DRAW_SECONDS", 0)
    answer = txl(*DECODE, "--precision", "fp32", "--json")
    assert "how fast memory is read" in answer.err
    assert "fp32 eager" in answer.err
    assert json.loads(answer.out)["bandwidth"] == 1e9
