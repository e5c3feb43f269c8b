"""`torchrun … -m transformer_xl train`: one run of several processes, which survives the death of any of them.

`torchrun` itself takes long to start them; where nothing depends on it they are forked.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked
from tests.training.helpers import entries
from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.errors import CheckpointError
from transformer_xl.training.display import Display
from transformer_xl.training.environment import read_environment
from transformer_xl.training.run import Outcome, train

ROOT = Path(__file__).parents[2]
SETTINGS = [
    *("model.dropout=0", "optim.optimizer=adamw", "train.max_steps=20", "train.checkpoint_interval=4", "train.log_interval=1")
]


def torchrun(*arguments: str | Path, options: tuple[str, ...] = (), cwd: Path) -> "subprocess.Popen[str]":
    """Start two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "TXL_TIMEOUT_SECONDS": "60"}
    command += ["-m", "transformer_xl", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def printed(outcomes: list[dict[str, Any]]) -> str:
    """What forked processes printed, one after another."""
    return "".join(outcome["out"] + outcome["err"] for outcome in outcomes)


def settings(*more: str) -> list[str]:
    return [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]


def losses(run: Path) -> list[tuple[str, int, float]]:
    return [(e["kind"], e["step"], e["loss"]) for e in entries(run) if e["kind"] in ("train", "valid", "final")]


def assert_close(found: list[tuple[str, int, float]], expected: list[tuple[str, int, float]]) -> None:
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert [entry[2] for entry in found] == pytest.approx([entry[2] for entry in expected], abs=2e-6, rel=0)


def wait_for_steps(run: Path, n: int, process: "subprocess.Popen[str]", *, start: int = 1) -> None:
    """Wait until so many steps are logged, by the processes of the first start or of a later one."""
    while len(read_environment(run)) < start or not (run / "metrics.jsonl").exists() or len(losses(run)) < n:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def workers(process: "subprocess.Popen[str]") -> list[int]:
    """The processes that it started, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranked = {}
    for child in children:
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranked |= {int(v[5:]): int(child) for v in variables if v.startswith(b"RANK=")}
    return [ranked[rank] for rank in sorted(ranked)]


@pytest.fixture(scope="module")
def alone(recipe: str, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, float]]:
    """The losses of one process."""
    run = tmp_path_factory.mktemp("runs") / "alone"
    train(recipe, out=run, corpus=str(text), overrides=SETTINGS, display=Display(quiet=True))
    return losses(run)


def assert_one_goes_on(run: Path, alone: list[tuple[str, int, float]]) -> None:
    """The last step of a stopped run is saved, and one process continues from there."""
    assert RunDirectory(run).store().steps()[-1] == max(entry["step"] for entry in entries(run))
    outcome = train(out=run, resume=True, display=Display(quiet=True))
    assert outcome.finished
    assert_close(losses(run), alone)


GO_ON = "go on with: torchrun with 2 processes: -m transformer_xl train --resume"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_a_killed_process_costs_an_interval(recipe: str, text: Path, tmp_path: Path, alone: list) -> None:
    """Be it the first, or, after a restart, another."""
    run = tmp_path / "together"
    command = ("train", recipe, "--corpus", text, "--out", run, *settings())
    process = torchrun(*command, options=("--max-restarts", "2"), cwd=tmp_path)
    for rank, n in ((0, 9), (1, 14)):
        wait_for_steps(run, n, process, start=rank + 1)
        os.kill(workers(process)[rank], signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert output.count("resumed at step") == 2 and "2 processes" in output, output
    assert_close(losses(run), alone)


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_are_started_again_cost_an_interval(
    rank: int, recipe: str, text: Path, tmp_path: Path, alone: list
) -> None:
    """As `torchrun` does after a kill: with the command of the first start, in the same launch."""
    run = tmp_path / "together"
    command = ("train", recipe, "--corpus", str(text), "--out", str(run), *settings())
    launch = {"TORCHELASTIC_RUN_ID": "a"}
    outcomes = run_forked("tests.training.parallel_cases:txl_that_is_killed", 2, rank, 9, *command, environment=launch)
    assert outcomes[rank]["status"] == signal.SIGKILL and outcomes[1 - rank]["status"] == 1 << 8
    again = launch | {"TORCHELASTIC_RESTART_COUNT": "1"}
    outcomes = run_forked("tests.world_cases:txl", 2, *command, environment=again)
    assert printed(outcomes).count("resumed at step 8") == 1
    assert_close(losses(run), alone)


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_and_one_process_goes_on(recipe: str, text: Path, tmp_path: Path, alone: list) -> None:
    run = tmp_path / "together"
    process = torchrun("train", recipe, "--corpus", text, "--out", run, *settings(), cwd=tmp_path)
    wait_for_steps(run, 9, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert output.count(GO_ON) == 1, output
    assert_one_goes_on(run, alone)


def test_a_signal_to_one_process_saves_and_one_goes_on(recipe: str, text: Path, tmp_path: Path, alone: list) -> None:
    run = tmp_path / "together"
    command = ("train", recipe, "--corpus", str(text), "--out", str(run), *settings())
    outcomes = run_forked("tests.world_cases:txl_that_is_stopped", 2, 1, 9, *command)
    assert [outcome["status"] for outcome in outcomes] == [143, 143]
    assert printed(outcomes).count(GO_ON) == 1
    assert_one_goes_on(run, alone)


def test_a_restart_goes_on_with_its_own_run_only(
    recipe: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(launch: str, count: int) -> Outcome:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        overrides = [*SETTINGS, "train.max_steps=4"]
        return train(recipe, out=tmp_path / "run", corpus=str(text), overrides=overrides, display=Display(quiet=True))

    start("a", 0)
    with pytest.raises(CheckpointError, match="holds another run"):
        start("b", 1)  # the first attempt was refused, and torchrun only repeats it
    assert start("a", 1).finished


BATCH_SIZE = (
    ["--set", "train.batch_size=5"],
    "must divide train.batch_size (5), because all processes read equally many lanes; use train.batch_size=4 or 6",
)


SLOW_TO_SAY = """
import os, time
import transformer_xl.cli as cli

def say(text, said=cli.say):
    time.sleep(2 if os.environ["RANK"] == "0" else 0)
    said(text)

cli.say = say
"""


def assert_told_once(output: str, complaint: str) -> None:
    told = [line for line in output.splitlines() if line.startswith("txl: error:")]
    assert len(told) == 1 and complaint in told[0], output


@pytest.mark.slow
def test_torchrun_shows_once_what_is_wrong(recipe: str, text: Path, tmp_path: Path) -> None:
    wrong, complaint = BATCH_SIZE
    (tmp_path / "slow.py").write_text(SLOW_TO_SAY)
    process = torchrun("train", recipe, "--out", "run", "--corpus", text, "--import", "slow.py", *wrong, cwd=tmp_path)
    output, _ = process.communicate(timeout=200)
    assert_told_once(output, complaint)
    assert process.returncode != 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        BATCH_SIZE,
        (["--set", "train.attention=spda"], "unknown attention backend 'spda'; did you mean 'sdpa'?"),
        (["--corpus", "nowhere.txt"], "nowhere.txt"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_told_once(recipe: str, text: Path, tmp_path: Path, wrong: list[str], complaint: str) -> None:
    run = tmp_path / "run"
    command = ["train", recipe, "--out", str(run), *(() if "--corpus" in wrong else ("--corpus", str(text))), *wrong]
    outcomes = run_forked("tests.world_cases:txl", 2, *command)
    assert_told_once(printed(outcomes), complaint)
    assert [outcome["status"] for outcome in outcomes] == [1, 1]
    assert not run.exists()
