"""What a person sees while an ablation goes on: one bar at a time, and a line for each run that is finished."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from transformer_xl.analysis.ablation.plan import Trial
from transformer_xl.console import Bar, progress
from transformer_xl.training.display import Display


class AblationDisplay:
    """Progress of an ablation on stderr.

    Args:
        quiet: show nothing but warnings.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Show a line."""
        if not self.quiet:
            self.console.print(Text(text), soft_wrap=not self.console.is_terminal)

    def training(self, trial: Trial) -> Display:
        """Return what shows how a run is trained."""
        return _RunDisplay(name=trial.name, quiet=self.quiet, console=self.console)

    @contextlib.contextmanager
    def measuring(self, n: int) -> Iterator[Callable[[str], object]]:
        """Show a bar of `n` turns; yields what to call with the name of each.

        It is drawn between what is timed, and never by another thread, which would take time from it.
        """
        self.say("measuring the time of a step of each variant, in turn")
        if self.quiet or not self.console.is_terminal:
            yield lambda name: None
            return
        columns = (BarColumn(bar_width=20), TextColumn("{task.fields[name]}"))
        with Progress(*columns, console=self.console, transient=True, auto_refresh=False) as bar:
            task = bar.add_task("", total=n, name="")

            def report(name: str) -> None:
                bar.update(task, advance=1, name=name)
                bar.refresh()

            yield report

    def scoring(self, trial: Trial, tokens: int) -> AbstractContextManager[Bar]:
        """Show a bar of so many tokens; which is told of those just scored."""
        return progress(f"scoring {trial.name}", tokens, hidden=self.quiet)


class _RunDisplay(Display):
    """One of many runs: a bar with its name; where there is no terminal a line for each fifth of it."""

    _LINES = 5
    _shown = 0

    def say(self, text: str) -> None:
        """Say nothing: how it ended is said by whoever scores it."""

    def show(self, text: str, *, title: str) -> None:
        """Show no samples."""

    def advance(self, *, step: int, progress: float, loss: float, tokens_per_second: float, final: bool) -> None:
        """Show how far the run is."""
        done = int(progress * self._LINES)
        final = final and done > self._shown
        self._shown = done if final else self._shown
        super().advance(step=step, progress=progress, loss=loss, tokens_per_second=tokens_per_second, final=final)
