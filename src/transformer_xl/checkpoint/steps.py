"""Where the checkpoints of a run are, by the names of their directories; PyTorch is not imported."""

import re
from pathlib import Path

STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})(\.old)?")


def finished_steps(directory: Path) -> list[int]:
    """Return the steps of all finished checkpoints, ascending; only loading shows whether they are sound."""
    try:
        names = [path.name for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []
    return sorted({int(match[1]) for match in map(STEP_NAME.fullmatch, names) if match})


def final_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is written."""
    return directory / f"step-{step:08d}"


def old_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is kept while it is written once more."""
    return directory / f"step-{step:08d}.old"


def readable_path(directory: Path, step: int) -> Path:
    """Return the directory to read of a step: the final one, or the old one if only that is there."""
    final, old = final_path(directory, step), old_path(directory, step)
    return old if old.is_dir() and not final.is_dir() else final
