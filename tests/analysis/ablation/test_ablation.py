"""One run of an ablation belongs to one process at a time, and its result to no other run."""

import json
from pathlib import Path
from typing import Any

import pytest

from transformer_xl.analysis.ablation.ablation import PACE_FILE, RESULTS, Ablation
from transformer_xl.analysis.ablation.plan import AblationPlan, Variant
from transformer_xl.config.run import RunConfig
from transformer_xl.errors import CheckpointError

PLAN = AblationPlan((Variant("a", "a", {}, RunConfig()),), seeds=2)
DONE = {"run": "a-seed0", "done": True, "parameters": 1, "steps": 2, "tokens": 3, "seconds": 4.0, "text": "test"}
DONE |= {"scores": [{}], "tokenizer": "x", "unit": "byte", "loses": ""}


def test_a_run_is_claimed_by_one_at_a_time(tmp_path: Path) -> None:
    mine, others = Ablation(tmp_path, PLAN), Ablation(tmp_path, PLAN)
    (tmp_path / RESULTS).mkdir()
    first, second = PLAN.trials
    with mine.claimed(first) as own, others.claimed(first) as same, others.claimed(second) as another:
        assert (own, same, another) == (True, False, True)
    with others.claimed(first) as later:
        assert later


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"run": "b-seed0"}, "is of another run, 'b-seed0'"),
        ({"run": None}, "is of another run, None"),
        *((({name: None}), f"has no {name} of a run that is done") for name in DONE if name not in ("run", "done")),
        ({"scores": []}, "has no scores of a run that is done"),
    ],
)
def test_a_result_of_another_run_or_without_its_figures(tmp_path: Path, values: dict[str, Any], complaint: str) -> None:
    ablation, (trial, _) = Ablation(tmp_path, PLAN), PLAN.trials
    path = ablation.result_path(trial)
    path.parent.mkdir()
    for sound in (DONE, {"run": "a-seed0", "scores": []}):  # the second one is not scored yet
        path.write_text(json.dumps(sound))
        assert ablation.result(trial) == sound
    path.write_text(json.dumps(DONE | values))
    with pytest.raises(CheckpointError, match=f"a-seed0.json' {complaint}; delete it to score again"):
        ablation.result(trial)


def test_times_of_steps_that_are_none(tmp_path: Path) -> None:
    (tmp_path / PACE_FILE).write_text('{"a": 5}')
    with pytest.raises(CheckpointError, match=r"pace.json' does not hold the times of steps; delete it to measure"):
        Ablation(tmp_path, PLAN).stored_paces()
