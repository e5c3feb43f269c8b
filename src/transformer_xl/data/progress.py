"""A progress bar in bytes, with rate and time left, on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(
    description: str, *, total: int | None = None, done: int = 0, enabled: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a bar while the `with` block runs, if stderr is a terminal.

    Args:
        description: what is being done.
        total: bytes in all; None where that is not known beforehand.
        done: bytes that were done before.
        enabled: False shows nothing.

    Yields:
        A function to call with the number of bytes done since the last call.
    """
    if not (enabled and sys.stderr.isatty()):
        yield lambda n_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total, completed=done)
        yield lambda n_bytes: bar.advance(task, n_bytes)
