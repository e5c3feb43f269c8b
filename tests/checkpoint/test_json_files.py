"""A sealed file notices any change."""

from pathlib import Path

import pytest

from tests.checkpoint.helpers import numbered
from transformer_xl.checkpoint.json_files import unseal
from transformer_xl.checkpoint.store import CheckpointStore


@pytest.mark.parametrize("name", ["step-00000001/manifest.json", "best.json"])
def test_every_single_bit_of_the_sealed_files_is_guarded(tmp_path: Path, name: str) -> None:
    CheckpointStore(tmp_path).save(numbered(1), best=True)
    sound = (tmp_path / name).read_bytes()
    unseal(sound)
    for bit in range(8 * len(sound)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"\S"):
            unseal(bytes(data))
