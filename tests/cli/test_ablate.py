"""`txl ablate`: what is compared, at what budget, and that nothing is done twice."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Txl
from tests.training.helpers import run_bits
from transformer_xl.tools import budget, worker
from transformer_xl.tools.ablation import Ablation
from transformer_xl.training.trainer import Trainer

RARELY = ("--set", "train.eval_interval=99")
ABLATE = ("ablate", "tiny.toml", "--corpus", "text.txt", "--recurrence", "yes,no", *RARELY, "--steps", "8", "--lengths", "0,3")
RUNS = ("recurrence-seed0", "no-recurrence-seed0")


def files(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}


def untouched(before: dict[str, int], after: dict[str, int]) -> bool:
    """True but for the table, which is made anew."""
    made = ("table.md", ".lock")
    return {p: t for p, t in before.items() if not p.endswith(made)} == {p: t for p, t in after.items() if not p.endswith(made)}


def test_table_and_resume(txl: Txl, workbench: Path) -> None:
    answer = txl(*ABLATE, "--out", "a", "--quiet")
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["recurrence", "no-recurrence"]
    assert "Scored on the test split of" in answer.out
    assert (workbench / "a" / "table.md").read_text().startswith("| variant | parameters |")
    before = files(workbench / "a")
    again = json.loads(txl(*ABLATE, "--out", "a", "--json").out)
    assert untouched(before, files(workbench / "a"))
    own, other = again["rows"]
    assert (own["steps"], own["tokens"], other["steps"]) == (8, 160, 8)
    assert own["difference"] is None
    assert other["difference"] == pytest.approx(other["loss"]["mean"] - own["loss"]["mean"])
    score = json.loads(txl("eval", "a/recurrence-seed0", "--json").out)
    assert own["loss"]["mean"] == pytest.approx(score["loss"], abs=1e-9)
    assert own["bpc"]["mean"] == pytest.approx(score["bpc"], abs=1e-9)
    result = json.loads((workbench / "a/results/recurrence-seed0.json").read_text())
    for scored in result["scores"]:
        length = str(scored["reading"]["length"])
        score = json.loads(txl("eval", "a/recurrence-seed0", "--mem-len", length, "--json").out)
        assert scored["score"]["loss"] == pytest.approx(score["loss"], abs=1e-9)
    assert [scored["reading"]["mem_len"] for scored in result["scores"]] == [6, 0, 3]
    assert result["loses"] == ""
    result = json.loads((workbench / "a/results/no-recurrence-seed0.json").read_text())
    assert [(s["reading"]["mem_len"], s["reading"]["ext_len"]) for s in result["scores"]] == [(0, 0), (0, 3)]
    score = json.loads(txl("eval", "a/no-recurrence-seed0", "--ext-len", "3", "--json").out)
    assert result["scores"][1]["score"]["loss"] == pytest.approx(score["loss"], abs=1e-9)
    (workbench / "text.txt").unlink()
    assert "difference: from the first variant" in txl("ablate", "--out", "a", "--quiet").out  # it needs no text any more


def test_how_far_back_the_variants_look(txl: Txl, workbench: Path) -> None:
    assert txl(*ABLATE, "--out", "a", "--quiet", "--json").status == 0
    found = json.loads(txl("ablate", "--out", "a", "--recl", "20", "--quiet", "--json").out)["recl"]
    assert list(found) == ["recurrence", "no-recurrence"]
    assert all(list(own) == ["0.1", "0.5", "1.0"] and all(1 <= n <= 20 for n in own.values()) for own in found.values())
    lines = txl("ablate", "--out", "a", "--recl", "20", "--quiet").out.splitlines()
    assert [line.split()[0] for line in lines[-5:-2]] == ["context", "recurrence", "no-recurrence"]
    assert lines[-4].replace("≥ ", "").split()[1:] == [str(n) for n in found["recurrence"].values()]
    assert txl("ablate", "--out", "a", "--recl", "30").complaint.startswith("--recl (30) must be a multiple of 20, such as 400")
    too_long = txl("ablate", "--out", "a", "--recl", "1000000", "--quiet").complaint
    assert too_long.endswith("give a longer text, or a smaller --recl")
    results = workbench / "a" / "results" / f"{RUNS[1]}.json"
    results.write_text(results.read_text().replace('"tokenizer": "', '"tokenizer": "another '))
    refused = txl("ablate", "--out", "a", "--recl", "20", "--quiet").complaint
    assert refused == "--recl compares losses of the same tokens, and vocabularies differ; leave it out"


def test_interrupted_it_goes_on_to_the_same_bits(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert txl(*ABLATE, "--out", "whole", "--quiet").status == 0
    step, n_step = Trainer.train_step, 0

    def interrupted(self: Trainer) -> Any:
        nonlocal n_step
        n_step += 1
        if n_step == 11:  # the third of the second run
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    answer = txl(*ABLATE, "--out", "parts", "--quiet")
    assert (answer.status, answer.err) == (130, "interrupted; go on with: txl ablate --out parts\n")
    first = files(workbench / "parts" / RUNS[0])
    monkeypatch.setattr(worker, "make_parts", None)  # both have begun
    assert txl("ablate", "--out", "parts", "--quiet").status == 0
    assert files(workbench / "parts" / RUNS[0]) == first
    assert n_step == 16
    for run in RUNS:
        parts, whole = (run_bits(workbench / name / run) for name in ("parts", "whole"))
        assert parts | {"steps": [8]} == whole  # beside it, the checkpoint of the interruption
        one, other = (json.loads((workbench / name / "results" / f"{run}.json").read_text()) for name in ("parts", "whole"))
        assert [s["score"]["nats"] for s in one["scores"]] == [s["score"]["nats"] for s in other["scores"]]


@pytest.fixture
def begun(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ablation in "a", none of whose runs has begun."""
    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "go_on", lambda _: [])
        assert "0 of 2 runs are done." in txl(*ABLATE, "--out", "a").out


