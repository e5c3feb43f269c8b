"""Relative effective context lengths as tables, as JSON and as a picture, with a note where they mislead."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_xl.analysis.recl.measure import Recl
from transformer_xl.console import table
from transformer_xl.opening import Opened
from transformer_xl.pictures import new_figure, save_picture

_LEAST = 1e-4  # smaller gains, and losses, have no place on a logarithmic axis and are left out


def as_dict(found: Recl, opened: Mapping[str, Opened]) -> dict[str, Any]:
    """Return a group for JSON; `opened` has its models by name."""
    return {
        "models": [
            {
                "run": opened[name].source,
                "kind": opened[name].model.config.kind,
                "parameters": opened[name].n_parameter,
                "recl": {f"{r:g}": {"tokens": each.context, "at_least": each.at_least} for r, each in lengths.items()},
                "gains": {
                    f"{r:g}": {str(c): gain for c, gain in sorted(gains.items())} for r, gains in found.gains[name].items()
                },
                "losses": {str(c): loss for c, loss in sorted(found.losses[name].items())},
            }
            for name, lengths in found.lengths.items()
        ]
    }


def as_text(
    groups: Sequence[Recl], opened: Mapping[str, Opened], *, n_group: int, longest: int, interrupted: bool = False
) -> str:
    """Return tables of the groups measured so far, and notes on how to read them.

    `n_group` is the number of groups in all, `longest` the longest context that is measured.
    """
    parameters = {name: each.n_parameter for name, each in opened.items()}
    titles = ["effective context"] if n_group == 1 else [f"group {i + 1}" for i in range(len(groups))]
    parts = [recl_table(found, parameters, title=title) for title, found in zip(titles, groups, strict=True)]
    parts += dict.fromkeys(line for found in groups for line in misleading_lengths(found))
    if interrupted:
        parts.append("interrupted, so lengths with ≥ are not final; the same command continues from here")
    elif any(length.at_least for found in groups for own in found.lengths.values() for length in own.values()):
        parts.append(f"≥: still gains at {longest:,} tokens; a larger --max-context tells how far it goes")
    return "\n\n".join(parts)


def recl_table(found: Recl, parameters: Mapping[str, int], *, title: str) -> str:
    """Return a group as a table: a row for each model, a column for each r."""
    rows = [[title, "parameters", *(f"r = {share:g}" for share in next(iter(found.lengths.values())))]]
    rows += [[name, f"{parameters[name]:,}", *map(str, lengths.values())] for name, lengths in found.lengths.items()]
    return table(rows)


def misleading_lengths(found: Recl) -> list[str]:
    """Return a line for each model whose mean loss is no lower at its length: it gains on some tokens and loses on others."""
    lines = []
    for name, lengths in found.lengths.items():
        first, *others = sorted(found.losses[name])
        longest = max(length.context for length in lengths.values())
        reached = next((context for context in others if context >= longest), first)
        before, after = found.losses[name][first], found.losses[name][reached]
        if longest > first and after >= before:
            lines.append(
                f"{name} has a mean loss of {before:.4f} nats after {first:,} tokens and of {after:.4f} after {longest:,}: "
                "what it gains on some tokens it loses on others, which the measure does not count"
            )
    return lines


def draw_recl(path: Path, groups: Sequence[Recl], *, threshold: float, title: str) -> None:
    """Draw relative gains against context length, a row for each group.

    A ring marks the effective length of a model, a triangle one that may be more, a dashed line the threshold.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    shares = list(next(iter(groups[0].lengths.values())))
    ranks = _ranks([list(found.lengths) for found in groups])
    figure = new_figure(width=1.5 + 3.5 * len(shares), height=1 + 3.2 * len(groups))
    grid = figure.subplots(len(groups), len(shares), squeeze=False, sharex=True, sharey=True)
    gained = [gain for found in groups for of in found.gains.values() for gains in of.values() for gain in gains.values()]
    shown = [threshold, *(gain for gain in gained if gain >= _LEAST)]
    grid[0, 0].set_ylim(min(shown) / 1.5, max(shown) * 1.5)  # a line alone would make limits that are equal
    for i, (found, row) in enumerate(zip(groups, grid, strict=True)):
        for share, axes in zip(shares, row, strict=True):
            axes.axhline(threshold, color="gray", linestyle="--", linewidth=1)
            for name, lengths in found.lengths.items():
                gains, length, color = found.gains[name][share], lengths[share], f"C{ranks[name]}"
                drawn = {context: gain if gain >= _LEAST else math.nan for context, gain in gains.items()}
                axes.plot(list(drawn), list(drawn.values()), ".-", color=color, label=f"{name}: {length}")
                marker, size = ">" if length.at_least else "o", 10 + 4 * ranks[name]  # of other sizes, so that all are seen
                height = drawn.get(length.context, threshold)  # the first context: no step leads to it
                axes.plot(length.context, height, marker, color=color, markersize=size, fillstyle="none")
            axes.set(yscale="log", title=f"r = {share:g}" if len(groups) == 1 else f"group {i + 1}, r = {share:g}")
            axes.legend(frameon=False, fontsize="small")
        row[0].set_ylabel("perplexity gained by a step")
        row[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        row[0].yaxis.set_major_formatter(PercentFormatter(1))
        row[0].yaxis.set_minor_formatter(NullFormatter())
    for axes in grid[-1]:
        axes.set_xlabel("context that the step leads to (tokens)")
    figure.suptitle(title)
    save_picture(figure, path)


def _ranks(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the smallest number for each name such that no two names of one group share it.

    Example:
        >>> _ranks([["ours", "lstm"], ["vanilla", "ours"], ["other", "another"], ["other", "lstm"]])
        {'ours': 0, 'lstm': 1, 'vanilla': 1, 'other': 0, 'another': 1}
    """
    ranks: dict[str, int] = {}
    for name in dict.fromkeys(name for names in groups for name in names):
        taken = {ranks.get(other) for names in groups if name in names for other in names}
        ranks[name] = next(rank for rank in itertools.count() if rank not in taken)
    return ranks
