"""Directories that are written whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformer_xl.errors import CheckpointError
from transformer_xl.files import remove, stray_name, sync_directory


def check_free(target: Path) -> None:
    """Raise `CheckpointError` unless `target` is free and is not the current directory."""
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise CheckpointError(f"'{target}' exists already; choose another destination, or remove it")
    if target.exists() and target.samefile(Path.cwd()):
        raise CheckpointError(f"'{target}' is the current directory, which cannot be replaced; choose another destination")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory to write into. It is renamed to `target` when the block ends, or deleted if it fails."""
    folder = stray_name(target)
    folder.mkdir(parents=True)  # if it exists, it may be the user's own, or another process may be writing it
    try:
        yield folder
        sync_directory(folder)
        folder.rename(target)  # takes the place of an empty directory
        sync_directory(target.absolute().parent)
    except BaseException:
        remove(folder)
        raise
