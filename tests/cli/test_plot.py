"""`txl plot`: the numbers that are drawn, and what is refused."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Txl
from transformer_xl.training.entries import read_metrics


def drawn(txl: Txl, *arguments: str) -> list[dict[str, Any]]:
    answer = txl("plot", *arguments, "--json")
    assert (answer.status, answer.err) == (0, "")
    return json.loads(answer.out)["lines"]


def test_learning_curves_are_those_of_the_log(txl: Txl, workbench: Path) -> None:
    entries = read_metrics(workbench / "run")
    by_kind = {kind: [entry for entry in entries if entry["kind"] == kind] for kind in ("train", "valid")}
    last = by_kind["valid"][-1]
    for against, key, factor in (("tokens", "tokens", 1e-6), ("steps", "step", 1), ("seconds", "seconds", 1)):
        lines = drawn(txl, "run", "--against", against)
        assert [line["name"] for line in lines] == [
            "run, training, memory of 6",
            f"run, validation, all {last['scored']:,} tokens, memory of 6: {last['loss']:.3f} at step {last['step']}",
        ]
        for line, found in zip(lines, by_kind.values(), strict=True):
            assert line["x"] == pytest.approx([factor * entry[key] for entry in found])
            assert line["y"] == [entry["loss"] for entry in found]
    assert (workbench / "plot.png").read_bytes()[1:4] == b"PNG"
    training, validation = drawn(txl, "run", "--unit", "bpc", "--out", "curve.svg")
    assert validation["y"] == pytest.approx([entry["bpc"] for entry in by_kind["valid"]], rel=1e-6)
    assert training["y"][0] == pytest.approx(by_kind["train"][0]["loss"] * validation["y"][-1] / by_kind["valid"][-1]["loss"])
    assert "<svg" in (workbench / "curve.svg").read_text()


def test_memory_is_scored_as_txl_eval_does(txl: Txl) -> None:
    (line,) = drawn(txl, "run", "--against", "memory")
    assert line["x"] == [0, 1, 3, 6, 12, 24, 48]
    assert line["trained"] == 6
    (line,) = drawn(txl, "run", "--against", "memory", "--lengths", "12,0", "--unit", "bpc", "--split", "valid")
    scores = [json.loads(txl("eval", "run", "--mem-len", str(n), "--split", "valid", "--json").out) for n in (0, 12)]
    assert line["y"] == pytest.approx([score["bpc"] for score in scores], abs=1e-9)


def test_few_tokens_are_thousands_as_in_the_loss_curve_of_a_run(txl: Txl, workbench: Path) -> None:
    assert txl("plot", "run", "--out", "curve.svg").status == 0
    texts = re.findall("<!-- (.*?) -->", (workbench / "curve.svg").read_text())
    assert "training tokens read (thousands)" in texts
    assert "0.8" in texts  # of 800 tokens, at the axis
    assert "training, memory of 6" in texts
    (line, *_) = drawn(txl, "run")
    assert max(line["x"]) < 0.01  # as before in JSON: millions


def test_pictures_of_scores_name_what_was_scored(txl: Txl, workbench: Path, home: Path) -> None:
    def names(*arguments: str) -> list[str]:
        out = workbench / "scores.svg"
        assert txl("plot", *arguments, "--against", "memory", "--lengths", "0", "--out", str(out)).status == 0
        return re.findall("<!-- (.*?) -->", out.read_text())

    whole = f"test split of {home / 'text.txt'}"
    assert {"run: loss and memory", whole, "run"} <= set(names("run"))
    assert f"first 50 tokens of the {whole}" in names("run", "--tokens", "50")
    shutil.copy(home / "text.txt", workbench / "other.txt")
    assert txl("train", "tiny.toml", "--corpus", "other.txt", "--out", "other", "--quiet").status == 0
    assert {"loss and memory", f"run, {whole}", f"other, test split of {workbench / 'other.txt'}"} <= set(names("run", "other"))


def test_runs_of_other_vocabularies(txl: Txl, home: Path) -> None:
    small = ("--set", "train.max_steps=2", "--quiet")
    characters = ("--corpus", str(home / "text.txt"), "--set", "tokenizer.kind=char", "--set", "eval.max_tokens=9")
    assert txl("train", "tiny.toml", *characters, *small, "--out", "char").status == 0
    assert txl("plot", "run", "char").complaint.endswith("differ, so nats per token cannot be compared; use --unit bpc")
    answer = txl("plot", "run", "char", "--unit", "bpc", "--json")
    assert answer.status == 0
    assert {line["run"] for line in json.loads(answer.out)["lines"]} == {"run", "char"}
    assert "at most 9 tokens for 'char' (eval.max_tokens), so the levels of their curves cannot be compared" in answer.err
    against = ("--against", "memory", "--lengths", "0", "--unit", "bpc")
    cut = txl("plot", "run", "char", *against, "--tokens", "30")
    assert cut.err.startswith("warning: 30 tokens of one vocabulary are not as much text as of another; ")
    assert txl("plot", "run", "char", *against).err == ""


def test_runs_of_one_name_are_told_apart(txl: Txl, workbench: Path) -> None:
    shutil.copytree(workbench / "run", workbench / "again" / "run")
    assert {line["run"] for line in drawn(txl, "run", "again/run", "run")} == {"run", "again/run"}


def test_a_run_that_has_logged_nothing(txl: Txl, workbench: Path) -> None:
    (workbench / "run" / "metrics.jsonl").unlink()
    assert txl("plot", "run").complaint.startswith("'run' has no losses in metrics.jsonl yet; train it further")
    shutil.rmtree(workbench / "run" / "checkpoints")
    (workbench / "run" / "checkpoints").mkdir()
    assert "checkpoint" in txl("plot", "run", "--against", "memory").complaint


def test_a_damaged_line_of_the_log_is_named(txl: Txl, workbench: Path) -> None:
    path = workbench / "run" / "metrics.jsonl"
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b"loss", b"lo\xf3s") + b"".join(rest))
    assert "'run/metrics.jsonl', line 2 is no entry of a log" in txl("plot", "run", "--json").complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "name a run, such as"),
        (
            ("ruin",),
            "'ruin' holds no run: config.json is missing; train one with txl train or txl finetune; did you mean 'run'?",
        ),
        (("run", "--out", "plot.gif"), "--out 'plot.gif' must end in .png, .svg, .pdf"),
        (("run", "--lengths", "3"), "--lengths (3) are lengths of memory, and --against is tokens; use --against memory"),
        (("run", "--against", "memory", "--lengths", "-3"), "--lengths '-3' must be numbers of at least 0"),
        (("run", "--against", "memory", "--lengths", f"0,{'9' * 5000}"), "--lengths '0,9999"),
    ],
)
def test_complaints(txl: Txl, arguments: tuple[str, ...], complaint: str) -> None:
    assert txl("plot", *arguments).complaint.startswith(complaint)


def test_without_matplotlib_training_draws_nothing_and_others_say_what_to_install(
    txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "plain")
    assert answer.status == 0
    assert answer.err.count("no picture is drawn: pictures need matplotlib; in a clone: pip install -e '.[plots]'") == 1
    assert not (workbench / "plain" / "loss.png").exists()
    for command in (("plot", "plain"), ("explain", "plain", "text.txt")):
        assert txl(*command).complaint.startswith("pictures need matplotlib; in a clone: pip")
