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
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tools import bench, hardware

DECODE = ("bench", "run", "--no-compile", "--tokens", "3")


@pytest.fixture(autouse=True)
def made_up_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_N_WARM_UP", 1)
    monkeypatch.setattr(hardware, "memory_bandwidth", lambda device: 1e9)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TransformerXL, np.ndarray]]:
    """What is measured, and what it reads."""
    seen: list[tuple[TransformerXL, np.ndarray]] = []
    original = bench.measure_decoding

    def watched(model: TransformerXL, ids: np.ndarray, **options: Any) -> Any:
        seen.append((model, ids))
        return original(model, ids, **options)

    monkeypatch.setattr(bench, "measure_decoding", watched)
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
        assert four["bytes_per_step"] > one["bytes_per_step"]


def test_memory_of_another_length(txl: Txl, workbench: Path, read: list[Any]) -> None:
    change_settings(workbench / "run", "model", same_length=True)  # which cannot be without memory
    for n in (100, 0):
        assert json.loads(txl(*DECODE, "--precision", "fp32", "--mem-len", str(n), "--json").out)["mem_len"] == n
    assert [model.mem_len for model, _ in read] == [100, 0]


def test_what_is_read(txl: Txl, workbench: Path, read: list[Any]) -> None:
    one = ("--precision", "fp32")
    save(*load("run"), "exported")
    text = (workbench / "text.txt").read_bytes()
    assert "; reads validation split of " in txl(*DECODE, *one).out.splitlines()[0]
    assert txl(*DECODE, *one, "--file", "tiny.toml").out.splitlines()[0].endswith("; reads file tiny.toml")
    exported = ("bench", "exported", "--no-compile", "--tokens", "3")
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
    monkeypatch.setattr("transformer_xl.tools.bench.cannot_compile", lambda device: "no C++ compiler is found")
    options = ("bench", "run", "--tokens", "2", "--precision", "fp32,bf16")
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
    monkeypatch.setattr(bench, "cannot_compile", lambda device: None)
    options = ("bench", "run", "--precision", "fp32", "--rows", "1,2", "--json")
    answer = txl(*options)
    assert answer.err.startswith("2 of 4 measurements compile first, ")
    assert asked == [(False, 1), (False, 2), (True, 1), (True, 2)]
    asked.clear()
    txl(*options, "--compile")
    assert asked == [(True, 1), (True, 2)]


@pytest.mark.parametrize("changes", [{"attention": "vaswani"}, {"mem_len": 0}])
def test_models_that_read_again(txl: Txl, workbench: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.tools.bench.cannot_compile", lambda device: None)
    size = {"n_layer": 1, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "mem_len": 4}
    config = TransformerXLConfig(vocab_size=256, **{**size, **changes})
    save(TransformerXL(config), load("run")[1], "again")
    result = json.loads(txl("bench", "again", "--tokens", "2", "--json").out)
    modes = [(figures["precision"], figures["compiled"]) for figures in result["figures"]]
    assert modes == [("fp32", False), ("bf16", False)]
    assert all(figures["bytes_per_step"] is None for figures in result["figures"])
    assert set(result["skipped"]) == {"fp32 compiled", "bf16 compiled", "int8 eager", "int8 compiled"}
    assert all("needs keys that stay the same" in why for why in result["skipped"].values())


def test_interrupted_it_shows_what_it_has(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    original = bench.measure_decoding

    def interrupted(*arguments: Any, precision: Any, **options: Any) -> dict[str, Any]:
        if precision == stop_at:
            raise KeyboardInterrupt
        return original(*arguments, precision=precision, **options)

    monkeypatch.setattr(bench, "measure_decoding", interrupted)
    stop_at = "int8"
    answer = txl(*DECODE, "--json")
    assert (answer.status, answer.err) == (130, "interrupted\n")
    result = json.loads(answer.out)
    assert [figures["precision"] for figures in result["figures"]] == ["fp32", "bf16"]
    assert result["interrupted"]
    stop_at = "fp32"
    answer = txl(*DECODE)
    assert (answer.status, answer.out, answer.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("run --precision fp32,int9", "unknown --precision 'int9'; did you mean 'int8'?"),
        ("run --precision auto", "unknown --precision 'auto'; known: bf16, fp16, fp32, int8"),
        ("run --precision fp16", "precision fp16 is for GPUs"),
        ("run --rows 1;4", "--rows '1;4' must be numbers of at least 1 with commas between, such as 1,4,16"),
    ],
)
def test_errors_are_one_line(txl: Txl, command: str, complaint: str) -> None:
    answer = txl("bench", *command.split())
    assert (answer.status, answer.out) == (1, "")
    assert complaint in answer.complaint
