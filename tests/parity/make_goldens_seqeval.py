"""Write the entities that seqeval reads in random labels of words, and its scores of random predictions.

    python -m venv .venv-peer && .venv-peer/bin/pip install -r tests/parity/requirements-seqeval.txt
    .venv-peer/bin/python tests/parity/make_goldens_seqeval.py

Labels are drawn of any scheme, or of several, and most break it. A prediction is a label now and then drawn anew.
"""

import json
import random
import warnings
from pathlib import Path
from typing import Any

from seqeval.metrics import accuracy_score, classification_report
from seqeval.metrics.sequence_labeling import get_entities

GOLDEN = Path(__file__).resolve().parent / "goldens" / "seqeval" / "scores.json"
LABELS = {
    "BIO": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-a-b", "I-a-b"],
    "IOB1": ["O", "O", "I-PER", "I-PER", "I-LOC", "I-LOC", "B-PER"],
    "BIOES": [f"{tag}-{kind}" for tag in "BIES" for kind in ("PER", "LOC")] + ["O"],
    "without types": ["O", "B", "I", "E", "S"],
}
N_CASE = 30


def drawn(draw: random.Random, labels: list[str]) -> dict[str, Any]:
    """Draw some sentences of labels with predictions, and let seqeval say what it says of them."""
    true = [draw.choices(labels, k=draw.randrange(1, 9)) for _ in range(draw.randrange(1, 5))]
    share = draw.choice([0.0, 0.2, 0.6])
    said = [[draw.choice(labels) if draw.random() < share else label for label in sentence] for sentence in true]
    report = classification_report(true, said, output_dict=True)
    scores = {name: [float(value) for value in values.values()] for name, values in report.items()}
    return {
        "true": [" ".join(sentence) for sentence in true],
        "said": [" ".join(sentence) for sentence in said],
        "entities": [get_entities(sentence) for sentence in said],
        "accuracy": accuracy_score(true, said),
        "scores": {name: values for name, values in scores.items() if not name.startswith(("macro", "weighted"))},
    }


def main() -> None:
    draw = random.Random(1)
    warnings.simplefilter("ignore")  # where a share of nothing is 0
    cases = {name: [drawn(draw, labels) for _ in range(N_CASE)] for name, labels in LABELS.items()}
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text(json.dumps({"made_by": f"{Path(__file__).name}, seqeval 1.2.2", "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
