"""Figures without a window, written whole or not at all."""

import math
import warnings
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

_WIDE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei")
_WIDE_FONTS += ("Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans GB", "Arial Unicode MS")
"""Fonts with Chinese characters, which matplotlib's own lack; those that are installed are asked where it has no glyph."""


Look = Literal["marked", "thin", "dashed", "level", "end"]

LOOKS: dict[Look, dict[str, Any]] = {
    "marked": {"markersize": 5, "linewidth": 1.6},
    "thin": {"markersize": 4, "markerfacecolor": "none", "linewidth": 1, "alpha": 0.7},
    "dashed": {"markersize": 5, "markerfacecolor": "none", "linewidth": 1.2, "linestyle": "--"},
    "level": {"markersize": 5, "linestyle": "-.", "linewidth": 1.5},
    "end": {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.5, "linestyle": ""},
}
"""What lines look like besides color and marker: validations, training, averaged weights, one value for all, a last score."""


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


def save_with_legend(figure: "Figure", axes: "Axes", path: Path, *, beside: bool = False) -> Path:
    """Add a grid to `axes` and their legend below or `beside` them, where it hides nothing, and write the figure."""
    axes.grid(alpha=0.3)
    place = "outside right upper" if beside else "outside lower left"
    figure.legend(*axes.get_legend_handles_labels(), loc=place, frameon=False)
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
