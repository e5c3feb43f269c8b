"""Directories that are written whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformer_xl.errors import CheckpointError, system_reason
from transformer_xl.files import remove, stray_name, sync_directory


def check_free(target: Path) -> None:
    """Raise `CheckpointError` unless `target` is free and is not the current directory."""
    try:
        is_taken = target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir())))
        is_here = target.exists() and target.samefile(Path.cwd())
    except OSError as error:
        raise _cannot_write(target, error) from None
    if is_taken:
        raise CheckpointError(f"'{target}' exists already; choose another destination, or remove it")
    if is_here:
        raise CheckpointError(f"'{target}' is the current directory, which cannot be replaced; choose another destination")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory to write into. It is renamed to `target` when the block ends, or deleted if it fails."""
    folder = stray_name(target)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:  # it may be the user's own, or another process may be writing it
        raise CheckpointError(f"'{folder}' exists, as a conversion that was killed may leave behind; remove it") from None
    except OSError as error:
        raise _cannot_write(target, error) from None
    try:
        yield folder
        sync_directory(folder)
        folder.rename(target)  # takes the place of an empty directory
        sync_directory(target.absolute().parent)
    except BaseException as error:
        remove(folder)
        if isinstance(error, OSError):
            raise _cannot_write(target, error) from None
        raise


def _cannot_write(target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write '{target}': {system_reason(error, 'choose another place')}")
