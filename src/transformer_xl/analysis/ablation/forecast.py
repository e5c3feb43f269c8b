"""An ablation that is to come: what each variant is given, and how long that takes."""

from typing import Any

from transformer_xl.analysis.ablation.ablation import Ablation
from transformer_xl.analysis.ablation.budget import budgeted, steps_of
from transformer_xl.analysis.ablation.plan import Trial
from transformer_xl.analysis.ablation.work import Work, measured
from transformer_xl.console import clock


def forecast(work: Work, *, rounds: int | None) -> list[dict[str, Any]]:
    """Return name, parameters, steps and expected time of each variant.

    Args:
        work: of the ablation.
        rounds: measure the time of a step in so many turns, for now only; None: as the ablation measures it, or has done.

    Returns:
        One entry a variant; `seconds` of a run are those of training, without validation and scoring.
    """
    ablation = work.ablation
    variants, parameters = list(ablation.plan.variants), work.parameters()
    stored = ablation.paces() if ablation.is_stored else {}  # on paper, the directory may hold another plan
    paces = stored or (work.paces if rounds is None else {})
    paces = {**measured([v for v in variants if v.name not in paces], work.texts, work.watcher, rounds=rounds or 1), **paces}
    rows = []
    for variant in variants:
        pace = paces[variant.name]
        config = budgeted(ablation.plan, Trial(variant, variant.config.train.seed), paces)
        steps = steps_of(config)
        more = parameters[variant.name] / parameters[variants[0].name] - 1
        row = {"variant": variant.name, "parameters": parameters[variant.name], "more_parameters": more, "steps": steps}
        row |= {"step_seconds": pace.seconds, "median_step_seconds": pace.median}
        rows.append(row | {"seconds": None if steps is None else steps * pace.seconds})
    return rows


def as_text(ablation: Ablation, rows: list[dict[str, Any]]) -> str:
    """Return the plan as a table."""
    lines = [["variant", "parameters", "", "ms/step", "median", "steps", "time"]]
    for row in rows:
        share = f"{row['more_parameters']:+.1%}" if row["more_parameters"] else ""
        times = [f"{1e3 * row[name]:,.1f}" for name in ("step_seconds", "median_step_seconds")]
        known = row["steps"] is not None
        budget = [f"{row['steps']:,}", clock(row["seconds"])] if known else ["?", "?"]
        lines.append([row["variant"], f"{row['parameters']:,}", share, *times, *budget])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = (cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        text.append("  ".join(cells).rstrip())
    n_run, total = len(ablation.plan.trials), sum(row["seconds"] or 0 for row in rows) * ablation.plan.seeds
    note = f"{n_run} runs, {clock(total)} of training in all; validation and scoring come on top."
    return "\n".join([*text, "", note, f"They go to {ablation.directory}."])
