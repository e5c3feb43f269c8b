"""This process: its place among those that `torchrun` started, its memory, its signals, and what computes beside it.

`world.py` lets processes talk.
"""

import ctypes
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_met = False
_LOAD = Path("/proc/loadavg")
_LOOKS, _LOOK_SECONDS = 5, 0.02  # what has ended at one of several looks is not what keeps a core busy
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
def stop_signals(*, once: bool) -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list instead of dying; who reads the list stops.

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
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    except ValueError:  # not the main thread, so the caller handles signals
        pass
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Busy:
    """More computes on this machine than it has cores.

    Example:
        >>> problem = Busy(n_other=3, n_core=4)
        >>> print(problem)
        other programs keep 3 of this machine's 4 cores busy
        >>> problem.remedy(threads=4)
        'wait until they have ended, or compute with OMP_NUM_THREADS=1'
    """

    n_other: int  # programs or threads besides this process
    n_core: int  # of the machine

    @property
    def free(self) -> int:
        """The number of cores that are left; at least 1."""
        return max(1, self.n_core - self.n_other)

    def remedy(self, threads: int, setting: str = "OMP_NUM_THREADS") -> str:
        """Return what helps a process with so many threads, whose number a setting changes."""
        return "wait until they have ended" + (f", or compute with {setting}={self.free}" if self.free < threads else "")

    def __str__(self) -> str:
        """Return it in words."""
        cores = "the only core" if self.n_core == 1 else f"all {self.n_core} cores"
        if self.n_other < self.n_core:
            return f"other programs keep {self.n_other} of this machine's {self.n_core} cores busy"
        return f"other programs keep {cores} of this machine busy"


def busy(threads: int, *, since_long: bool = False) -> Busy | None:
    """Return whether others leave too few cores for this process with so many threads; None if not, or if nobody knows.

    With `since_long` these threads have computed for a minute.
    Those that `torchrun` started with it count as itself. All cores of the machine are compared, because whatever is known of
    others is known of all of them.
    """
    n_own, n_core = _number("LOCAL_WORLD_SIZE") or 1, os.cpu_count() or 1
    n_other = running_beside(n_own * threads if since_long else 0) - (n_own - 1)
    return Busy(n_other, n_core) if n_other > 0 and n_other + n_own * threads > n_core else None


def running_beside(own: int = 0) -> int:
    """Return how many threads of other processes compute now, in a tenth of a second at most; 0 if nobody knows.

    Where Linux does not say it, this is the load, the mean of the last minute, less the threads that were this process's `own`.
    """
    least = 0
    try:
        for look in range(_LOOKS):
            running = int(_LOAD.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1  # this thread reads
            least = min(running, least) if look else running
            if least <= 0:
                break
            time.sleep(_LOOK_SECONDS)
        return max(least, 0)
    except (OSError, ValueError, IndexError):
        with suppress(OSError):
            return max(0, int(os.getloadavg()[0]) - own)
        return 0
