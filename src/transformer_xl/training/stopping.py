"""Turn the signals that ask a run to stop into something that its loop can look at between steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stop_signal(*, once: bool) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list instead of dying; a second one acts as it always did, if only `once` is meant.

    `torchrun` passes on a signal that a terminal has sent to all processes already, so that each gets it twice.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for signal_number, handler in previous.items() if once else ():
            signal.signal(signal_number, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread: whoever runs it handles signals
        pass
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
