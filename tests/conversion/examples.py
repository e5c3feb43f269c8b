"""Checkpoints of other programs to convert in tests: copies of the goldens' ones."""

import shutil
from pathlib import Path

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"


def copy(golden: str, folder: Path) -> Path:
    """Copy the checkpoint of a golden, without what was computed with it."""
    source = GOLDENS / golden
    return shutil.copytree(source / "checkpoint" if (source / "checkpoint").is_dir() else source, folder / "source")


def names(folder: Path) -> list[str]:
    """Return the names in a directory."""
    return sorted(path.name for path in folder.iterdir())
