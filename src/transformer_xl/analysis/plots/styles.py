"""How lines are told apart, in color and without: the colors of Okabe and Ito, dashes and markers."""

from collections.abc import Sequence
from typing import Any

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
"""Distinguishable for color-blind people."""

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def line_style(i: int) -> dict[str, Any]:
    """Return the style of line number `i`."""
    dashes = ("-", "--", ":", "-.")[i // len(COLORS) % 4]
    return {"color": COLORS[i % len(COLORS)], "marker": _MARKERS[i % len(_MARKERS)], "linestyle": dashes}


def variant_styles(labels: Sequence[tuple[str, dict[str, str]]]) -> list[dict[str, Any]]:
    """Return a style for each variant; lines of variants that are alike in one respect look alike in it.

    Color and marker say recipe and attention; markers are open and lines thin without recurrence; lines are dashed where
    half of the tokens are learned from.

    Args:
        labels: recipe and place on each axis of each variant.
    """
    kinds = list(dict.fromkeys((recipe, own.get("attention")) for recipe, own in labels))
    styles = []
    for recipe, own in labels:
        style = line_style(kinds.index((recipe, own.get("attention"))))
        open_ = own.get("recurrence") == "no"
        style["linestyle"] = "--" if own.get("loss") == "half" else "-"
        styles.append(style | {"markerfacecolor": "white" if open_ else style["color"], "linewidth": 1.0 if open_ else 1.8})
    return styles
