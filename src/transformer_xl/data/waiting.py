"""One process at a time: the others wait."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_SECONDS = 0.2


@contextmanager
def one_at_a_time(path: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold the file `path` while the block runs; a process that dies lets go of it.

    A file system that cannot lock is trusted.

    Args:
        path: of a file that exists only for this; its directory exists.
        on_wait: called once if another process holds it.
    """
    waits = False
    while True:
        with path.open("a") as file:
            if _locked(file.fileno()) and _is_still(path, file.fileno()):
                try:
                    yield
                finally:
                    with suppress(OSError):
                        path.unlink()
                return
        if not waits:
            on_wait()
            waits = True
        time.sleep(_POLL_SECONDS)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Say whether the file that was opened is the one that others find: the one before may have been removed meanwhile."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
