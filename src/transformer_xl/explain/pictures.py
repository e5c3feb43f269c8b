"""Pictures of an explanation: attention by distance, losses along the text, what memory gains at each place of a segment."""

from typing import TYPE_CHECKING

import numpy as np

from transformer_xl.explain.explanation import Explanation
from transformer_xl.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HELPED, _MISLED = "#0072B2", "#D55E00"  # blue and vermilion, because color-blind people can tell them apart
_MOST_PIECES = 50  # along a text: more of them make a zigzag in which nobody sees anything


def pictures(explanation: Explanation) -> "dict[str, Figure]":
    """Return the figures that the model allows, by file name."""
    figures = {"along.png": _draw_along(explanation)}
    if explanation.facts.distances is not None:
        figures["attention.png"] = _draw_attention(explanation)
    if explanation.facts.without is not None:
        figures["gain.png"] = _draw_gain(explanation)
    return figures


def _draw_attention(explanation: Explanation) -> "Figure":
    """Draw each head's attention by distance, a row per head, and its share of memory."""
    found, heads = explanation.facts.distances, explanation.heads
    assert found is not None and heads is not None
    from matplotlib import patheffects
    from matplotlib.colors import PowerNorm

    (n_layer, n_head), reading = heads, explanation.reading
    mass = found.per_distance.reshape(n_layer * n_head, -1)
    figure = new_figure(width=9, height=2.2 + 0.2 * max(len(mass), 8))
    remembers = bool(reading.mem_len)
    left, *others = figure.subplots(1, 1 + remembers, sharey=True, width_ratios=[5, 1][: 1 + remembers], squeeze=False)[0]
    rows = np.arange(len(mass) + 1) - 0.5
    mesh = left.pcolormesh(found.edges + 1, rows, mass, cmap="cividis", norm=PowerNorm(0.5, vmin=0))
    left.set_xscale("log")
    left.xaxis.set_major_formatter("{x:,.0f}")
    left.set(xlabel="distance in tokens (1: the token right before)", ylabel="layer.head", title="attention by distance")
    left.set_xlim(1, found.edges[-1] + 1)
    if remembers:
        border = reading.tgt_len + reading.ext_len + 1
        left.axvline(border, color="white", linewidth=1.5)
        dark = [patheffects.withStroke(linewidth=3, foreground="black")]  # behind it may be any color
        fits = border**4 < found.edges[-1] ** 3  # at the right of the line, on a logarithmic axis
        side = {"xytext": (5, 5), "ha": "left"} if fits else {"xytext": (-5, 5), "ha": "right"}
        place = {"xy": (border, len(mass) - 0.5), "textcoords": "offset points", **side}
        left.annotate("all memory →", color="white", path_effects=dark, **place)
    names = [f"{i // n_head + 1}.{i % n_head + 1}" for i in range(len(mass))]
    step = -(-len(names) // 40)
    left.set_yticks(np.arange(0, len(names), step), names[::step], fontsize=9)
    left.invert_yaxis()
    for layer in range(1, n_layer):
        left.axhline(layer * n_head - 0.5, color="white", linewidth=0.8)
    for right in others:
        right.barh(np.arange(len(mass)), found.memory_share.ravel() * 100, color=_HELPED)
        right.set(xlabel="% in memory", xlim=(0, 100))
    figure.colorbar(mesh, ax=[left, *others][-1], label="share of a head's attention, per distance")
    return figure


def _draw_along(explanation: Explanation) -> "Figure":
    """Draw losses along the text, with and without memory, and what memory gains; each step is the mean of a piece."""
    facts = explanation.facts
    edges, nats = _means(facts.nats)
    figure = new_figure(width=9, height=5.3 if facts.without is not None else 3)
    axes = figure.subplots(2 if facts.without is not None else 1, 1, sharex=True, squeeze=False)[:, 0]
    label = "with memory" if facts.without is not None else None
    n_each = len(facts.nats) / len(nats)
    means = f", means of {n_each:,.0f} tokens" if n_each > 1 else ""
    axes[0].stairs(nats, edges, color="black", linewidth=1.2, baseline=None, label=label)
    axes[0].set(ylabel="nats per token", title=f"losses along the text{means}")
    axes[-1].set(xlabel="token", xlim=(0, len(facts.nats)))
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    if facts.without is not None and facts.gain is not None:
        without = _means(facts.without)[1]
        axes[0].stairs(without, edges, color=_MISLED, linewidth=1.2, linestyle="--", baseline=None, label="without memory")
        gain = _means(facts.gain)[1]
        axes[1].stairs(np.maximum(gain, 0), edges, color=_HELPED, fill=True, label="memory helped")
        axes[1].stairs(np.minimum(gain, 0), edges, color=_MISLED, fill=True, label="memory misled")
        axes[1].axhline(0, color="black", linewidth=0.5)
        axes[1].set(ylabel="nats gained per token")
        figure.legend(loc="outside lower left", frameon=False, ncols=4)
    return figure


def _draw_gain(explanation: Explanation) -> "Figure":
    """Draw what memory gains at each place of a segment."""
    gain, tgt_len = explanation.facts.gain, explanation.reading.tgt_len
    assert gain is not None
    place = np.arange(len(gain)) % tgt_len
    counts = np.maximum(np.bincount(place, minlength=tgt_len), 1)
    means = np.bincount(place, weights=gain, minlength=tgt_len) / counts
    figure = new_figure(width=9, height=3.5)
    axes = figure.add_subplot()
    axes.bar(np.arange(1, tgt_len + 1), means, width=1, color=np.where(means >= 0, _HELPED, _MISLED))
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="position in the segment (tokens)", ylabel="nats gained per token")
    axes.set(title="what memory gains at each position of a segment")
    axes.set_xlim(0.5, tgt_len + 0.5)
    return figure


def _means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of equal pieces of a text, and the mean value of each.

    Example:
        >>> edges, means = _means(np.arange(1000.0))
        >>> edges[:3].tolist(), means[:2].tolist(), len(means)
        ([0, 20, 40], [9.5, 29.5], 50)
    """
    edges = np.linspace(0, len(values), min(_MOST_PIECES, len(values)) + 1).astype(int)
    sums = np.add.reduceat(values.astype(np.float64), edges[:-1])
    return edges, sums / np.diff(edges)
