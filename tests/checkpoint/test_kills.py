"""SIGKILL at random times while saving: every checkpoint that was reported as saved loads, and restarts leave no strays."""

from pathlib import Path

import pytest

from tests.forked import run_forked


@pytest.mark.parametrize("n_kills", [pytest.param(9, id="9"), pytest.param(200, id="200", marks=pytest.mark.faults)])
def test_a_kill_at_any_instant_loses_nothing_that_was_reported(tmp_path: Path, n_kills: int) -> None:
    child = "tests.checkpoint.kill_child:save_through_kills"
    (kills,) = run_forked(child, 1, str(tmp_path), n_kills, 0, timeout=1200)
    assert isinstance(kills, list), kills
    assert [kill for kill in kills if kill["defects"]] == []
    n_inside = sum(bool(kill["strays"]) for kill in kills)
    print(
        f"{n_kills} kills, {n_inside} of them inside a save or rotation (they left strays); newest step {kills[-1]['loaded']}"
    )
    assert n_inside >= n_kills // 3, "the kills fell between the saves and proved little"
