"""Any flipped bit and any truncated file of a checkpoint is found before anything is loaded."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.helpers import assert_same, numbered
from transformer_xl.checkpoint.store import CheckpointStore

SIZES = [pytest.param(100, id="100"), pytest.param(1_000, id="1000", marks=pytest.mark.faults)]


def flip_bit(path: Path, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, generator: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: generator.randrange(len(data))])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    store = CheckpointStore(tmp_path_factory.mktemp("damage"))
    for step in (1, 2):
        store.save(numbered(step, n_values=10_000))
    return store


@pytest.mark.parametrize("n_damages", SIZES)
@pytest.mark.parametrize("damage", [flip_bit, truncate])
def test_random_damage_is_always_found(
    store: CheckpointStore, damage: Callable[[Path, random.Random], None], n_damages: int
) -> None:
    generator = random.Random(n_damages)
    files = sorted((store.directory / "step-00000002").iterdir())
    for attempt in range(n_damages):
        path = files[attempt % len(files)]
        sound = path.read_bytes()
        damage(path, generator)
        reports: list[str] = []
        assert_same(store.load_newest(on_damaged=reports.append), numbered(1, n_values=10_000))
        path.write_bytes(sound)
        assert len(reports) == 1
        assert path.name in reports[0]
        assert "\n" not in reports[0]
    assert_same(store.load(2), numbered(2, n_values=10_000))
