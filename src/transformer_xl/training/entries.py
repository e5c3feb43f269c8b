"""The entries of a run's log, `metrics.jsonl`; PyTorch is not imported."""

import math
from pathlib import Path
from typing import Any

from transformer_xl.errors import CheckpointError, one_line
from transformer_xl.untrusted import parse_json

METRICS_FILE = "metrics.jsonl"
_KINDS = ("train", "valid", "sample", "final")


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's `metrics.jsonl`; none if there is no such file.

    A last line without an end is left out, because that is what a killed process leaves.

    Raises:
        CheckpointError: another line is no entry; the message names it.
    """
    path = directory / METRICS_FILE
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [_entry(line, f"'{path}', line {number}") for number, line in enumerate(lines, start=1)]


def _entry(line: bytes, place: str) -> dict[str, Any]:
    try:
        entry = parse_json(line)
        if entry["kind"] not in _KINDS or type(entry["step"]) is not int:
            raise ValueError("of an unknown kind or step")
        if entry["kind"] == "valid" and "loss" not in entry:
            raise ValueError("without a loss")
        for name, value in entry.items():
            if name not in ("kind", "text") and not _is_figure(value, may_lack=name not in ("tokens", "seconds")):
                raise ValueError(f"{name[:30]} is no number")
    except (ValueError, TypeError, LookupError) as error:
        raise CheckpointError(f"{place} is no entry of a log ({one_line(error)[:100]}); delete that line") from None
    return entry


def _is_figure(value: object, *, may_lack: bool) -> bool:
    """Return whether it is a finite number, or null, which stands for one that is not finite or not known."""
    if value is None:
        return may_lack
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
