"""Shows the progress of a training: a live bar on a terminal, plain lines elsewhere."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from transformer_xl.console import WARNING, Bar, Unit, broken, clock, printable


class Display:
    """Shows the progress of a run on stderr. With `quiet` it shows only warnings; `name` distinguishes runs.

    If it cannot be written, because a terminal was closed or a disk is full, nothing more is shown. If it is a pipe that nobody
    reads any more, `is_lost` becomes true, too.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None, name: str = "") -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.console.on_broken_pipe = self._lose  # rich would end the process
        self.is_lost = False
        self.quiet = quiet
        self._name = f"{printable(name)}: " if name else ""
        self._bar: Progress | None = None
        self._task: Any = None
        self._began: tuple[float, float] | None = None

    def __enter__(self) -> "Display":
        if self.console.is_terminal and not self.quiet and not self.console.quiet:
            columns = (BarColumn(bar_width=None), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[state]}"))
            bar = Progress(*columns, console=self.console, transient=True, expand=True)
            self._task = bar.add_task("training", total=1.0, state="")
            with self._showing():
                bar.start()
                self._bar = bar
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            with self._showing():
                self._bar.stop()
            self._bar = None

    @property
    def has_begun(self) -> bool:
        """Whether a step was shown."""
        return self._began is not None

    def say(self, text: str) -> None:
        """Show a line, with control characters spelled out."""
        if not self.quiet:
            self._print(Text(printable(text)))

    def warn(self, text: str) -> None:
        """Show a warning likewise, in quiet runs too."""
        self._print(Text(f"warning: {self._name}{printable(text)}", style=WARNING))

    def show(self, text: str, *, title: str) -> None:
        """Show a piece of generated text between two lines, with control characters spelled out.

        It has no border at the right: terminals do not agree how wide marks and joined characters are.
        """
        if not self.quiet:
            self._print(Panel(Text(printable(text)), HORIZONTALS, title=Text(title), title_align="left", border_style="dim"))

    def advance(self, *, step: int, progress: float, loss: float, tokens_per_second: float, final: bool) -> None:
        """Show how far the run is. Without a live bar, only a `final` call writes a line. `loss` is in nats per token."""
        if self.quiet:
            return
        now = time.monotonic()
        self._began = self._began or (now, progress)
        since, done = now - self._began[0], progress - self._began[1]
        left = f" · {clock(since / done * (1 - progress))} left" if done > 0 else ""
        state = f"{self._name}step {step:,} · loss {loss:.3f} · {tokens_per_second:,.0f} tokens/s{left}"
        if self._bar:
            self._bar.update(self._task, completed=min(progress, 1.0), state=state)
        elif final:
            self._print(Text(f"{100 * min(progress, 1.0):3.0f}% · {state}"))

    def scoring(self, what: str, total: int, *, unit: Unit = "tokens") -> Callable[[int], None]:
        """Show how far a scoring of so many tokens or texts is; return what to call with the number that were just scored."""
        if self.quiet:
            return lambda n: None
        name, bar, task = f"{self._name}{what}", self._bar, self._task
        if bar is None:
            return Bar(name, total, unit=unit, show=lambda shown: self.say(shown.line())).advance
        return Bar(name, total, unit=unit, show=lambda shown: bar.update(task, state=shown.line()), seconds=0.5).advance

    def _print(self, shown: Text | Panel) -> None:
        """Print a line, broken between words only on a terminal, or a panel."""
        if isinstance(shown, Text) and self.console.is_terminal:
            shown.plain = broken(shown.plain, self.console.width)
        with self._showing():
            self.console.print(shown, soft_wrap=isinstance(shown, Text))

    @contextmanager
    def _showing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._end()

    def _lose(self) -> None:
        self.is_lost = True
        self._end()

    def _end(self) -> None:
        self.console.quiet = True
        with suppress(OSError), Path(os.devnull).open("w") as nothing:  # takes what is still buffered
            os.dup2(nothing.fileno(), self.console.file.fileno())
