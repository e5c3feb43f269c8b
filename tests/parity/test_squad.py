"""Scores of answers against the metrics of transformers 4.35.2, on predictions drawn at random; see `make parity`."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.parity.make_goldens_squad import drawn_questions
from tests.parity.test_live import PYTHON
from tests.tasks.test_answers import official_metrics, predicted
from transformer_xl.tasks.metrics import TaskScore

WORKER = Path(__file__).with_name("peer_squad.py")
N_CASE = 200

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]


def test_scores_are_those_of_transformers() -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing; `make parity` makes this environment of the peer")
    requests: list[dict[str, Any]] = [
        {"questions": drawn_questions(seed, 1 + seed, impossible=0.1 + 0.8 * (seed % 7) / 6), "threshold": seed % 10 / 10}
        for seed in range(N_CASE)
    ]
    answer = subprocess.run([str(PYTHON), str(WORKER)], input=json.dumps(requests), capture_output=True, text=True, check=True)
    n_compared = 0
    for request, scores in zip(requests, json.loads(answer.stdout), strict=True):
        if all(question["answers"] for question in request["questions"]):
            continue  # then ours are those of version 1.1
        score = TaskScore.of("span", (), (predicted(each, request["threshold"]) for each in request["questions"]))
        expected = official_metrics(scores)
        expected["best_f1_threshold"] = score.metrics["best_f1_threshold"]  # rounding decides between equal sums of F1
        assert score.metrics == pytest.approx(expected, abs=1e-12)
        n_compared += 1
    assert n_compared > N_CASE // 2
