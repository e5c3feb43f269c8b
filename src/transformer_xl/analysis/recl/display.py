"""What a person sees of relative effective context lengths: a bar while losses are computed, and a table."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from transformer_xl.analysis.recl.measure import Recl


class _Rate(ProgressColumn):
    """Tokens per second, as soon as there are any."""

    def render(self, task: Task) -> Text:
        """Return it as text."""
        return Text(f"{task.speed:,.0f} tokens/s" if task.speed else "")


class LossProgress:
    """A bar for the losses of one model at one context after another.

    Args:
        bar: of rich; None: nothing is shown.
    """

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar

    def begin(self, name: str, context: int, n_token: int) -> None:
        """Go on to a model and a context at which it scores so many tokens."""
        if self._bar:
            self._bar.reset(TaskID(0), total=n_token, state=f"{name} after {context:,} tokens")

    def advance(self, n: int) -> None:
        """Say how many tokens were scored just now."""
        if self._bar:
            self._bar.advance(TaskID(0), n)


@contextlib.contextmanager
def loss_progress() -> Iterator[LossProgress]:
    """Show a bar with rate and time left on stderr if that is a terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield LossProgress(None)
        return
    columns = (
        TextColumn("{task.fields[state]}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task("", total=1, state="")
        yield LossProgress(bar)


def misleading_lengths(found: Recl) -> list[str]:
    """Return a line for each model that predicts no better at its length: it gains on some tokens and loses on others.

    Args:
        found: what was measured.
    """
    lines = []
    for name, lengths in found.lengths.items():
        first, *others = sorted(found.losses[name])
        longest = max(length.context for length in lengths.values())
        reached = next((context for context in others if context >= longest), first)
        before, after = found.losses[name][first], found.losses[name][reached]
        if longest > first and after >= before:
            lines.append(
                f"{name} has a mean loss of {before:.4f} nats after {first:,} tokens and of {after:.4f} after {longest:,}: "
                "what it gains on some tokens it loses on others, which the measure does not count"
            )
    return lines


def recl_table(found: Recl, parameters: Mapping[str, int], *, title: str) -> str:
    """Return a group as a table: a row for each model, a column for each r.

    Args:
        found: what was measured.
        parameters: how many each model has.
        title: above the names.
    """
    shares = list(next(iter(found.lengths.values())))
    rows: list[Sequence[str]] = [(title, "parameters", *(f"r = {share:g}" for share in shares))]
    for name, lengths in found.lengths.items():
        rows.append((name, f"{parameters[name]:,}", *(str(lengths[share]) for share in shares)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
