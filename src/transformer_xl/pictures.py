"""Figures without a window, written whole or not at all, and lines that color, dashes and marker each tell apart."""

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from transformer_xl.errors import ConfigError
from transformer_xl.files import check_file, whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")

MISSING = "pictures need matplotlib; in a clone: pip install -e '.[plots]'"

# of Okabe and Ito, because color-blind people can tell them apart
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MOST_MARKERS = 16  # on a line

_AGAIN = (":", "-.", (0, (1, 5)))  # dashes of lines of one run with one look, from the second on

_WIDE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei")
_WIDE_FONTS += ("Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans GB", "Arial Unicode MS")
"""Fonts with Chinese characters, which matplotlib's own lack; those that are installed are asked where it has no glyph."""


Look = Literal["marked", "thin", "dashed", "level", "end", "failed"]

LOOKS: dict[Look, dict[str, Any]] = {
    "marked": {"markersize": 5, "linewidth": 1.6},
    "thin": {"markersize": 4, "markerfacecolor": "none", "linewidth": 1, "alpha": 0.7},
    "dashed": {"markersize": 5, "markerfacecolor": "none", "linewidth": 1.2, "linestyle": "--"},
    "level": {"markersize": 5, "linestyle": "-.", "linewidth": 1.5},
    "end": {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.5, "linestyle": ""},
    "failed": {"marker": "|", "markersize": 12, "color": "black", "linestyle": ""},
}
"""What lines look like besides color and marker: validations, training, averaged weights, one value for all, a last score, and
marks at the bottom where there is none."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise a `ConfigError` if nothing can be drawn; call this before computing anything."""
    if not can_draw():
        raise ConfigError(MISSING)


def new_figure(*, width: float = 8, height: float = 4.5) -> "Figure":
    """Return an empty figure; sizes are in inches of 120 dots. matplotlib is imported here because importing it is slow."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def line_style(i: int, *, n_point: int = 1) -> dict[str, Any]:
    """Return the style of line number `i`: color, marker and, from the ninth on, dashes.

    Of many points, only some have a marker; lines that run side by side have them at different ones.
    """
    dashes = ("-", "--", ":", "-.")[i // len(_COLORS) % 4]
    every = math.ceil(n_point / _MOST_MARKERS)
    style = {"color": _COLORS[i % len(_COLORS)], "marker": _MARKERS[i % len(_MARKERS)], "linestyle": dashes}
    return style | {"markevery": (3 * i % every, every)}


def check_picture(path: Path | None, *, option: str = "plot") -> None:
    """Raise a `ConfigError` if a picture cannot be written to this path; call this before computing anything."""
    if path is None:
        return
    require_matplotlib()
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--{option} '{path}' must end in {', '.join(ENDINGS)}")
    check_file(path, option=option)


def save_with_legend(figure: "Figure", axes: "Axes", path: Path) -> Path:
    """Add a grid to `axes` and their legend below them, where it hides nothing, and write the figure."""
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", frameon=False)
    return save_picture(figure, path)


def save_picture(figure: "Figure", path: Path) -> Path:
    """Write a figure whole or not at all, in the format of the path's ending."""
    from matplotlib.axis import Tick
    from matplotlib.font_manager import get_font_names
    from matplotlib.text import Text
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    # matplotlib would read text between two dollar signs as a formula, so turn that off for all text but the numbers at axes
    axes = [
        axis
        for each in figure.axes
        for axis in (each.xaxis, each.yaxis)
        if isinstance(axis.get_major_formatter(), (ScalarFormatter, LogFormatter))
    ]
    ticks = [tick for axis in axes for tick in cast("list[Tick]", axis.findobj(Tick))]
    numbers = {label for tick in ticks for label in (tick.label1, tick.label2)}
    installed = set(get_font_names())
    wide_fonts = [name for name in _WIDE_FONTS if name in installed]
    for text in cast("list[Text]", figure.findobj(Text)):
        text.set_fontfamily([*text.get_fontfamily(), *wide_fonts])
        if text not in numbers:
            text.set_parse_math(False)
    with whole_file(path) as stray, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "constrained_layout not applied")  # a picture of two tokens has little room
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box stands for it
        figure.savefig(stray)
    return path


