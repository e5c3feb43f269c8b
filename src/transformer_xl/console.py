"""Output for a terminal: messages, tables, and one kind of progress bar."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress

Unit = Literal["tokens", "bytes"]


def say(message: str, *, quiet: bool = False) -> None:
    """Write a line to stderr."""
    if not quiet:
        print(message, file=sys.stderr, flush=True)


def warn(message: str, *, quiet: bool = False) -> None:
    """Write a warning to stderr."""
    say(f"warning: {message}", quiet=quiet)


def table(rows: Sequence[Sequence[str]], *, n_left: int = 1) -> str:
    """Return rows of text as aligned columns.

    Args:
        rows: rows of equally many cells; the first row is the head.
        n_left: the number of columns that are flush left; the others are flush right.

    Example:
        >>> print(table([["name", "n"], ["a", "12"], ["bcdef", "3"]]))
        name    n
        a      12
        bcdef   3
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.ljust(w) if i < n_left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(rows: Sequence[Sequence[str]], *, n_left: int = 1) -> str:
    """Return rows of text as a Markdown table; see `table`.

    Example:
        >>> print(markdown([["name", "n"], ["a", "12"]]))
        | name | n |
        |---|---:|
        | a | 12 |
    """
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    rule = "".join("---|" if i < n_left else "---:|" for i in range(len(rows[0])))
    return "\n".join([head, f"|{rule}", *body])


def short(n: float, units: Sequence[str]) -> str:
    """Return a number with three digits and a fitting unit; each of `units` is a thousand times the one before.

    Example:
        >>> short(1_234_000_000, ("B", "kB", "MB", "GB")), short(56_700, ("B", "kB")), short(0, ("B",))
        ('1.23 GB', '56.7 kB', '0 B')
    """
    i = 0
    while n >= 999.5 and i < len(units) - 1:
        n, i = n / 1000, i + 1
    return f"{n:.3g} {units[i]}"


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or as hours, minutes and seconds.

    Example:
        >>> clock(75), clock(3725)
        ('1:15', '1:02:05')
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Bar:
    """A progress bar of rich; without one (None) nothing is shown."""

    def __init__(self, bar: "Progress | None") -> None:
        self._bar = bar
        self._drawn = 0.0

    def begin(self, what: str, total: float | None = None, *, done: float = 0) -> None:
        """Start a new task. `total` is its size (None: unknown), `done` the part that is done already."""
        if self._bar:
            self._bar.reset(self._bar.task_ids[0], total=total, completed=int(done), description=what, note="")
            self._draw(0.0)

    def next(self, what: str) -> None:
        """Start the next of the tasks that the bar counts; the one before is done."""
        if self._bar:
            task = self._bar.tasks[0]
            self._bar.update(task.id, advance=1 if task.description else 0, description=what, note="")
            self._draw(0.0)

    def advance(self, n: float = 1) -> None:
        """Add the amount done since the last call."""
        if self._bar:
            self._bar.advance(self._bar.task_ids[0], n)
            self._draw()

    def note(self, text: str) -> None:
        """Show a text next to the bar."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], note=text)
            self._draw()

    def _draw(self, seconds: float = 0.2) -> None:
        """Draw a bar that has no thread to draw it, but not again within this many seconds."""
        now = time.monotonic()
        if self._bar and not self._bar.live.auto_refresh and now - self._drawn >= seconds:
            self._bar.refresh()
            self._drawn = now


@contextlib.contextmanager
def progress(
    what: str = "", total: float | None = None, *, unit: Unit | None = "tokens", hidden: bool = False, threaded: bool = True
) -> Iterator[Bar]:
    """Show a bar on stderr while the block runs, if stderr is a terminal; it disappears at the end.

    Args:
        what: the task.
        total: its size in units; None: unknown.
        unit: tokens or bytes, whose rate is shown; None: other things, without a rate.
        hidden: show nothing.
        threaded: redraw ten times a second. False: redraw only when a method is called, and at most five times a second, so
            that drawing takes little time from what is being timed.
    """
    if hidden or not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):  # rich takes a tenth of a second to import
        yield Bar(None)
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield Bar(None)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f} tokens/s" if task.speed else "", no_wrap=True)

    rate = {"tokens": [Rate()], "bytes": [DownloadColumn(), TransferSpeedColumn()], None: []}[unit]
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        *rate,
        *([TimeRemainingColumn()] if unit else []),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    with Progress(*columns, console=console, transient=True, auto_refresh=threaded) as bar:
        bar.add_task(what, total=total, note="")
        yield Bar(bar)
