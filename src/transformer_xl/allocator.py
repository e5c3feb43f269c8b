"""Keep the memory that one step frees for the next, of training or of scoring."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def keep_freed_memory() -> bool:
    """Tell glibc not to give memory back to the system between steps.

    A step frees hundreds of megabytes and the next one asks for as much. By default glibc returns large blocks at once, and the
    system zeroes every page anew, which takes a tenth of a small model's step, trained or scored. This changes the whole
    process, so only the command line calls it.

    Returns:
        True if the C library understood; others than glibc are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    largest = 2**31 - 1
    mapped = mallopt(_M_MMAP_THRESHOLD, 1 << 30) or mallopt(_M_MMAP_THRESHOLD, 1 << 25)  # older versions take 32 MiB at most
    return bool(mapped and mallopt(_M_TRIM_THRESHOLD, largest))
