"""A picture of relative effective context lengths: what steps of context gain, a panel for each r, a row for each group."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from transformer_xl.analysis.recl.measure import Recl
from transformer_xl.pictures import new_figure, save_picture

_LEAST = 1e-4
"""Smaller gains, and losses, have no place on a logarithmic axis and are left out."""


def draw_recl(path: Path, groups: Sequence[Recl], *, threshold: float, title: str) -> None:
    """Draw relative gains against context length.

    A ring marks the effective length of a model, a triangle one that may be more.

    Args:
        path: of the picture; its ending says of what kind.
        groups: a row each.
        threshold: of the gain, a dashed line.
        title: above it.

    Raises:
        CheckpointError: the file cannot be written.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    shares = list(next(iter(groups[0].lengths.values())))
    places = _places([list(found.lengths) for found in groups])
    figure = new_figure(width=1.5 + 3.5 * len(shares), height=1 + 3.2 * len(groups))
    table = figure.subplots(len(groups), len(shares), squeeze=False, sharex=True, sharey=True)
    for i, (found, row) in enumerate(zip(groups, table, strict=True)):
        for share, axes in zip(shares, row, strict=True):
            axes.axhline(threshold, color="gray", linestyle="--", linewidth=1)
            for name, lengths in found.lengths.items():
                gains, length, color = found.gains[name][share], lengths[share], f"C{places[name]}"
                shown = {context: gain if gain >= _LEAST else math.nan for context, gain in gains.items()}
                axes.plot(list(shown), list(shown.values()), ".-", color=color, label=f"{name}: {length}")
                marker, size = ">" if length.at_least else "o", 10 + 4 * places[name]  # rings around one another
                height = shown.get(length.context, threshold)  # the first context: no step leads to it
                axes.plot(length.context, height, marker, color=color, markersize=size, fillstyle="none")
            axes.set(yscale="log", title=f"r = {share:g}" if len(groups) == 1 else f"group {i + 1}, r = {share:g}")
            axes.legend(frameon=False, fontsize="small")
        row[0].set_ylabel("perplexity gained by a step")
        row[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        row[0].yaxis.set_major_formatter(PercentFormatter(1))
        row[0].yaxis.set_minor_formatter(NullFormatter())
    for axes in table[-1]:
        axes.set_xlabel("context that the step leads to (tokens)")
    figure.suptitle(title)
    save_picture(figure, path)


def _places(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return a number for each name, small ones first: one for all groups that it is in, and in each of them its own.

    Example:
        >>> _places([["ours", "lstm"], ["vanilla", "ours"], ["other", "another"], ["other", "lstm"]])
        {'ours': 0, 'lstm': 1, 'vanilla': 1, 'other': 0, 'another': 1}
    """
    places: dict[str, int] = {}
    for name in dict.fromkeys(name for names in groups for name in names):
        taken = {places.get(other) for names in groups if name in names for other in names}
        places[name] = next(place for place in itertools.count() if place not in taken)
    return places
