"""Pictures of an ablation: how variants learn, and what more memory at evaluation is worth to each."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.analysis.ablation.ablation import Ablation
from transformer_xl.analysis.ablation.comparable import Unit, comparable
from transformer_xl.analysis.ablation.table import Mean
from transformer_xl.analysis.ablation.variants import Variant
from transformer_xl.analysis.plots.styles import variant_styles
from transformer_xl.pictures import new_figure, save_picture
from transformer_xl.training.record import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES, LENGTHS = "curves.png", "lengths.png"


def draw_lengths(ablation: Ablation) -> Path | None:
    """Draw loss against attention length, one line a variant; None if there is nothing to draw, or nothing to compare."""
    path, unit = _cleared(ablation, LENGTHS), _unit(ablation, tokens=ablation.plan.tokens)
    if unit is None:
        return None
    figure, lines = _figure(ablation), 0
    axes = figure.add_subplot()
    for variant, style in _styled(ablation):
        results = _done(ablation, variant)
        scores = [list(zip(*_by_length(result, unit), strict=True)) for result in results if len(result["scores"]) > 1]
        if not scores:
            continue
        lengths = list(scores[0][0])
        means = [Mean.of(values) for values in zip(*(own for _, own in scores), strict=True)]
        _line(axes, lengths, means, style, variant.name)
        lines += 1
    if not lines:
        return None
    axes.set_xscale("symlog", base=2, linthresh=_least_length(ablation))
    _ticks(axes)
    axes.set(
        xlabel="attention length at evaluation (tokens before a segment; segment itself not counted)",
        ylabel=_NAMES[unit],
        title=f"{ablation.directory.name}: loss and attention length",
    )
    return _finished(figure, axes, path)


def draw_curves(ablation: Ablation) -> Path | None:
    """Draw validation loss against training time and against tokens; None if nothing was validated or can be compared."""
    path, unit = _cleared(ablation, CURVES), _unit(ablation, tokens=None)
    if unit is None:
        return None
    figure, lines = _figure(ablation, width=12), 0
    by_time, by_tokens = figure.subplots(1, 2, sharey=True)
    paces = ablation.paces()
    for variant, style in _styled(ablation):
        curves = [_validations(ablation.directory / result["run"]) for result in _done(ablation, variant)]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if not steps:
            continue
        means = [Mean.of([curve[step][unit] for curve in curves]) for step in steps]
        tokens = [curves[0][step]["tokens"] / 1e6 for step in steps]
        pace = paces.get(variant.name)
        minutes = [
            (step * pace.seconds if pace else Mean.of([curve[step]["seconds"] for curve in curves]).mean) / 60 for step in steps
        ]
        _line(by_time, minutes, means, style, variant.name)
        _line(by_tokens, tokens, means, style, variant.name)
        lines += 1
    if not lines:
        return None
    how = "at the measured pace" if paces else "as it was"
    by_time.set(xlabel=f"training time (minutes, {how})", ylabel=f"validation loss ({_NAMES[unit]})")
    by_tokens.set(xlabel="tokens read (millions)")
    by_time.grid(alpha=0.3)
    figure.suptitle(f"{ablation.directory.name}: learning curves")
    return _finished(figure, by_tokens, path)


_NAMES = {"bpc": "bits per character", "loss": "nats per token"}


def _figure(ablation: Ablation, *, width: float = 9) -> "Figure":
    return new_figure(width=width + 2, height=max(5.0, 0.25 * len(ablation.plan.variants) + 1.5))


def _styled(ablation: Ablation) -> list[tuple[Variant, dict[str, Any]]]:
    variants = ablation.plan.variants
    styles = variant_styles([(variant.recipe, variant.labels) for variant in variants])
    return list(zip(variants, styles, strict=True))


def _done(ablation: Ablation, variant: Variant) -> list[dict[str, Any]]:
    results = [ablation.result(trial) for trial in ablation.plan.trials if trial.variant is variant]
    return [result for result in results if result and result.get("done")]


def _unit(ablation: Ablation, *, tokens: int | None) -> Unit | None:
    results = [result for variant in ablation.plan.variants for result in _done(ablation, variant)]
    return comparable(ablation.plan, results, tokens=tokens).unit


def _cleared(ablation: Ablation, name: str) -> Path:
    """Return where a picture goes, without one that was drawn when there was less to compare."""
    path = ablation.directory / name
    path.unlink(missing_ok=True)
    return path


def _by_length(result: dict[str, Any], unit: Unit) -> list[tuple[int, float]]:
    """Return length and loss of all readings but those that only differ in how segments are cut."""
    found = {scored["reading"]["length"]: scored["score"][unit] for scored in result["scores"]}
    return sorted(found.items())


def _least_length(ablation: Ablation) -> float:
    results = [result for variant in ablation.plan.variants for result in _done(ablation, variant)]
    lengths = [scored["reading"]["length"] for result in results for scored in result["scores"]]
    return min((length for length in lengths if length > 0), default=1)


def _line(axes: "Axes", x: list[Any], means: list[Mean], style: dict[str, Any], name: str) -> None:
    axes.plot(x, [mean.mean for mean in means], label=name, markersize=5, **style)
    spread = [mean.deviation or 0.0 for mean in means]
    if any(spread):
        low = [mean.mean - s for mean, s in zip(means, spread, strict=True)]
        high = [mean.mean + s for mean, s in zip(means, spread, strict=True)]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _ticks(axes: "Axes") -> None:
    lengths = sorted({float(x) for line in axes.get_lines() for x in line.get_xdata()})  # pyright: ignore
    axes.set_xticks(lengths, [f"{length:,.0f}" for length in lengths])
    axes.minorticks_off()


def _validations(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the validations of a run by step."""
    entries = read_metrics(directory)
    return {entry["step"]: entry for entry in entries if entry["kind"] == "valid" and entry["loss"] is not None}


def _finished(figure: "Figure", axes: "Axes", path: Path) -> Path:
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return save_picture(figure, path)
