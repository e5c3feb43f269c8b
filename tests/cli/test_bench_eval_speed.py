"""`txl bench eval-speed` as a person and a script use it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Txl
from transformer_xl.cost import eval_speed

ONE = ("bench", "eval-speed", "tiny.toml", "--lengths", "12,7", "--tgt-len", "4", "--repeats", "1", "--precision", "fp32")


def test_table(txl: Txl) -> None:
    answer = txl(*ONE, "--stride", "2")
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0].startswith("tiny: ")
    assert "vanilla of the same sizes" in lines[0]
    assert "segments of 4 with kept keys and values, all distances told apart" in lines[1]
    assert [line.split()[0] for line in lines[5:7]] == ["7", "12"]
    assert "every 2: ms" in lines[4]


def test_json(txl: Txl) -> None:
    answer = txl(*ONE, "--json", "--set", "eval.clamp_len=3")
    result = json.loads(answer.out)
    assert (result["recipe"], result["precision"], result["tgt_len"], result["clamp_len"]) == ("tiny", "fp32", 4, 3)
    assert result["interrupted"] is False
    assert set(result["parameters"]) == {"ours", "vanilla", "vanilla_positions"}
    for figures in result["figures"]:
        ratio = figures["vanilla_seconds"]["median"] / figures["our_seconds"]["median"]
        assert figures["slowdown"]["median"] == pytest.approx(ratio)
        assert figures["flops_ratio"] == pytest.approx(figures["vanilla_flops"] / figures["our_flops"])
    assert [figures["length"] for figures in result["figures"]] == [7, 12]


def test_time_of_the_processor(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.process_time", iter(range(1000)).__next__)
    result = json.loads(txl(*ONE, "--cpu-time", "--json").out)
    assert result["cpu_time"] is True
    assert [figures["slowdown"]["median"] for figures in result["figures"]] == [8, 8]  # a second each, of 1 and of 8 tokens
    assert "; seconds of the processor" in txl(*ONE, "--cpu-time").out
    monkeypatch.setattr("transformer_xl.model.precision.choose_device", torch.device)
    answer = txl(*ONE, "--cpu-time", "--device", "meta")
    assert "--cpu-time counts what a processor does, and device meta does the work here" in answer.complaint


def test_picture(txl: Txl, workbench: Path) -> None:
    assert txl(*ONE, "--plot", "speed.png").status == 0
    assert (workbench / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_interrupted_it_shows_what_it_has(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    original, left = eval_speed.seconds_of, [3]  # vanilla and ours of the first length, vanilla of the second

    def interrupted(*arguments: Any) -> float:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return original(*arguments)

    monkeypatch.setattr(eval_speed, "seconds_of", interrupted)
    answer = txl(*ONE, "--json")
    assert (answer.status, answer.err.strip()) == (130, "")
    result = json.loads(answer.out)
    assert result["interrupted"] is True
    assert [figures["length"] for figures in result["figures"]] == [7]
    left[0] = 1
    answer = txl(*ONE)
    assert (answer.status, answer.out) == (130, "")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("gone", "unknown recipe 'gone'"),
        ("--lengths 800;900", "--lengths '800;900' must be numbers of at least 1"),
        ("--tgt-len 0", "--tgt-len (0) must be at least 1"),
        ("--repeats 0", "--repeats (0) must be at least 1"),
        ("tiny.toml --lengths 7 --stride 8", "stride (8) must be at most the shortest attention length (7)"),
        ("--plot speed.txt", "--plot 'speed.txt' must end in .png, .svg, .pdf"),
        ("--precision fp16 --device cpu", "precision fp16 is for GPUs"),
        ("tiny.toml --set model.attention=vaswani", "recipe 'tiny' (attention 'vaswani') keeps no keys in a memory"),
        (
            "tiny.toml --set model.kind=lstm",
            "recipe 'tiny' (a model of kind 'lstm') keeps no keys in a memory; give",
        ),
        (
            "tiny.toml --lengths 7,10000000000000",
            "length of 10,000,000,000,000 and segments of 256 tokens; lower",
        ),
        ("tiny.toml --lengths 7 --tgt-len 10000000000000", "segments of 10,000,000,000,000 tokens; lower"),
        ("wt103-base --set data.corpus=mine", "how many words 'mine' has is known only after preparing it"),
    ],
)
def test_errors_are_one_line(txl: Txl, options: str, complaint: str) -> None:
    answer = txl("bench", "eval-speed", *options.split())
    assert (answer.status, answer.out) == (1, "")
    assert complaint in answer.complaint
