"""Checkpoints of other programs to convert in tests: copies of the goldens' ones."""

import shutil
from pathlib import Path

from hypothesis import strategies as st

from transformer_xl.conversion.readers.inert import Stub

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"


def copy(golden: str, folder: Path) -> Path:
    """Copy the checkpoint of a golden, without what was computed with it."""
    source = GOLDENS / golden
    return shutil.copytree(source / "checkpoint" if (source / "checkpoint").is_dir() else source, folder / "source")


def names(folder: Path) -> list[str]:
    """Return the names in a directory."""
    return sorted(path.name for path in folder.iterdir())


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4) | st.builds(Stub, st.just("a.b")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
