"""Say what the SQuAD metrics of transformers say of predictions: JSON in, JSON out, in the peer's environment."""

import json
import sys
from types import SimpleNamespace
from typing import Any

from transformers.data.metrics.squad_metrics import squad_evaluate


def answer(request: dict[str, Any]) -> dict[str, float]:
    """Return the scores of questions at a threshold."""
    questions = request["questions"]
    examples = [SimpleNamespace(qas_id=each["id"], answers=[{"text": gold} for gold in each["answers"]]) for each in questions]
    said = {each["id"]: each["said"] for each in questions}
    no_answer = {each["id"]: each["no_answer"] for each in questions}
    return squad_evaluate(examples, said, no_answer, request["threshold"])


if __name__ == "__main__":
    json.dump([answer(request) for request in json.load(sys.stdin)], sys.stdout)
