"""Lines on a picture, and the same numbers as JSON. Color, dashes and marker each tell lines apart."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformer_xl.pictures import new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = Literal["marked", "thin", "plain", "dashed", "level"]

# of Okabe and Ito, because color-blind people can tell them apart
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_LOOKS: dict[Look, dict[str, Any]] = {
    "marked": {"markersize": 5, "linewidth": 1.6},
    "thin": {"marker": "", "linewidth": 0.8, "alpha": 0.6},
    "plain": {"marker": "", "linewidth": 1.6},
    "dashed": {"marker": "", "linewidth": 1.2, "linestyle": "--"},
}


@dataclass(frozen=True)
class Line:
    """A line, perhaps with a band from `low` to `high`."""

    run: str  # lines of one run have one color
    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    look: Look = "marked"  # only "marked" has markers; "level" has one y for every x
    trained: float | None = None  # the x of training, which is marked

    def as_dict(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        lists = {name: list(value) for name in ("x", "y", "low", "high") if (value := getattr(self, name)) is not None}
        return vars(self) | lists


def draw(
    lines: Sequence[Line],
    path: Path,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    lengths: bool = False,
    borders: Sequence[float] = (),
) -> Path:
    """Draw lines, with the legend beside them and vertical lines at `borders`; `lengths`: see `length_axis`."""
    figure = new_figure(width=10.5, height=max(4.5, 0.28 * len(lines) + 1.5))
    axes = figure.add_subplot()
    for border in borders:
        axes.axvline(border, color="0.8", linewidth=1, zorder=0)
    if borders:
        axes.set_xticks(list(borders))
    runs = list(dict.fromkeys(line.run for line in lines))
    for line in lines:
        style = line_style(runs.index(line.run))
        if line.look == "level":
            axes.axhline(line.y[0], label=line.name, color=style["color"], linestyle="-.", linewidth=1.5)
            continue
        dot: dict[str, Any] = {"marker": "."} if len(line.x) == 1 else {}  # a line of one point is invisible
        axes.plot(line.x, line.y, label=line.name, **style | _LOOKS[line.look] | dot)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=style["color"], alpha=0.2, linewidth=0)
        if line.trained is not None and line.trained in line.x:
            y = line.y[list(line.x).index(line.trained)]
            axes.plot([line.trained], [y], "o", markersize=13, markerfacecolor="none", markeredgecolor=style["color"])
    if any(line.trained in line.x for line in lines):
        axes.plot([], [], "o", markersize=11, markerfacecolor="none", markeredgecolor="black", label="length in training")
    if lengths:
        length_axis(axes, {x for line in lines for x in line.x})
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return save_with_legend(figure, axes, path)


def length_axis(axes: "Axes", lengths: Collection[float]) -> None:
    """Make the x axis logarithmic with a place for zero, and put ticks at these lengths."""
    ticks = sorted(lengths)
    axes.set_xscale("symlog", base=2, linthresh=min((x for x in ticks if x > 0), default=1))
    axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
    axes.minorticks_off()


def save_with_legend(figure: "Figure", axes: "Axes", path: Path) -> Path:
    """Add a grid to `axes` and their legend beside them, and write the figure."""
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return save_picture(figure, path)


def line_style(i: int) -> dict[str, Any]:
    """Return the style of line number `i`."""
    dashes = ("-", "--", ":", "-.")[i // len(COLORS) % 4]
    return {"color": COLORS[i % len(COLORS)], "marker": _MARKERS[i % len(_MARKERS)], "linestyle": dashes}
