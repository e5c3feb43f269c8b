"""Output for a terminal: messages, tables, and one kind of progress bar; without a terminal, lines instead of the bar."""

import contextlib
import math
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

Unit = Literal["tokens", "bytes", "texts"]

LINE_SECONDS = 10.0
"""Time between two lines of progress where there is no terminal, and before the first."""

_ENDLESS = 1_000_000
"""Columns where there is no terminal."""

_LEAST_ROOM = 30
"""Columns of a terminal that the last column of a table needs beside the others."""

DRAW_SECONDS = 0.2
"""Time between two drawings of a bar on a terminal."""


def say(message: str, *, quiet: bool = False, style: str = "") -> None:
    """Write a line to stderr, control characters spelled out; if nobody reads stderr any more, that ends nothing.

    On a terminal it is broken between words, and may have a style.
    """
    if quiet:
        return
    text = printable(message)
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            text = broken(text, shutil.get_terminal_size().columns)
        if sys.stderr.isatty() and style:  # rich takes a tenth of a second to import
            from rich.console import Console
            from rich.text import Text

            Console(stderr=True).print(Text(text, style), soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


def broken(text: str, width: int) -> str:
    r"""Return a text whose lines are broken between words; a word that is longer than a line stays whole.

    Example:
        >>> print(broken("a list of words\na/very/long/path", 9))
        a list of
        words
        a/very/long/path
    """
    lines: list[str] = []
    for line in text.split("\n"):
        first, *words = line.split(" ")
        lines.append(first)
        for word in words:
            if lines[-1].strip() and _width(f"{lines[-1]} {word}") > width:
                lines.append(word)
            else:
                lines[-1] += f" {word}"
    return "\n".join(lines)


def fitted(text: str) -> str:
    """Return a text broken as `table` breaks: for the terminal, or the width that COLUMNS says, if any."""
    return broken(text, shutil.get_terminal_size((_ENDLESS, 0)).columns)


def warn(message: str, *, quiet: bool = False) -> None:
    """Write a warning to stderr, on one line; on a terminal it has a color."""
    say(f"warning: {' '.join(message.split())}", quiet=quiet, style=WARNING)


WARNING = "yellow"
"""The style of a warning on a terminal."""

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
    """Return rows of text as aligned columns, the first `n_left` flush left; the first row is the head.

    On a terminal (or with the variable COLUMNS) that is too narrow, the last column, if it is flush left, is broken between
    words; where it has no room beside the others, it stands below them.

    Example:
        >>> print(table([["name", "n"], ["a", "12"], ["bcdef", "3"]]))
        name    n
        a      12
        bcdef   3
    """
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    width = shutil.get_terminal_size((_ENDLESS, 0)).columns
    if n_left == len(widths) and width < sum(widths) + 2 * len(widths) - 2:
        return "\n".join(_narrow(rows, widths, width))
    lines = []
    for row in rows:
        pads = (" " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True))
        cells = (cell + pad if i < n_left else pad + cell for i, (cell, pad) in enumerate(zip(row, pads, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _narrow(rows: Sequence[Sequence[str]], widths: Sequence[int], width: int) -> Iterator[str]:
    """Yield rows of a table whose last column is broken; it begins where the others leave room, or else on the next line."""
    fronts = ["  ".join([*map(_padded, row[:-2], widths), row[-2]]) for row in rows]
    start = max((_width(front) + 2 for front in fronts if _width(front) + 2 <= width - _LEAST_ROOM), default=4)
    for front, row in zip(fronts, rows, strict=True):
        is_beside = start > 4 and _width(front) + 2 <= start
        last = broken(row[-1], width - start).replace("\n", "\n" + " " * start)
        yield (_padded(front, start) if is_beside else f"{broken(front, width)}\n{' ' * start}") + last


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def _width(text: str) -> int:
    """Return the columns of a terminal that a text takes: Chinese and other full-width characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


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
    """How much of a task is done, how fast, and the time left; shown when a method is called, but not too often.

    Args:
        what: the task; see `progress` for this, `total` and `unit`.
        total: its size.
        unit: of it.
        show: shows the bar; None: nothing does.
        seconds: between two calls of `show`, and before the first; None: `LINE_SECONDS`.

    Attributes:
        what: the task.
        total: its size; None: unknown.
        done: the part that is done.
    """

    def __init__(
        self,
        what: str = "",
        total: float | None = None,
        *,
        unit: Unit | None = "tokens",
        show: Callable[["Bar"], object] | None = None,
        seconds: float | None = None,
    ) -> None:
        self._unit, self._show, self._seconds = unit, show, LINE_SECONDS if seconds is None else seconds
        self._shown = time.monotonic()
        self._begin(what, total, 0)

    def _begin(self, what: str, total: float | None, done: float) -> None:
        self.what, self.total, self.done, self._first, self._note = what, total, done, done, ""
        self._began = time.monotonic()

    def begin(self, what: str, total: float | None = None, *, done: float = 0) -> None:
        """Start a new task. `total` is its size (None: unknown), `done` the part that is done already."""
        self._begin(what, total, done)
        self._update()

    def next(self, what: str) -> None:
        """Start the next of the tasks that the bar counts; the one before is done."""
        self.done += bool(self.what)
        self.what, self._note = what, ""
        self._update()

    def advance(self, n: float = 1) -> None:
        """Add the amount done since the last call."""
        self.done += n
        self._update()

    def note(self, text: str) -> None:
        """Show a text next to the bar."""
        self._note = text
        self._update()

    def _update(self) -> None:
        now = time.monotonic()
        if self._show and now - self._shown >= self._seconds:
            self._shown = now
            self._show(self)

    def line(self) -> str:
        """Return what there is to say as a line of text."""
        return f"{self.what}: " * bool(self.what) + self.state()

    def state(self) -> str:
        """Return how much is done, how fast, and the time left."""
        if self._unit is None:
            return " · ".join(filter(None, [f"{self.done:g} of {self.total:g}" if self.total else "", self._note]))
        rate = (self.done - self._first) / max(time.monotonic() - self._began, 1e-9)
        share = f"{100 * min(self.done / self.total, 1):.0f}%" if self.total else f"{self.done:,.0f} {self._unit}"
        speed = in_bytes(rate) if self._unit == "bytes" else f"{rate:,.0f} {self._unit}"
        left = f"{clock((self.total - self.done) / rate)} left" if self.total and rate else ""
        return " · ".join(filter(None, [share, f"{speed}/s", left, self._note]))


@contextlib.contextmanager
def progress(
    what: str = "", total: float | None = None, *, unit: Unit | None = "tokens", hidden: bool = False
) -> Iterator[Bar]:
    """Show a bar on stderr while the block runs, which disappears at the end; without a terminal, a line every ten seconds.

    It is drawn only when a method is called, so that drawing takes little time from what is being timed.

    Args:
        what: the task.
        total: its size in units; None: unknown.
        unit: tokens, bytes or texts, whose rate is shown; None: other things, without a rate.
        hidden: show nothing.
    """
    if hidden or not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):  # rich takes a tenth of a second to import
        yield Bar(what, total, unit=unit, show=None if hidden else lambda bar: say(bar.line()))
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    name, state = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[state]"))
    columns = (name, BarColumn(bar_width=20), state)
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as drawn:
        task = drawn.add_task(what, total=total, state="")

        def draw(bar: Bar) -> None:
            drawn.update(task, total=bar.total, completed=bar.done, description=bar.what, state=bar.state(), refresh=True)

        yield Bar(what, total, unit=unit, show=draw, seconds=DRAW_SECONDS)
