"""Any flipped bit and any truncated file of a checkpoint, a run or a saved model is found before anything is loaded."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.helpers import assert_same, assert_same_tensors, numbered
from tests.helpers import TINY, tiny_model
from transformer_xl.checkpoint.run_directory import RunDirectory, copies, load
from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore
from transformer_xl.config.run import RunConfig, TokenizerConfig
from transformer_xl.errors import TxlError
from transformer_xl.tokenizers.kinds import train_tokenizer

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


CONFIG = RunConfig(name="mine", model=TINY)  # pyright: ignore[reportArgumentType]
TOKENIZER = train_tokenizer(TokenizerConfig(kind="char"), ["abcdefghijkl\n"])


def export(folder: Path) -> None:
    tiny_model().save_pretrained(folder, tokenizer=TOKENIZER)


def start(folder: Path) -> None:
    run = RunDirectory(folder)
    with run.locked():
        run.create(CONFIG, TOKENIZER)
    run.store().save(Checkpoint(1, tiny_model().state_dict(), {}, {}, copies(CONFIG, TOKENIZER)))


def content(folder: Path) -> tuple[object, ...]:
    """Load all that decides numbers."""
    model, tokenizer = load(folder, which="last")
    run = RunDirectory(folder)
    return model.config, tokenizer.fingerprint, model.state_dict(), run.config() if run.holds_run else None


@pytest.mark.parametrize("n_damages", SIZES)
@pytest.mark.parametrize("damage", [flip_bit, truncate])
@pytest.mark.parametrize(
    ("make", "place", "n_files"),
    [(export, "", 3), (start, "checkpoints/step-00000001", 6)],  # people may change the settings of a saved model
)
def test_damage_in_any_file_of_a_run_or_a_model_is_found_or_harmless(
    tmp_path: Path,
    make: Callable[[Path], None],
    place: str,
    n_files: int,
    damage: Callable[[Path, random.Random], None],
    n_damages: int,
) -> None:
    generator = random.Random(n_damages)
    torch.manual_seed(1)
    make(tmp_path / "sound")
    expected = content(tmp_path / "sound")
    names = sorted(path.name for path in (tmp_path / "sound" / place).iterdir() if place or path.name != "config.json")
    assert len(names) == n_files
    n_named = 0
    for attempt in range(n_damages):
        shutil.copytree(tmp_path / "sound", tmp_path / "copy")
        path = tmp_path / "copy" / place / names[attempt % len(names)]
        damage(path, generator)
        try:
            found = content(tmp_path / "copy")
        except TxlError as error:
            assert path.name in str(error)
            assert "\n" not in str(error)
            n_named += 1
        else:
            assert (found[0], found[1], found[3]) == (expected[0], expected[1], expected[3]), path
            assert_same_tensors(found[2], expected[2])  # pyright: ignore[reportArgumentType]
        shutil.rmtree(tmp_path / "copy")
    print(f"{n_damages} damages, {n_named} named, the others harmless")
    assert n_named >= 0.95 * n_damages


@pytest.mark.parametrize("damage", [flip_bit, truncate])
def test_a_run_needs_nothing_beside_its_checkpoints(tmp_path: Path, damage: Callable[[Path, random.Random], None]) -> None:
    """What lies beside them is for people, and was under a seal of its own before."""
    generator = random.Random(1)
    start(tmp_path / "run")
    expected = content(tmp_path / "run")
    for name in ("config.json", "tokenizer.json"):
        sound = (tmp_path / "run" / name).read_bytes()
        for _ in range(20):
            damage(tmp_path / "run" / name, generator)
            found = content(tmp_path / "run")
            assert (found[0], found[1], found[3]) == (expected[0], expected[1], expected[3])
            (tmp_path / "run" / name).write_bytes(sound)
