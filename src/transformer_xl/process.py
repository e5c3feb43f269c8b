"""This process: its place among those that `torchrun` started, its memory, and its signals.

`world.py` lets processes talk.
"""

import ctypes
import os
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_met = False
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def rank() -> int:
    """Return the number of this process among all, 0 for the first or the only one."""
    return _number("RANK")


def local_rank() -> int:
    """Return the number of this process among those of its machine."""
    return _number("LOCAL_RANK")


def is_reporter() -> bool:
    """Return whether this process shows things to people: the only one, or the first that `torchrun` started."""
    return rank() == 0


def is_alone() -> bool:
    """Return whether no other process was started with this one; of several, one that looks at files alone misleads others."""
    return _number("WORLD_SIZE") <= 1


def restarts() -> int:
    """Return how many times `torchrun` has restarted the processes after one of them failed."""
    return _number("TORCHELASTIC_RESTART_COUNT")


def wait_for_reporter() -> None:
    """Let the first process say what is wrong: `torchrun` ends all processes as soon as one of them has failed."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(KeyboardInterrupt):
            time.sleep(10)


def note_meeting() -> None:
    """Remember that this process has connected to others."""
    global _met
    _met = True


def have_met() -> bool:
    """Return whether this process has connected to others, so that another process can report its errors."""
    return _met


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    return int(text) if text.isdecimal() else 0


def keep_freed_memory() -> bool:
    """Tell glibc not to return memory to the system between steps; return whether it understood.

    A step frees hundreds of megabytes, and the next one allocates as much. By default glibc returns large blocks at once, and
    the system zeroes every page again, which takes a tenth of a small model's step, in training and in scoring. This changes
    the whole process, so only the command line calls it. Other C libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    largest = 2**31 - 1
    mapped = mallopt(_M_MMAP_THRESHOLD, 1 << 30) or mallopt(_M_MMAP_THRESHOLD, 1 << 25)  # older versions take 32 MiB at most
    return bool(mapped and mallopt(_M_TRIM_THRESHOLD, largest))


@contextmanager
def stop_signals(*, once: bool, numbers: Sequence[int] | None = None) -> Iterator[list[int]]:
    """Collect signals (None: SIGINT, SIGTERM and SIGHUP) in a list instead of dying; who reads the list stops.

    With `once`, a second signal has its usual effect, except for SIGHUP, which arrives twice when a terminal is closed. Under
    `torchrun` it must not, because the terminal sends a signal to all processes, and `torchrun` sends it to them again. What
    `nohup` started goes on without a terminal.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for signal_number, handler in previous.items() if once else ():
            if signal_number != signal.SIGHUP:
                signal.signal(signal_number, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if numbers is None else numbers:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread, so the caller handles signals
        pass
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect the first Ctrl-C in a list, so that work can end in good order; a second one raises.

    This changes nothing if Ctrl-C is ignored, as in the background of a shell, or outside the main thread.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with stop_signals(once=True, numbers=() if is_ignored else (signal.SIGINT,)) as received:
        yield received


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
