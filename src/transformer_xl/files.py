"""Files that are written and deleted whole or not at all, even if the process is killed or the power fails; locks."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from transformer_xl.errors import ConfigError

STRAY_SUFFIX = ".tmp"
"""Ends the names of unfinished and half-deleted files and directories, which are never read."""

_POLL_SECONDS = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def canonical_json(value: Any) -> bytes:
    """Serialize to JSON in one fixed spelling: sorted keys, no spaces, ASCII; floats keep every bit.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold, or `value` contains itself.
        TypeError: something in `value` is not JSON.

    Example:
        >>> canonical_json({"b": 1, "a": [0.1, None]})
        b'{"a":[0.1,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value, as hex; spaces and the order of keys do not matter.

    Example:
        >>> json_sha256({"a": 1, "b": 2}) == json_sha256({"b": 2, "a": 1}) != json_sha256({"a": 1.0, "b": 2})
        True
    """
    return hashlib.sha256(canonical_json(value)).hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """Size and content of a file."""

    size: int  # bytes
    sha256: str  # hexadecimal


def record_of(path: Path) -> FileRecord:
    """Return the size and content of a file that exists."""
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, chunk by chunk, and force it to the disk.

    Size and hash are those of `chunks`: the file is not read back.
    """
    digest, size = hashlib.sha256(), 0
    with naming(path), path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


@contextmanager
def whole_file(path: Path, name: str | None = None) -> Iterator[Path]:
    """Yield the path of a temporary file for the block to write; it replaces `path` when the block ends.

    A reader of `path` sees the old or the new file, never a mixture. If the block fails, the temporary file is removed. A link
    stays, and the file that it leads to is replaced.

    Args:
        path: the file; it need not exist.
        name: of the temporary file, in the same directory; None: one with the same ending that no other process uses.

    Raises:
        OSError: the file cannot be moved to `path`, which keeps its old content; or `path` is a device or pipe.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # a directory refuses to be replaced, but these do not
        raise FileExistsError(errno.EEXIST, "it is a device or pipe, which would be replaced", str(path))
    if path.is_symlink():
        path = Path(os.path.realpath(path))  # unlike Path, it says nothing of loops
    stray = path.with_name(name or f"{path.name}.{os.getpid()}{STRAY_SUFFIX}{path.suffix}")
    stray.unlink(missing_ok=True)  # of a process that was killed
    try:
        with naming(path):
            yield stray
            with stray.open("rb") as file:
                os.fsync(file.fileno())
        stray.replace(path)
    finally:
        stray.unlink(missing_ok=True)
    sync_directory(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file, which need not exist, at once; one process at a time may do so, see `whole_file`."""
    with whole_file(path, stray_name(path).name) as stray, stray.open("xb") as file:
        file.write(data)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error of the system that names no file, as that of a full disk, the name of the file."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def check_file(path: Path, *, option: str) -> None:
    """Refuse a path where no file can be written or replaced; call this before hours of computing.

    A device or a pipe is refused, because what is written whole would take its place.
    """
    folder = path.absolute().parent
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise ConfigError(f"--{option} '{path}' is a directory, a device or a pipe; name a file")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--{option} '{path}': the directory '{folder}' is not there or cannot be written; choose another")


def check_new(path: Path) -> None:
    """Refuse a file that somebody has begun already, where it is not gone on with."""
    if path.exists() and path.stat().st_size:
        raise ConfigError(f"'{path}' is there already; go on with it by --resume, or choose another --out")


@contextmanager
def locked(path: Path, *, on_busy: Callable[[], object]) -> Iterator[None]:
    """Hold a lock while the block runs, in a directory of ours; it is released if the process dies.

    `on_busy` is called once if another process holds the lock: it returns to wait, or raises. On a file system that says that
    it has no locks, the block runs without one, or with what `filelock` does instead.

    Raises:
        OSError: the lock file cannot be made.
    """
    lock = FileLock(path, thread_local=False, poll_interval=_POLL_SECONDS)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            on_busy()
            lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    own = path.stat()
    try:
        yield
    finally:
        with suppress(OSError):
            if os.path.samestat(path.stat(), own):  # it may have been deleted, and be another's by now
                path.unlink()  # whoever waits for it notices that
        lock.release()


def files_below(root: Path, *, skip: Set[str] = frozenset()) -> list[Path]:
    """Return the files below `root` in order of path, but none that is hidden or in a folder that is hidden or named in `skip`.

    What cannot be looked at is left out, and folders that are links. `os.walk` before Python 3.12 recurses, which limits depth.
    """
    found: list[Path] = []
    folders = [root]
    while folders:
        entries: list[Path] = []
        with suppress(OSError):
            entries = [each for each in folders.pop().iterdir() if not each.name.startswith(".")]
        for each in entries:
            with suppress(OSError):  # of this one alone, such as a link into a folder that nobody may enter
                if each.is_file():
                    found.append(each)
                elif each.is_dir() and not each.is_symlink() and each.name not in skip:
                    folders.append(each)
    return sorted(found)


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to the disk, because a file whose name is lost is lost."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(directory):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Make a directory, and those that it lies in, unless they are there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path)) from None


def make_directory(directory: Path, *, mode: int = 0o777) -> None:
    """Create a directory, unless it exists, and force its name to the disk.

    Its parent must exist, because a missing parent is more likely a lost mount than a new place.
    """
    if not directory.is_dir():
        directory.mkdir(mode)
        sync_directory(directory.parent)


def stray_name(path: Path) -> Path:
    """Return the path beside a file or directory under which it is written or deleted."""
    return path.with_name(path.name + STRAY_SUFFIX)


def discard_directory(directory: Path) -> None:
    """Delete a directory, if it exists; a half-deleted one never has its name, even if the process is killed."""
    if not directory.is_dir():
        return
    stray = stray_name(directory)
    remove(stray)
    directory.rename(stray)
    sync_directory(directory.parent)
    remove(stray)


def remove(path: Path) -> None:
    """Delete a file, directory or symbolic link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
