"""A bar for tokens that are read, with rate and time left, where there is a terminal to show it on."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    """Tokens per second, as soon as there are any."""

    def render(self, task: Task) -> Text:
        """Return it as text."""
        return Text(f"{task.speed:,.0f} tokens/s" if task.speed else "", no_wrap=True)


class TokenBar:
    """A bar for one thing after another.

    Args:
        bar: of rich; None: nothing is shown.
    """

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar

    def begin(self, what: str, total: int) -> None:
        """Go on to something that has so many tokens."""
        if self._bar:
            self._bar.reset(TaskID(0), total=total, description=what)

    def advance(self, n: int) -> None:
        """Say how many tokens were done just now."""
        if self._bar:
            self._bar.advance(TaskID(0), n)


@contextlib.contextmanager
def token_bar(*, hidden: bool = False) -> Iterator[TokenBar]:
    """Show a bar on stderr if that is a terminal.

    Args:
        hidden: show nothing.
    """
    console = Console(stderr=True, highlight=False)
    if hidden or not console.is_terminal:
        yield TokenBar(None)
        return
    what = TextColumn("{task.description}", markup=False)
    share = TextColumn("{task.percentage:>3.0f}%")
    with Progress(what, BarColumn(bar_width=20), share, _Rate(), TimeRemainingColumn(), console=console, transient=True) as bar:
        bar.add_task("", total=None)
        yield TokenBar(bar)


@contextlib.contextmanager
def token_progress(total: int, what: str = "scoring", *, hidden: bool = False) -> Iterator[Callable[[int], object]]:
    """Show how many tokens are done; yields what to call with the number of those just done.

    Args:
        total: tokens in all.
        what: is being done.
        hidden: show nothing.
    """
    with token_bar(hidden=hidden) as bar:
        bar.begin(what, total)
        yield bar.advance
