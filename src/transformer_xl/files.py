"""Files: written whole or not at all, deleted whole, read without following links, and held by one process at a time (POSIX).

What is written survives a killed process and a lost power supply.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STRAY_SUFFIX = ".tmp"
"""What the names of unfinished or half-deleted things end with; nothing that ends so is ever read."""

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class FileRecord:
    """What a file must be.

    Attributes:
        size: bytes.
        sha256: hash of the bytes, hexadecimal.
    """

    size: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and force it to the disk.

    Args:
        path: a file that does not exist yet.
        chunks: its content, in order; one chunk at a time is held in memory.

    Returns:
        Size and hash of the bytes that were handed over. They are not read back, so a disk that stores something else is
        found out when the file is loaded.

    Raises:
        OSError: if the file exists or cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def replace_file(path: Path, data: bytes) -> None:
    """Give a small file new content at once: a reader sees the old bytes or the new, never a mixture.

    Args:
        path: the file; it need not exist.
        data: the new content.

    Raises:
        OSError: if that fails; the old content is then still there.
    """
    stray = stray_name(path)
    stray.unlink(missing_ok=True)
    write_file(stray, [data])
    stray.replace(path)
    sync_directory(path.parent)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Let somebody else's writer give a file new content at once: a reader sees the old file or the new, never a mixture.

    Args:
        path: the file; it need not exist, its directory does.

    Yields:
        Another name in the same directory with the same ending, for the block to write. It becomes `path` when the block ends,
        and is removed when the block fails. No other process writes under that name.

    Raises:
        OSError: if the file cannot be moved to its place; the old content is then still there.
    """
    stray = path.with_name(f"{path.name}.{os.getpid()}{STRAY_SUFFIX}{path.suffix}")
    try:
        yield stray
        with stray.open("rb") as file:
            os.fsync(file.fileno())
        stray.replace(path)
    finally:
        stray.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def locked(path: Path, *, on_busy: Callable[[], object]) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; a process that dies lets go of it.

    A file system that cannot lock is trusted.

    Args:
        path: a file that exists only for this, and that is removed afterwards; its directory exists.
        on_busy: called once if another process holds it. If it returns, this process waits; an error that it raises goes on.

    Raises:
        OSError: if the file cannot be made.
    """
    told = False
    while True:
        with path.open("a") as file:
            if _lock(file.fileno()) and _is_still(path, file.fileno()):
                try:
                    yield
                finally:
                    with suppress(OSError):
                        path.unlink()
                return
        if not told:
            on_busy()
            told = True
        time.sleep(_POLL_SECONDS)


def _lock(descriptor: int) -> bool:
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


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to the disk: a file whose name is lost is lost.

    Args:
        directory: an existing directory.

    Raises:
        OSError: if the disk refuses.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create a directory, unless it exists, so that its name outlives a power cut.

    Args:
        directory: its parent must exist: a missing parent is more likely a lost mount than a wish for a new tree.

    Raises:
        OSError: if it cannot be created.
    """
    if not directory.is_dir():
        directory.mkdir()
        sync_directory(directory.parent)


def stray_name(path: Path) -> Path:
    """Return the name beside `path` under which it is written or deleted.

    Args:
        path: a file or directory.

    Returns:
        The same name with `STRAY_SUFFIX` appended.
    """
    return path.with_name(path.name + STRAY_SUFFIX)


def discard_directory(directory: Path) -> None:
    """Delete a directory so that, whenever the process is killed, no half-deleted one carries its name.

    Args:
        directory: what to delete; it need not exist.

    Raises:
        OSError: if that fails.
    """
    if not directory.is_dir():
        return
    stray = stray_name(directory)
    remove(stray)
    directory.rename(stray)
    sync_directory(directory.parent)
    remove(stray)


def remove(path: Path) -> None:
    """Delete whatever is at `path`, if anything; of a symbolic link the link alone.

    Args:
        path: a file, link or directory that nobody reads.

    Raises:
        OSError: if that fails.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def regular_size(path: Path) -> int:
    """Return the size of a regular file; a link could lead anywhere, and a device or pipe need never end.

    Args:
        path: what should be a regular file.

    Returns:
        Its size in bytes.

    Raises:
        ValueError: if it is anything else.
        OSError: if it does not exist.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is a link, directory or device, not a regular file")
    return status.st_size
