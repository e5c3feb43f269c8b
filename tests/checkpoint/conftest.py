"""An empty store."""

from pathlib import Path

import pytest

from transformer_xl.checkpoint.store import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")
