"""What processes other than the first show and record: nothing."""

from pathlib import Path
from typing import Any

from rich.console import Console

from transformer_xl.training.display import Display
from transformer_xl.training.record import Record


class SilentRecord(Record):
    """A record that writes nothing."""

    def __init__(self) -> None:
        """Open nothing."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write nothing."""

    def sync(self) -> None:
        """Nothing was written."""

    def rewind(self, step: int) -> None:
        """Nothing was written."""

    def draw(self) -> Path | None:
        """Draw nothing."""
        return None

    def close(self) -> None:
        """Nothing is open."""


def silent_display() -> Display:
    """Return a display that shows nothing, warnings neither."""
    return Display(quiet=True, console=Console(quiet=True))
