"""`txl plan` and `txl train --dry-run` as a person and a script use them; the machine's own figures are made up."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Txl
from transformer_xl.tools import hardware


@pytest.fixture(autouse=True)
def made_up_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_bandwidth", lambda device, n_bytes: 1e10)
    monkeypatch.setattr(hardware, "matmul_rate", lambda device, dtype: 2e11)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_plan_is_one_screen(txl: Txl) -> None:
    answer = txl("plan", "scale-1b", "--gpus", "64")
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0] == "scale-1b: transformer_xl, 16 layers, width 2048, memory 1,024; 64 × h100, bf16"
    assert lines[1].split() == ["parameters", "1,007,001,600"]
    assert any(line.startswith("budget ") and "1,000,000,000,000 tokens" in line for line in lines)
    assert any(line.startswith("assumed: 0.3 of that rate: ") for line in lines)
    assert len(lines) < 36


def test_json_has_every_figure(txl: Txl) -> None:
    answer = txl("plan", "wt103-large", "--gpus", "8", "--gpu", "a100", "--set", "train.accumulate=4", "--json")
    values = json.loads(answer.out)
    assert values["parameters"] == 285_170_506
    assert values["memory"]["weights"] == 4 * 285_170_506
    assert values["memory"]["total"] == sum(v for name, v in values["memory"].items() if name != "total")
    assert values["layout"] == {"division": "ddp", "accumulate": 4, "checkpointing": False}
    assert values["flops_per_token"]["needed"] == values["flops_per_token"]["forward"] + values["flops_per_token"]["backward"]
    assert values["fits"] is True


def test_given_figures_count(txl: Txl) -> None:
    given = ("--flops", "200", "--bandwidth", "1000", "--memory", "20")
    hardware = json.loads(txl("plan", "wt103-base", *given, "--gpus", "2", "--json").out)["hardware"]
    assert (hardware["flops"], hardware["bandwidth"], hardware["memory"]) == (200e12, 1e12, 20e9)


def test_a_plan_of_ones_own_recipe_needs_the_vocabulary(txl: Txl) -> None:
    assert txl("plan", "tiny.toml").status == 0
    words = ("plan", "tiny.toml", "--set", "tokenizer.kind=word")
    assert "for a plan say it with --set model.vocab_size=N" in txl(*words).complaint
    assert txl(*words, "--set", "model.vocab_size=999").status == 0


def test_this_machine_is_planned_for_unless_another_is_named(txl: Txl) -> None:
    assert "; this machine's cpu, " in txl("plan", "tiny.toml").out.splitlines()[0]
    assert "; a100, " in txl("plan", "tiny.toml", "--gpu", "a100").out.splitlines()[0]
    many = txl("plan", "tiny.toml", "--gpus", "2").out
    assert "; 2 × h100, " in many.splitlines()[0]
    assert "this machine has fewer devices, --gpu names others" in " ".join(many.split())
    given = ("--flops", "1", "--bandwidth", "10", "--memory", "2")
    described = txl("plan", "tiny.toml", *given).out
    assert "; the given device, fp32" in described and "1 TFLOP/s fp32, as given" in described
    assert "0.3 of that rate" in described and "no time for launching kernels" in described
    assert "1 TFLOP/s fp32, measured now; flops as given" in txl("plan", "tiny.toml", *given[:2]).out


def test_complaints(txl: Txl) -> None:
    assert "unknown GPU 'a10'" in txl("plan", "--gpu", "a10").complaint
    assert "must be a multiple of --gpus (5)" in txl("plan", "--gpus", "5").complaint
    for figure in ("--flops", "--bandwidth", "--memory"):
        for value in ("0.0", "-1.0", "nan", "inf"):
            assert f'Invalid value "{value}" for {figure}. Must be ' in txl("plan", f"{figure}={value}").complaint


def test_a_dry_run_says_what_a_run_needs_and_does_nothing(txl: Txl, workbench: Path) -> None:
    before = files(workbench)
    answer = txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "new", "--dry-run", "--set", "train.precision=fp32")
    assert (answer.status, answer.err) == (0, "")
    text = answer.out
    for name in ("parameters", "memory of a device", "operations of a token", "time of a step", "budget"):
        assert any(line.startswith(name) for line in text.splitlines()), name
    assert "; this machine's cpu, fp32" in text
    assert "0.2 TFLOP/s fp32, measured now" in text
    assert files(workbench) == before
    assert not (workbench / "new").exists()


@pytest.mark.parametrize("recipe", ["tiny.toml", "xlnet-base"])
def test_the_name_of_a_run_does_not_act_on_the_terminal(txl: Txl, recipe: str) -> None:
    answer = txl("train", recipe, "--dry-run", "--set", "name=\x1b[31mred")
    assert answer.out.startswith(r"\x1b[31mred: ")


def test_nor_does_the_name_of_a_recipe_to_compare_with(txl: Txl, workbench: Path) -> None:
    (workbench / "other.toml").write_text('name = "o\\u001b[1m"' + (workbench / "tiny.toml").read_text())
    compared = txl("train", "tiny.toml", "--corpus", "text.txt", "--dry-run", "--set", "compared_with=other.toml").out
    assert r"compared with the recipe o\x1b[1m: " in compared


def test_a_dry_run_has_the_parameters_of_the_run(txl: Txl) -> None:
    said = txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "new", "--set", "train.max_steps=1").err.split()[1]
    assert f" {said}\n" in txl("train", "tiny.toml", "--dry-run").out


def test_a_dry_run_counts_the_characters_that_a_vocabulary_gets(txl: Txl, workbench: Path) -> None:
    settings = ("--set", "train.max_steps=1", "--out")
    assert txl("train", "tiny.toml", "--corpus", "text.txt", "--set", "tokenizer.kind=char", *settings, "base").status == 0
    (workbench / "more.txt").write_text((workbench / "text.txt").read_text() + "\u03b1\u03b2", encoding="utf-8")
    command = ("train", "more.txt", "--from", "base", "--grow")
    planned = txl(*command, "--dry-run").out
    assert "; it grows by 2\n" in planned
    said = txl(*command, *settings, "grown").err.split(" parameters", 1)[0].split()[-1]
    assert f" {said}\n" in planned and f" {said}\n" not in txl("train", "text.txt", "--from", "base", "--dry-run").out


def test_a_dry_run_says_what_is_compared(txl: Txl) -> None:
    compared = ("train", "tiny.toml", "--corpus", "text.txt", "--dry-run", "--set", "compared_with=enwik8-base")
    last = txl(*compared).out.splitlines()[-1]
    assert last.startswith("compared with the recipe enwik8-base: ")
    assert " parameters to its 41,082,112 with the same vocabulary, -" in last
    assert "did you mean 'enwik8-base'" in txl(*compared[:-1], "compared_with=enwik8-bas").complaint
    assert "compared with" not in txl("train", "tiny.toml", "--corpus", "text.txt", "--dry-run").out


def test_a_dry_run_of_a_rival_says_what_it_needs_and_what_it_is_compared_with(txl: Txl) -> None:
    answer = txl("train", "lstm-ptb", "--dry-run")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("lstm-ptb: lstm, ")
    assert any(line.split() == ["parameters", "24,221,600"] for line in answer.out.splitlines())
    compared = "compared with the recipe ptb: 24,221,600 parameters to its 23,957,776 with the same vocabulary, +1.1 %"
    assert answer.out.splitlines()[-1] == compared


def test_a_dry_run_of_a_kind_that_cannot_be_planned_says_what_it_can(txl: Txl) -> None:
    lines = txl("train", "xlnet-base", "--dry-run", "--set", "data.corpus=text.txt").out.splitlines()
    assert " parameters of kind xlnet, vocabulary of " in lines[0]
    assert lines[-1] == "memory, operations and time cannot be planned for models of kind xlnet"


def test_a_dry_run_of_a_run_that_is_there(txl: Txl, workbench: Path) -> None:
    before = files(workbench / "run")
    answer = txl("train", "--resume", "--out", "run", "--dry-run", "--set", "train.max_steps=80")
    assert "tiny: transformer_xl, 2 layers, width 8, memory 6" in answer.out
    assert "1,600 tokens, 80 steps" in answer.out
    assert files(workbench / "run") == before


def test_a_logger_is_looked_for_before_anything_else(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    answer = txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "new", "--logger", "wandb")
    assert "logger 'wandb' is not installed; pip install wandb" in answer.complaint
    assert not (workbench / "new").exists()
    assert "unknown logger 'wand'; did you mean 'wandb'" in txl("train", "--logger", "wand").complaint
