"""Figures without a window, written whole or not at all."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transformer_xl.errors import CheckpointError, ConfigError, system_reason
from transformer_xl.files import check_file, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")


def new_figure(*, width: float = 8, height: float = 4.5) -> "Figure":
    """Return an empty figure; sizes are in inches of 120 dots. matplotlib is imported here because importing it is slow."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_picture(path: Path | None, *, option: str = "plot", endings: Sequence[str] = ENDINGS) -> None:
    """Raise a `ConfigError` if a picture cannot be written to this path; call this before computing anything."""
    if path is None:
        return
    if path.suffix.lower() not in endings:
        raise ConfigError(f"--{option} '{path}' must end in {', '.join(endings)}")
    check_file(path, option=option)


def save_picture(figure: "Figure", path: Path, *, remedy: str | None = None) -> Path:
    """Write a figure whole or not at all, in the format of the path's ending.

    Raises:
        CheckpointError: the file cannot be written; `remedy` ends the message; None: what fits.
    """
    from matplotlib.axis import Tick
    from matplotlib.text import Text

    # matplotlib would read text between two dollar signs as a formula, so turn that off for all text but the numbers at axes
    numbers = {label for tick in cast("list[Tick]", figure.findobj(Tick)) for label in (tick.label1, tick.label2)}
    for text in cast("list[Text]", figure.findobj(Text)):
        if text not in numbers:
            text.set_parse_math(False)
    try:
        with whole_file(path) as stray:
            figure.savefig(stray)
    except OSError as error:
        what = f"{error.strerror or error}; {remedy}" if remedy else system_reason(error, "choose another file")
        raise CheckpointError(f"cannot write '{path}': {what}") from None
    return path
