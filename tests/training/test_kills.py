"""A run that was killed again and again, at random instants, ends as the run that was left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.helpers import differing, run_bits

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("n_steps", "n_kills"),
    [pytest.param(100, 5, id="5"), pytest.param(4000, 200, id="200", marks=[pytest.mark.faults, pytest.mark.timeout(1200)])],
)
def test_a_killed_run_ends_as_one_left_alone(n_steps: int, n_kills: int, text: Path, recipe: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.training.kill_child", str(tmp_path), str(n_steps), str(n_kills), "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    warned = [line for line in child.stderr.splitlines() if "warning" in line]
    assert all(line.endswith("yet: starting from the beginning") for line in warned), warned  # killed before the first one
    steps = json.loads(child.stdout)
    assert len(steps) == n_kills
    assert steps == sorted(steps), "a kill lost what had been saved"
    print(f"{n_kills} kills, {len(set(steps))} of them at another step; {sum(step < n_steps for step in steps)} before the end")
    assert sum(step < n_steps for step in steps) >= n_kills // 2, "the run had ended before most of the kills"
    assert differing(run_bits(tmp_path / "killed"), run_bits(tmp_path / "whole")) == []
    strays = [path.name for path in (tmp_path / "killed").rglob("*") if path.suffix in (".tmp", ".old", ".abandoned")]
    assert strays == []
