"""What runs in a peer's environment is not collected here; and checkpoints that several tests read, converted once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transformer_xl.conversion.convert import convert

collect_ignore_glob = ["make_goldens_*.py", "peer_*.py", "golden_writer.py"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that converts a checkpoint, once for all tests of a module that ask for the same."""
    done: dict[str, Path] = {}

    def native(checkpoint: Path, settings: dict[str, Any]) -> Path:
        key = json.dumps([str(checkpoint), settings])
        if key not in done:
            done[key] = tmp_path_factory.mktemp("converted") / "native"
            convert(checkpoint, done[key], settings=settings)
        return done[key]

    return native
