"""A progress bar with rate and time left, where there is a terminal to show it on."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def token_progress(total: int, *, hidden: bool = False) -> Iterator[Callable[[int], object] | None]:
    """Show how many tokens are done; yields what to call with those just done, None where nobody looks.

    Args:
        total: tokens in all.
        hidden: show nothing.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield None
        return
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.speed:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        progress.update(task, completed=0)
        yield lambda n: progress.advance(task, n)
