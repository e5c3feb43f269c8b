"""SIGKILL at random times while saving: every checkpoint that was reported as saved loads, and restarts leave no strays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("n_kills", [pytest.param(9, id="9"), pytest.param(200, id="200", marks=pytest.mark.faults)])
def test_a_kill_at_any_instant_loses_nothing_that_was_reported(tmp_path: Path, n_kills: int) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.kill_child", str(tmp_path), str(n_kills), "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    *lines, last = child.stdout.splitlines()
    assert last == "done"
    kills = [json.loads(line) for line in lines]
    assert len(kills) == n_kills
    assert [kill for kill in kills if kill["defects"]] == []
    n_inside = sum(bool(kill["strays"]) for kill in kills)
    print(
        f"{n_kills} kills, {n_inside} of them inside a save or rotation (they left strays); newest step {kills[-1]['loaded']}"
    )
    assert n_inside >= n_kills // 3, "the kills fell between the saves and proved little"
