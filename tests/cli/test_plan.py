"""`txl plan` and `txl train --dry-run` as a person and a script use them; the machine's own figures are made up."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Txl
from transformer_xl.config.recipes import load_recipe, recipe_names
from transformer_xl.cost import hardware


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
    assert lines[0] == (
        "scale-1b: 16 layers, width 2048, 16 heads of 128, inner 8192, memory 1,024; 64 × h100 on 8 machines, bf16"
    )
    assert lines[1].split() == ["parameters", "1,007,001,600"]
    assert any(line.startswith("budget ") and "1,000,000,000,000 tokens" in line for line in lines)
    assert any(line.startswith("assumed: efficiency 0.3: ") for line in lines)
    assert len(lines) < 36


@pytest.mark.parametrize(("options", "division"), [((), "fsdp"), (("--divide", "ddp"), "ddp")])
def test_a_recipe_may_say_how_weights_are_divided(txl: Txl, options: tuple[str, ...], division: str) -> None:
    answer = txl("plan", "wt103-base", "--gpus", "4", "--set", "train.parallel=fsdp", *options, "--json")
    assert json.loads(answer.out)["layout"]["division"] == division


def test_json_has_every_figure(txl: Txl) -> None:
    answer = txl("plan", "wt103-large", "--gpus", "8", "--gpu", "a100", "--set", "train.accumulate=4", "--json")
    values = json.loads(answer.out)
    assert values["parameters"] == 285_170_506
    assert values["memory"]["weights"] == 4 * 285_170_506
    assert values["memory"]["total"] == sum(v for name, v in values["memory"].items() if name != "total")
    assert values["layout"] == {"gpus": 8, "per_machine": 8, "division": "ddp", "accumulate": 4, "checkpointing": False}
    assert values["flops_per_token"]["needed"] == values["flops_per_token"]["forward"] + values["flops_per_token"]["backward"]
    assert values["fits"] is True


def test_given_figures_count(txl: Txl) -> None:
    given = ("--flops", "200", "--bandwidth", "1000", "--memory", "20", "--network", "12.5", "--efficiency", "0.4")
    values = json.loads(
        txl("plan", "wt103-base", *given, "--divide", "fsdp", "--gpus", "2", "--per-machine", "1", "--json").out
    )
    hardware = values["hardware"]
    assert (hardware["flops"], hardware["bandwidth"], hardware["memory"]) == (200e12, 1e12, 20e9)
    assert (hardware["network"], hardware["efficiency"], values["layout"]["division"]) == (12.5e9, 0.4, "fsdp")
    assert values["machines"] == 2


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
    assert "1 TFLOP/s fp32, measured now; flops, bandwidth, memory as given" in txl("plan", "tiny.toml", *given).out


def test_complaints(txl: Txl) -> None:
    assert "unknown GPU 'a10'" in txl("plan", "--gpu", "a10").complaint
    assert "must be a multiple of --gpus (5)" in txl("plan", "--gpus", "5").complaint
    for figure in ("--flops", "--bandwidth", "--memory", "--network", "--efficiency"):
        for value in ("0.0", "-1.0", "nan", "inf"):
            assert f'Invalid value "{value}" for {figure}. Must be ' in txl("plan", f"{figure}={value}").complaint
    assert 'Invalid value "30.0" for --efficiency. Must be <= 1' in txl("plan", "--efficiency", "30").complaint


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


@pytest.mark.parametrize("recipe", ["tiny.toml", "lstm-ptb"])
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


@pytest.mark.parametrize(
    ("recipe", "lines"),
    [
        (
            "lstm-ptb",
            [
                "lstm-ptb: 24,221,600 parameters of kind lstm, vocabulary of 10,000 (words of ptb)",
                "compared with the recipe ptb: 24,221,600 parameters to its 23,957,776 with the same vocabulary, +1.1 %",
            ],
        ),
        (
            "vanilla-text8-12",
            [
                "vanilla-text8-12: 40,964,662 parameters of kind vanilla, vocabulary of 27 (chars of text8)",
                "compared with the recipe text8-base: 40,964,662 parameters to its 40,964,635 with the same vocabulary, +0.0 %",
            ],
        ),
    ],
)
def test_a_dry_run_of_another_kind_says_what_it_can(txl: Txl, workbench: Path, recipe: str, lines: list[str]) -> None:
    before = files(workbench)
    answer = txl("train", recipe, "--dry-run")
    assert (answer.status, answer.err) == (0, "")
    unplanned = f"memory, operations and time cannot be planned for models of kind {load_recipe(recipe).model.kind}"
    assert answer.out.splitlines() == [*lines, unplanned]
    assert files(workbench) == before
    unknown = txl("train", recipe, "--dry-run", "--set", "data.corpus=mine.txt", "--set", "tokenizer.kind=word")
    assert "for a plan say it with --set model.vocab_size=N" in unknown.complaint
    assert f"'{recipe}' is of kind" in txl("plan", recipe).complaint


def test_every_rival_can_be_run_dry(txl: Txl) -> None:
    others = [name for name in recipe_names() if load_recipe(name).model.kind != "transformer_xl"]
    assert len(others) > 10
    for name in others:
        assert txl("train", name, "--dry-run").status == 0, name


def test_a_dry_run_of_a_run_that_is_there(txl: Txl, workbench: Path) -> None:
    before = files(workbench / "run")
    answer = txl("train", "--resume", "--out", "run", "--dry-run", "--set", "train.max_steps=80")
    assert "tiny: 2 layers, width 8, 2 heads of 4, inner 12" in answer.out
    assert "1,600 tokens, 80 steps" in answer.out
    assert files(workbench / "run") == before


def test_a_logger_is_looked_for_before_anything_else(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    answer = txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "new", "--logger", "wandb")
    assert "logger 'wandb' is not installed; pip install wandb" in answer.complaint
    assert not (workbench / "new").exists()
    assert "unknown logger 'wand'; did you mean 'wandb'" in txl("train", "--logger", "wand").complaint
