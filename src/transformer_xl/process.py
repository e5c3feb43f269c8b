"""This process: its place among those that `torchrun` started, and its memory. `world.py` lets processes talk."""

import ctypes
import os
import platform

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
