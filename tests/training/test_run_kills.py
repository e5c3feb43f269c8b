"""A run that was killed again and again, at random instants, ends as the run that was left alone."""

from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.training.helpers import differing, run_bits, write_recipe, write_text
from tests.training.kill_child import WARNINGS


@pytest.mark.parametrize(
    ("n_steps", "n_kills"),
    [pytest.param(60, 4, id="4"), pytest.param(4000, 200, id="200", marks=[pytest.mark.faults, pytest.mark.timeout(1200)])],
)
def test_a_killed_run_ends_as_one_left_alone(n_steps: int, n_kills: int, tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    write_recipe(tmp_path / "tiny.toml")
    (steps,) = run_forked("tests.training.kill_child:train_through_kills", 1, str(tmp_path), n_steps, n_kills, 0, timeout=1200)
    assert isinstance(steps, list), steps
    warned = (tmp_path / WARNINGS).read_text().splitlines()
    assert all(line.endswith("yet: starting from the beginning") for line in warned), warned  # killed before the first one
    assert len(steps) == n_kills
    assert steps == sorted(steps), "a kill lost what had been saved"
    print(f"{n_kills} kills, {len(set(steps))} of them at another step; {sum(step < n_steps for step in steps)} before the end")
    assert sum(step < n_steps for step in steps) >= n_kills // 2, "the run had ended before most of the kills"
    assert differing(run_bits(tmp_path / "killed"), run_bits(tmp_path / "whole")) == []
    strays = [path.name for path in (tmp_path / "killed").rglob("*") if path.suffix in (".tmp", ".old", ".abandoned")]
    assert strays == []