@pytest.mark.usefixtures("begun")
def test_runs_of_another_process_are_left_to_it(txl: Txl, workbench: Path) -> None:
    ablation = Ablation.open(workbench / "a")
    with ablation.claimed(ablation.plan.trials[0]) as ours:
        assert ours
        answer = txl(*ABLATE, "--out", "a")
    assert answer.status == 0
    assert "1 of 2 runs are done." in answer.out
    assert f"Another process is at {RUNS[0]}" in answer.out
    assert not (workbench / "a" / RUNS[0]).exists()
    assert (workbench / "a" / RUNS[1]).exists()


@pytest.mark.usefixtures("begun")
def test_another_plan_is_refused(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "'a' holds an ablation with another plan: "
    other = [*ABLATE[:-3], "9", *ABLATE[-2:]]
    assert txl(*other, "--out", "a").complaint.startswith(
        f"{refused}steps (9) differs from what it was (8); go on with its own"
    )
    changed = txl(*ABLATE, "--out", "a", "--set", "optim.lr=0.5").complaint
    assert changed.startswith(f"{refused}optim.lr of 'recurrence' (0.5) differs from what it was (0.01)")
    assert txl(*ABLATE, "--loss", "half", "--out", "a").complaint.startswith(f"{refused}variants (recurrence-half,no-rec")
    assert txl(*other, "--out", "a", "--dry-run").complaint.startswith(refused)
    monkeypatch.setattr(worker.Worker, "go_on", lambda _: [])
    assert "0 of 4 runs are done." in txl(*ABLATE, "--seeds", "2", "--out", "a").out  # more of the same
    assert txl(*ABLATE, "--out", "a").complaint.startswith(f"{refused}seeds (1) differs from what it was (2)")


def test_time_is_measured_once(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(trainer: Trainer) -> float:
        return 0.1 if trainer.model.mem_len else 0.05

    monkeypatch.setattr(worker, "ROUNDS", 2)

    monkeypatch.setattr(budget, "_timed_step", timed)
    timely = [*ABLATE[:8], "--minutes", "0.01", "--out", "a"]
    forecast = txl(*timely, "--dry-run", "--json")
    rows = json.loads(forecast.out)["variants"]
    assert forecast.err == "measuring the time of a step of each variant, in turn\n"
    assert not (workbench / "a").exists()
    assert [row["steps"] for row in rows] == [6, 12]
    assert txl(*timely, "--quiet").status == 0
    monkeypatch.setattr(budget, "_timed_step", None)  # nothing is left to measure
    again = txl(*timely, "--dry-run", "--json")
    assert (json.loads(again.out)["variants"], again.err) == (rows, "")
    assert txl("ablate", "--out", "a", "--dry-run", "--json").out == again.out
    answer = txl(*timely, "--lengths", "0", "--json")
    assert "lengths (0) differs from what it was (none)" in answer.complaint
    assert [row["steps"] for row in json.loads(txl(*timely, "--quiet", "--json").out)["rows"]] == [6, 12]


def test_other_kinds_and_seeds(txl: Txl, workbench: Path) -> None:
    small = "n_layer = 2\nd_model = 8\n"
    rest = (workbench / "tiny.toml").read_text().split("[optim]")[1]
    heads = "n_head = 2\nd_head = 4\nd_inner = 12\n"
    (workbench / "lstm.toml").write_text(f'[model]\nkind = "lstm"\n{small}\n[optim]{rest}')
    (workbench / "vanilla.toml").write_text(f'[model]\nkind = "vanilla"\n{small}{heads}\n[optim]{rest}')
    budget = ("--steps", "2", "--seeds", "2", "--tokens", "90")
    answer = txl("ablate", "lstm.toml", "vanilla.toml", "--corpus", "text.txt", *RARELY, *budget, "--json")
    result = json.loads(answer.out)
    assert result["out"] == "runs/ablate-lstm-vanilla"
    assert [row["variant"] for row in result["rows"]] == ["lstm", "vanilla"]
    assert [row["loss"]["n"] for row in result["rows"]] == [2, 2]
    assert result["rows"][0]["best_length"] is None
    assert result["rows"][1]["difference_error"] > 0
    assert result["text"].startswith("first 90 tokens of the test split of")
    scored = json.loads((workbench / result["out"] / "results/vanilla-seed1.json").read_text())["scores"]
    assert [(s["reading"]["tgt_len"], s["reading"]["ext_len"]) for s in scored] == [(5, 0), (3, 2), (2, 3)]


def test_what_a_later_variant_would_fail_at_is_said_before_the_first_is_trained(txl: Txl, workbench: Path) -> None:
    tiny = (workbench / "tiny.toml").read_text()
    sizes, rest = tiny.removesuffix("\n").split("[optim]")
    sizes = sizes.replace("mem_len = 6", 'kind = "vanilla"').replace("[model]", "[model]\nmax_len = 9")
    (workbench / "short.toml").write_text(f"{sizes}[optim]{rest}")
    (workbench / "lost.toml").write_text(tiny + '[data]\ncorpus = "lost.txt"\n')
    (workbench / "there.toml").write_text(tiny + '[data]\ncorpus = "text.txt"\n')
    reads_again = ("--corpus", "text.txt", "--set", "eval.ext_len=5")
    pairs = {
        ("tiny.toml", "short.toml", *reads_again): "variant 'short': eval.tgt_len",
        ("there.toml", "lost.toml"): "variant 'lost': corpus 'lost.txt'",
    }
    for arguments, complaint in pairs.items():
        for more in ((), ("--dry-run",), ("--minutes", "1")):
            assert txl("ablate", *arguments, "--out", "a", *more).complaint.startswith(complaint)
            assert not (workbench / "a").exists()  # so that the mended command is not another plan
    (workbench / "lost.txt").write_text((workbench / "text.txt").read_text())
    assert txl("ablate", "there.toml", "lost.toml", "--out", "a", "--steps", "2", "--quiet").status == 0


def test_what_a_tokenizer_loses_is_noted_and_not_compared(txl: Txl, workbench: Path) -> None:
    recipe = (workbench / "tiny.toml").read_text()
    (workbench / "words.toml").write_text(f'{recipe}[tokenizer]\nkind = "word"\n')
    answer = txl("ablate", "words.toml", "tiny.toml", "--corpus", "text.txt", *RARELY, "--steps", "2", "--out", "a", "--quiet")
    assert "Differences are not given: vocabularies differ, and not all of the text is predicted by words, so" in answer.out
    result = json.loads((workbench / "a/results/words-seed0.json").read_text())
    assert result["loses"].startswith("Words outside the vocabulary (they become <unk>)")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "name a recipe"),
        (("--out", "nothing"), "'nothing' holds no ablation"),
        (("--out", "run", "--minutes", "2"), "--minutes is part of a plan"),
        (("tiny.toml", "--out", "run"), "'run' is not empty and holds no ablation"),
        (("tiny.toml", "--steps", "2", "--minutes", "2"), "--steps (2) and --minutes (2) are two budgets"),
        (("tiny.toml", "--minutes", "0"), 'Invalid value "0.0" for --minutes. Must be > 0'),
        (("tiny.toml", "--attention", "shav"), "unknown --attention 'shav'; did you mean 'shaw'?"),
        (("tiny.toml", "--lengths", "1,x"), "--lengths '1,x' must be numbers"),
    ],
)
def test_complaints(txl: Txl, arguments: tuple[str, ...], complaint: str) -> None:
    assert txl("ablate", *arguments).complaint.startswith(complaint)
