"""Pictures: figures without a window, written whole or not at all."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
"""What a picture's file may end in."""


def new_figure(*, width: float = 8, height: float = 4.5) -> "Figure":
    """Return an empty figure; matplotlib is imported here, because that is slow.

    Args:
        width: in inches, of 120 dots.
        height: the same.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_picture(path: Path | None, *, option: str = "plot", endings: Sequence[str] = ENDINGS) -> None:
    """Refuse a file that no picture can be written to, before anything is computed.

    Raises:
        ConfigError: another ending, or no such directory.
    """
    if path is None:
        return
    if path.suffix.lower() not in endings:
        raise ConfigError(f"--{option} '{path}' must end in {', '.join(endings)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--{option} '{path}': the directory '{path.absolute().parent}' does not exist; make it first")


def save_picture(figure: "Figure", path: Path, *, remedy: str = "free disk space or choose another file") -> Path:
    """Write a figure; its ending says of what kind. A picture that was there stays whole until this one is.

    Args:
        figure: what is drawn.
        path: of the file.
        remedy: what helps if it cannot be written.

    Raises:
        CheckpointError: the file cannot be written.
    """
    _take_literally(figure)
    try:
        with whole_file(path) as stray:
            figure.savefig(stray)
    except OSError as error:
        raise CheckpointError(f"cannot write '{path}': {error.strerror or error}; {remedy}") from None
    return path


def _take_literally(figure: "Figure") -> None:
    """Show names as they are, where matplotlib would read a formula between two dollar signs; numbers at axes stay its own."""
    from matplotlib.axis import Tick
    from matplotlib.text import Text

    numbers = {label for tick in cast("list[Tick]", figure.findobj(Tick)) for label in (tick.label1, tick.label2)}
    for text in cast("list[Text]", figure.findobj(Text)):
        if text not in numbers:
            text.set_parse_math(False)
