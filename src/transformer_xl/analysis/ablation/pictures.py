"""Pictures of an ablation: how variants learn, and what more memory at evaluation gains each."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.analysis.ablation.ablation import Ablation
from transformer_xl.analysis.ablation.table import METRICS, Mean, comparable
from transformer_xl.analysis.lines import length_axis
from transformer_xl.pictures import line_style, new_figure, save_with_legend
from transformer_xl.training.record import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_lengths(ablation: Ablation) -> Path | None:
    """Draw loss against attention length, one line for each variant; None if there is nothing to draw or compare."""
    path = ablation.directory / "lengths.png"
    path.unlink(missing_ok=True)  # an older picture may compare what cannot be compared now
    results = _results(ablation)
    metric, _ = comparable(ablation.plan, list(itertools.chain(*results)), tokens=ablation.plan.tokens)
    if metric is None:
        return None
    figure, lengths, texts = _figure(ablation), set[int](), {result["text"] for result in itertools.chain(*results)}
    axes = figure.add_subplot()
    for variant, style, own_results in zip(ablation.plan.variants, _styles(ablation), results, strict=True):
        # readings of one length differ only in how segments are cut, so one of them is enough
        scores = [
            {scored["reading"]["length"]: scored["score"][metric] for scored in result["scores"]}
            for result in own_results
            if len(result["scores"]) > 1
        ]
        shared = sorted(set.intersection(*map(set, scores))) if scores else []
        if not shared:
            continue
        means = {length: Mean.of([own[length] for own in scores]) for length in shared}
        _line(axes, list(means), list(means.values()), style, variant.name)
        lengths |= set(means)
    if not lengths:
        return None
    length_axis(axes, lengths)
    axes.set(
        xlabel="attention length at evaluation (tokens before a segment; segment itself not counted)",
        ylabel=f"loss ({METRICS[metric]})",
        title=f"{ablation.directory.name}: loss and attention length\n{texts.pop()}",
    )
    return save_with_legend(figure, axes, path, beside=True)


def draw_curves(ablation: Ablation) -> Path | None:
    """Draw validation loss against training time and tokens; None if there is nothing to draw or compare."""
    path = ablation.directory / "curves.png"
    path.unlink(missing_ok=True)  # as above
    results = _results(ablation)
    metric, _ = comparable(ablation.plan, list(itertools.chain(*results)), tokens=None)
    if metric is None:
        return None
    figure, n_line = _figure(ablation, width=12), 0
    by_time, by_tokens = figure.subplots(1, 2, sharey=True)
    paces = ablation.stored_paces()
    for variant, style, own_results in zip(ablation.plan.variants, _styles(ablation), results, strict=True):
        curves = [_validations(ablation.directory / result["run"]) for result in own_results]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if not steps:
            continue
        means = [Mean.of([curve[step][metric] for curve in curves]) for step in steps]
        tokens = [curves[0][step]["tokens"] / 1e6 for step in steps]
        pace = paces.get(variant.name)
        minutes = [
            (step * pace.seconds if pace else Mean.of([curve[step]["seconds"] for curve in curves]).mean) / 60 for step in steps
        ]
        _line(by_time, minutes, means, style, variant.name)
        _line(by_tokens, tokens, means, style, variant.name)
        n_line += 1
    if not n_line:
        return None
    how = "at the measured pace" if paces else "as it was"
    by_time.set(xlabel=f"training time (minutes, {how})", ylabel=f"validation loss ({METRICS[metric]})")
    by_tokens.set(xlabel="training tokens read (millions)")
    by_time.grid(alpha=0.3)
    figure.suptitle(f"{ablation.directory.name}: learning curves")
    return save_with_legend(figure, by_tokens, path, beside=True)


def _figure(ablation: Ablation, *, width: float = 9) -> "Figure":
    return new_figure(width=width + 2, height=max(5.0, 0.25 * len(ablation.plan.variants) + 1.5))


def _results(ablation: Ablation) -> list[list[dict[str, Any]]]:
    return [[result for result in ablation.results(own) if result.get("done")] for own in ablation.plan.variants]


def _styles(ablation: Ablation) -> list[dict[str, Any]]:
    """Return the style of each variant's lines.

    Color and marker show recipe and attention. Without recurrence, markers are open and lines thin. Lines are dashed if a run
    learns from half of the tokens.
    """
    variants = ablation.plan.variants
    kinds = list(dict.fromkeys((variant.recipe, variant.labels.get("attention")) for variant in variants))
    styles = [line_style(kinds.index((variant.recipe, variant.labels.get("attention")))) for variant in variants]
    for variant, style in zip(variants, styles, strict=True):
        open_ = variant.labels.get("recurrence") == "no"
        style["linestyle"] = "--" if variant.labels.get("loss") == "half" else "-"
        style |= {"markerfacecolor": "white" if open_ else style["color"], "linewidth": 1.0 if open_ else 1.8}
    return styles


def _line(axes: "Axes", x: list[Any], means: list[Mean], style: dict[str, Any], name: str) -> None:
    axes.plot(x, [mean.mean for mean in means], label=name, markersize=5, **style)
    spread = [mean.deviation or 0.0 for mean in means]
    if any(spread):
        low = [mean.mean - s for mean, s in zip(means, spread, strict=True)]
        high = [mean.mean + s for mean, s in zip(means, spread, strict=True)]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _validations(directory: Path) -> dict[int, dict[str, Any]]:
    entries = [entry for entry in read_metrics(directory) if entry["kind"] == "valid"]
    return {entry["step"]: entry for entry in entries if None not in (entry["loss"], entry["bpc"])}
