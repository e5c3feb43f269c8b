"""Lines on a picture, and the same numbers as JSON. Color, dashes and marker each tell lines apart."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.pictures import LOOKS, Look, line_style, new_figure, save_with_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AGAIN = (":", "-.", (0, (1, 5)))  # dashes of lines of one run with one look, from the second on


@dataclass(frozen=True)
class PlotLine:
    """A line, perhaps with a band from `low` to `high`."""

    run: str  # lines of one run have one color, unless it is the only one
    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    look: Look = "marked"  # thin and dashed ones have open markers; "level" has one y for every x
    trained: float | None = None  # the x of training, which is marked

    def as_dict(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        lists = {name: list(value) for name in ("x", "y", "low", "high") if (value := getattr(self, name)) is not None}
        return vars(self) | lists


def draw(
    lines: Sequence[PlotLine],
    path: Path,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    lengths: bool = False,
    borders: Sequence[float] = (),
    from_zero: bool = False,
) -> Path:
    """Draw lines, with the legend below them and vertical lines at `borders`.

    `lengths`: see `length_axis`; `from_zero`: the x axis begins at zero.
    """
    figure = new_figure(width=9, height=4.5 + 0.22 * len(lines))
    axes = figure.add_subplot()
    for border in borders:
        axes.axvline(border, color="0.8", linewidth=1, zorder=0)
    if borders:
        axes.set_xticks(list(borders))
    runs = list(dict.fromkeys(line.run for line in lines))
    looks = [(line.run, line.look) for line in lines]
    for i, line in enumerate(lines):
        style = line_style(i if len(runs) == 1 else runs.index(line.run), n_point=len(line.x)) | LOOKS[line.look]
        if len(runs) == 1 and line.look == "thin" and len(line.x) > 1:  # as in the loss curve of a run
            style["marker"] = ""
        elif again := looks[:i].count(looks[i]):  # such as validations with another memory
            style["linestyle"] = _AGAIN[(again - 1) % len(_AGAIN)]
        if line.look == "level":  # from side to side
            places = [i / 10 for i in range(11)]
            axes.plot(places, [line.y[0]] * 11, label=line.name, transform=axes.get_yaxis_transform(), **style)
            continue
        axes.plot(line.x, line.y, label=line.name, **style)
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
    if from_zero:
        axes.set_xlim(left=0)
    return save_with_legend(figure, axes, path)


def length_axis(axes: "Axes", lengths: Collection[float]) -> None:
    """Make the x axis logarithmic with a place for zero, and put ticks at these lengths."""
    ticks = sorted(lengths)
    axes.set_xscale("symlog", base=2, linthresh=min((x for x in ticks if x > 0), default=1))
    axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
    axes.minorticks_off()
