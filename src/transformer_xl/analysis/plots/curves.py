"""Learning curves: what a run's log says, against tokens, steps or seconds of training."""

from collections.abc import Sequence
from typing import Any, Literal

from transformer_xl.analysis.comparison import Run, Unit
from transformer_xl.analysis.plots.lines import Line, Look
from transformer_xl.errors import CheckpointError
from transformer_xl.training.record import METRICS_FILE, read_metrics

Against = Literal["tokens", "steps", "seconds"]

XLABELS: dict[Against, str] = {"tokens": "tokens read (millions)", "steps": "steps", "seconds": "seconds of training"}

_KINDS: tuple[tuple[str, str, Look], ...] = (("train", "training", "thin"), ("valid", "validation", "marked"))


def learning_curves(runs: Sequence[Run], *, against: Against, unit: Unit) -> list[Line]:
    """Return training and validation loss of runs.

    Raises:
        CheckpointError: a run has logged nothing, or cannot tell how many characters its tokens have.
    """
    return [line for run in runs for line in _of_run(run, against, unit)]


def _of_run(run: Run, against: Against, unit: Unit) -> list[Line]:
    entries = [e for e in read_metrics(run.path) if e["kind"] in ("train", "valid") and e["loss"] is not None]
    if not entries:
        raise CheckpointError(f"'{run.path}' has no losses in {METRICS_FILE} yet; train it further with txl train --resume")
    factor = 1.0 if unit == "nats" else _bits_per_character(run, entries)
    lines = []
    for kind, word, look in _KINDS:
        found = [entry for entry in entries if entry["kind"] == kind]
        if not found:
            continue
        x = {
            "tokens": [entry["tokens"] / 1e6 for entry in found],
            "steps": [entry["step"] for entry in found],
            "seconds": [entry["seconds"] for entry in found],
        }[against]
        lines.append(Line(run.name, f"{run.name}, {word}", x, [factor * entry["loss"] for entry in found], look=look))
    return lines


def _bits_per_character(run: Run, entries: Sequence[dict[str, Any]]) -> float:
    """Return how many bits per character a nat per token is, by the last validation."""
    told = [
        entry["bpc"] / entry["loss"] for entry in entries if entry["kind"] == "valid" and entry.get("bpc") and entry["loss"]
    ]
    if not told:
        raise CheckpointError(
            f"'{run.path}' was not validated yet, so nobody knows how many characters its tokens have; use --unit nats"
        )
    return told[-1]
