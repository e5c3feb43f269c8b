"""`torchrun … -m transformer_xl`: what several processes print together is what one prints alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Txl
from tests.forked import run_jobs


def test_they_print_what_one_prints_and_refuse_in_one_line(workbench: Path, txl: Txl) -> None:
    run, nats = str(workbench / "run"), workbench / "nats.npy"
    scored = ["eval", run, "--precision", "fp32", "--json", "--per-token"]
    commands = {
        "usage": ["generate", run, "--frobnicate"],  # these three before the processes have met, as is the case with torchrun
        "option": ["generate", run, "--temperature", "-1"],
        "texts": ["generate", run, "--prompt", "One", "-n", "2"],
        "score": [*scored, str(nats)],
        "no run": ["eval", str(workbench / "nowhere")],
        "lanes": ["train", str(workbench / "tiny.toml"), "--corpus", str(workbench / "text.txt"), "--out", f"{workbench}/new"],
        "held": ["train", str(workbench / "tiny.toml"), "--corpus", str(workbench / "text.txt"), "--out", run],
    }
    jobs: dict[str, tuple[Any, ...]] = {name: ("tests.world_cases:txl", *arguments) for name, arguments in commands.items()}
    lanes = ["--set", "train.batch_size=3", "--set", "eval.batch_size=1", "--set", "train.max_bad_steps=2"]
    jobs["bad"] = (
        "tests.world_cases:txl_with_bad_losses",
        *commands["lanes"][:4],
        "--out",
        f"{workbench}/bad",
        "--quiet",
        *lanes,
    )
    found = run_jobs(jobs, 3)
    for name, (first, *others) in found.items():
        assert all(other["out"] == "" and other["err"] == "" for other in others), (name, others)
        assert all(other["status"] == first["status"] for other in others), name

    alone = json.loads(txl(*scored, str(workbench / "alone.npy")).out)
    assert json.loads(found["score"][0]["out"])["nats"] == pytest.approx(alone["nats"], rel=1e-6)
    assert np.load(nats) == pytest.approx(np.load(workbench / "alone.npy"), abs=2e-5)

    complaints = {
        "texts": "txl generate works in one process; start it without torchrun",
        "option": "temperature (-1.0) must be at least 0",
        "bad": "no finite loss and gradient in 2 steps in a row",
        "no run": "nowhere",
        "lanes": "world_size (3) must divide train.batch_size (4)",
        "held": "holds another run",
    }
    for name, complaint in complaints.items():
        (line,) = [line for line in found[name][0]["err"].splitlines() if "is preparing" not in line and "skipped" not in line]
        assert line.startswith("txl: error: ") and complaint in line
        assert found[name][0]["status"] == 1
    assert not (workbench / "new").exists()


def test_they_train_other_kinds_of_model(workbench: Path) -> None:
    settings = ("train.max_steps=3", "model.intermediate_losses=true", "model.n_target=2")
    sets = [part for setting in settings for part in ("--set", setting)]
    command = ["train", str(workbench / "tiny.toml"), "--corpus", str(workbench / "text.txt"), "--quiet"]
    kinds = {"vanilla": ["--set", "model.kind=vanilla", *sets], "lstm": ["--set", "model.kind=lstm", *sets[:2]]}
    jobs = {kind: ("tests.world_cases:txl", *command, "--out", f"{workbench}/{kind}", *own) for kind, own in kinds.items()}
    for kind, (first, second) in run_jobs(jobs, 2).items():
        assert (first["status"], second["status"]) == (0, 0), (kind, first["err"])
        last = json.loads((workbench / kind / "metrics.jsonl").read_text().splitlines()[-1])
        assert (last["kind"], last["step"]) == ("final", 3)