@dataclass(frozen=True)
class PlotLine:
    """A line of a picture."""

    run: str  # lines of one run have one color, unless it is the only one
    name: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look = "marked"  # "level" has one y for every x, and of "failed" the y mean nothing
    trained: float | None = None  # the x of training, which is marked

    def as_dict(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        return vars(self) | {"x": list(self.x), "y": list(self.y)}


def draw(
    lines: Sequence[PlotLine],
    path: Path,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    lengths: bool = False,
    from_zero: bool = False,
) -> Path:
    """Draw lines, with the legend below them.

    `lengths`: see `length_axis`; `from_zero`: the x axis begins at zero, and `loss_axis` bounds the other one.
    """
    bounds = loss_axis(lines) if from_zero else None
    figure = new_figure(width=9, height=4.5 + 0.22 * len(lines))
    axes = figure.add_subplot()
    runs = list(dict.fromkeys(line.run for line in lines))
    looks = [(line.run, line.look) for line in lines]
    for i, line in enumerate(lines):
        style = line_style(i if len(runs) == 1 else runs.index(line.run), n_point=len(line.x)) | LOOKS[line.look]
        if len(runs) == 1 and line.look == "thin" and len(line.x) > 1:  # as in the loss curve of a run
            style["marker"] = ""
        elif line.look != "end" and (again := looks[:i].count(looks[i])):  # such as validations with another memory
            style["linestyle"] = _AGAIN[(again - 1) % len(_AGAIN)]
        if line.look == "level":  # from side to side
            places = [i / 10 for i in range(11)]
            axes.plot(places, [line.y[0]] * 11, label=line.name, transform=axes.get_yaxis_transform(), **style)
            continue
        if line.look == "failed":
            axes.plot(line.x, [0.03] * len(line.x), label=line.name, transform=axes.get_xaxis_transform(), **style)
            continue
        above = max(line.y) if bounds and max(line.y) > bounds[1] else None
        name = line.name if above is None else f"{line.name} (first losses, up to {above:.3f}, lie above)"
        axes.plot(line.x, line.y, label=name, **style)
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
    if bounds:
        axes.set_ylim(*bounds)
    return save_with_legend(figure, axes, path)


def loss_axis(lines: Sequence[PlotLine]) -> tuple[float, float] | None:
    """Return where a loss axis begins and ends on which first losses take half at most; None: all fit on it.

    They are the first of each line of more than three points, and all in its first tenth.

    Example:
        >>> losses = PlotLine("run", "training", range(1, 7), [5.0, 2.0, 1.5, 1.25, 1.0, 1.0])
        >>> loss_axis([losses])
        (0.95, 2.05)
    """
    first, rest, least = [], [], []
    for line in (line for line in lines if line.look != "failed"):
        least += line.y
        for x, y in zip(line.x, line.y, strict=False):  # of a level line one
            (first if len(line.x) > 3 and (x == line.x[0] or x <= line.x[-1] / 10) else rest).append(y)
    low, most = min(least, default=0.0), max(rest, default=0.0)
    top = max((y for y in first if y <= 2 * most - low), default=most)
    if low == most or max(first, default=low) <= top:
        return None
    margin = 0.05 * (max(top, most) - low)
    return low - margin, max(top, most) + margin


def length_axis(axes: "Axes", lengths: Collection[float]) -> None:
    """Make the x axis logarithmic with a place for zero, and put ticks at these lengths."""
    ticks = sorted(lengths)
    axes.set_xscale("symlog", base=2, linthresh=min((x for x in ticks if x > 0), default=1))
    axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
    axes.minorticks_off()
