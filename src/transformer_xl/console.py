"""Output for a terminal: messages, tables, and one kind of progress bar; without a terminal, lines instead of the bar."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress

Unit = Literal["tokens", "bytes", "texts"]

LINE_SECONDS = 10.0
"""Time between two lines of progress where there is no terminal, and before the first."""


def say(message: str, *, quiet: bool = False) -> None:
    """Write a line to stderr; one that cannot be written, as when nobody reads stderr any more, ends nothing."""
    if not quiet:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def warn(message: str, *, quiet: bool = False) -> None:
    """Write a warning to stderr."""
    say(f"warning: {message}", quiet=quiet)


_UNPRINTABLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def printable(text: str) -> str:
    r"""Return a text with control characters spelled out, because a terminal would act on them.

    Example:
        >>> print(printable("a\x1b[31mb\n"))
        a\x1b[31mb
        <BLANKLINE>
    """
    return text.translate(_UNPRINTABLE)


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


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as a Markdown table, all columns but the first flush right.

    Example:
        >>> print(markdown([["name", "n"], ["a", "12"]]))
        | name | n |
        |---|---:|
        | a | 12 |
    """
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *body])


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


def in_bytes(n: float) -> str:
    """Return a number of bytes with a fitting unit.

    Example:
        >>> in_bytes(8_300_000_000)
        '8.3 GB'
    """
    return short(n, ("B", "kB", "MB", "GB", "TB", "PB"))


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


class Lines(Bar):
    """Progress as lines of text: the task, how much of it is done, how fast, and the time left.

    Args:
        what: the task; see `progress` for this, `total` and `unit`.
        total: its size.
        unit: of it.
        say: shows a line.
        seconds: between two lines, and before the first; None: `LINE_SECONDS`.
    """

    def __init__(
        self,
        what: str,
        total: float | None,
        *,
        unit: Unit | None = "tokens",
        say: Callable[[str], object] = say,
        seconds: float | None = None,
    ) -> None:
        super().__init__(None)
        self._unit, self._say, self._seconds = unit, say, LINE_SECONDS if seconds is None else seconds
        self._said = time.monotonic()
        self._begin(what, total, 0)

    def _begin(self, what: str, total: float | None, done: float) -> None:
        self._what, self._total, self._first, self._done, self._note = what, total, done, done, ""
        self._began = time.monotonic()

    def begin(self, what: str, total: float | None = None, *, done: float = 0) -> None:
        """See `Bar`."""
        self._begin(what, total, done)
        self._show()

    def next(self, what: str) -> None:
        """See `Bar`."""
        self._done += 1 if self._what else 0
        self._what, self._note = what, ""
        self._show()

    def advance(self, n: float = 1) -> None:
        """See `Bar`."""
        self._done += n
        self._show()

    def note(self, text: str) -> None:
        """See `Bar`."""
        self._note = text
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._said >= self._seconds:
            self._said = now
            self._say(f"{self._what}: " * bool(self._what) + " · ".join(filter(None, self._parts(now))))

    def _parts(self, now: float) -> Iterator[str]:
        rate = (self._done - self._first) / max(now - self._began, 1e-9)
        if self._unit is None:
            yield f"{self._done:g} of {self._total:g}" if self._total else ""
        elif self._total:
            yield f"{100 * min(self._done / self._total, 1):.0f}%"
        else:
            yield f"{self._done:,.0f} {self._unit}"
        if self._unit:
            is_bytes = self._unit == "bytes"
            yield f"{short(rate, ('B', 'kB', 'MB', 'GB'))}/s" if is_bytes else f"{rate:,.0f} {self._unit}/s"
            yield f"{clock((self._total - self._done) / rate)} left" if self._total and rate else ""
        yield self._note


@contextlib.contextmanager
def progress(
    what: str = "", total: float | None = None, *, unit: Unit | None = "tokens", hidden: bool = False, threaded: bool = True
) -> Iterator[Bar]:
    """Show a bar on stderr while the block runs, which disappears at the end; without a terminal, a line every ten seconds.

    Args:
        what: the task.
        total: its size in units; None: unknown.
        unit: tokens, bytes or texts, whose rate is shown; None: other things, without a rate.
        hidden: show nothing.
        threaded: redraw ten times a second. False: redraw only when a method is called, and at most five times a second, so
            that drawing takes little time from what is being timed. Lines are always written when a method is called.
    """
    if hidden:
        yield Bar(None)
        return
    if not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):  # rich takes a tenth of a second to import
        yield Lines(what, total, unit=unit)
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield Lines(what, total, unit=unit)
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
            return Text(f"{task.speed:,.0f} {unit}/s" if task.speed else "", no_wrap=True)

    rates = {"bytes": [DownloadColumn(), TransferSpeedColumn()], None: []}
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        *rates.get(unit, [Rate()]),
        *([TimeRemainingColumn()] if unit else []),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    with Progress(*columns, console=console, transient=True, auto_refresh=threaded) as bar:
        bar.add_task(what, total=total, note="")
        yield Bar(bar)
