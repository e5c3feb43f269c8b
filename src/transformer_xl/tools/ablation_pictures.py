"""Pictures of an ablation: how variants learn, and what more memory at evaluation gains each."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformer_xl.pictures import PlotLine, draw
from transformer_xl.tools.ablation import Ablation
from transformer_xl.tools.table import METRICS, Mean, comparable
from transformer_xl.training.entries import read_metrics

Losses = Callable[[Mapping[str, Any]], dict[float, dict[str, float]]]
"""Takes the result of a run; returns its losses, in all metrics, by their places on the x axis."""


def draw_lengths(ablation: Ablation) -> Path | None:
    """Draw loss against attention length, one line for each variant; None if there is nothing to draw or compare."""

    def losses(result: Mapping[str, Any]) -> dict[float, dict[str, float]]:
        # readings of one length differ only in how segments are cut, so one of them is enough
        scores = {scored["reading"]["length"]: scored["score"] for scored in result["scores"]}
        return scores if len(scores) > 1 else {}

    return _draw(
        ablation,
        "lengths.png",
        losses,
        tokens=ablation.plan.tokens,
        xlabel="attention length at evaluation (tokens before a segment; segment itself not counted)",
        title="loss and attention length",
        lengths=True,
    )


def draw_curves(ablation: Ablation) -> Path | None:
    """Draw validation loss against training time at the measured pace, or else tokens; None as above."""
    paces = ablation.stored_paces()
    is_timed = all(variant.name in paces for variant in ablation.plan.variants)

    def losses(result: Mapping[str, Any]) -> dict[float, dict[str, float]]:
        entries = [entry for entry in read_metrics(ablation.directory / result["run"]) if entry["kind"] == "valid"]
        finite = [entry for entry in entries if None not in (entry["loss"], entry["bpc"])]
        if is_timed:
            return {entry["step"] * paces[result["variant"]].seconds / 60: entry for entry in finite}
        return {entry["tokens"] / 1e6: entry for entry in finite}

    xlabel = "training time (minutes, at the measured pace)" if is_timed else "training tokens read (millions)"
    return _draw(ablation, "curves.png", losses, tokens=None, xlabel=xlabel, title="validation loss", from_zero=True)


def _draw(ablation: Ablation, name: str, losses: Losses, *, tokens: int | None, title: str, **axis: Any) -> Path | None:
    """Draw the mean losses of each variant where all its runs have one, with a band of their standard deviation."""
    path = ablation.directory / name
    path.unlink(missing_ok=True)  # an older picture may compare what cannot be compared now
    results = [[result for result in ablation.results(variant) if result.get("done")] for variant in ablation.plan.variants]
    metric, _ = comparable(ablation.plan, list(itertools.chain(*results)), tokens=tokens)
    if metric is None:
        return None
    lines = []
    for variant, runs in zip(ablation.plan.variants, results, strict=True):
        curves = [losses(result) for result in runs]
        x = sorted(set.intersection(*map(set, curves))) if curves else []
        if x:
            means = [Mean.of([curve[place][metric] for curve in curves]) for place in x]
            low, high = ([mean.mean + sign * (mean.deviation or 0.0) for mean in means] for sign in (-1, 1))
            lines.append(PlotLine(variant.name, variant.name, x, [mean.mean for mean in means], low, high))
    if not lines:
        return None
    return draw(lines, path, title=f"{ablation.directory.name}: {title}", ylabel=f"loss ({METRICS[metric]})", **axis)
