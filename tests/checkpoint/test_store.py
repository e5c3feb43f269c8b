"""What the store keeps, finds and refuses, with a disk that works and without kills."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.checkpoint.helpers import assert_same, corrupt, names, never, numbered
from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore
from transformer_xl.console import short
from transformer_xl.errors import CheckpointError, ConfigError

# --- which are kept, and which are found -------------------------------------------------------------------------------------


def test_a_store_without_a_directory_is_empty(store: CheckpointStore) -> None:
    store.clean()
    assert store.steps() == []
    assert store.best_step is None
    assert not store.directory.exists()


def test_a_store_keeps_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep \(0\) must be at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step in (10, 20, 30, 40, 50):
        store.save(numbered(step), best=step == 20)
    assert store.steps() == [20, 40, 50]
    assert store.best_step == 20
    assert names(store) == ["best.json", "step-00000020", "step-00000040", "step-00000050"]


def test_a_run_that_goes_on_keeps_no_more_than_one_that_saves(store: CheckpointStore) -> None:
    """Its process was killed before it deleted old ones."""
    for step in (10, 20, 30, 40, 50):
        CheckpointStore(store.directory, keep=9).save(numbered(step), best=step == 10)
    store.rewind(40, best=10)
    assert names(store) == ["best.json", "step-00000010", "step-00000030", "step-00000040", "step-00000050.abandoned"]


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    for step in (100_000_000, 99_999_999, 0):
        store.save(numbered(step))
    assert store.steps() == [0, 99_999_999, 100_000_000]
    assert store.load_newest(on_damaged=never).step == 100_000_000


def test_the_one_just_saved_stays_beside_later_ones(tmp_path: Path) -> None:
    later = CheckpointStore(tmp_path, keep=2)
    later.save(numbered(90))
    later.save(numbered(91))
    resumed = CheckpointStore(tmp_path, keep=1)
    resumed.save(numbered(10))
    assert resumed.steps() == [10, 91]


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(numbered(1), best=True)
    again = Checkpoint(1, model={"w": torch.ones(1)}, training={}, state={"again": True})
    store.save(again)
    assert_same(store.load(1), again)
    assert names(store) == ["best.json", "step-00000001"]


def test_foreign_names_are_neither_listed_nor_cleaned(store: CheckpointStore) -> None:
    store.save(numbered(1))
    for name in ("notes.tmp", "step-1", "step-000000000009", "step-00000001.bak", "config.json"):
        (store.directory / name).mkdir()
    (store.directory / "step-00000002").write_text("a file")
    (store.directory / "step-00000003").symlink_to(store.directory / "step-00000001")
    before = names(store)
    store.clean()
    assert store.steps() == [1]
    assert names(store) == before


def test_clean_removes_strays(store: CheckpointStore) -> None:
    store.save(numbered(1), best=True)
    for name in ("step-00000002.tmp", "step-00000001.old.tmp"):
        (store.directory / name / "deep").mkdir(parents=True)
    (store.directory / "best.json.tmp").write_text("{")
    (store.directory / "step-00000003.tmp").symlink_to(store.directory / "step-00000001")
    store.clean()
    assert names(store) == ["best.json", "step-00000001"]
    assert_same(store.load(1), numbered(1))


def test_strays_are_in_nobodys_way(store: CheckpointStore) -> None:
    store.save(numbered(1))
    for name in ("step-00000001.tmp", "step-00000002.tmp", "step-00000001.old.tmp", "step-00000001.old"):
        (store.directory / name / "deep").mkdir(parents=True)
    (store.directory / "best.json.tmp").write_text("{")
    assert store.steps() == [1]
    store.save(numbered(1), best=True)
    store.save(numbered(2))
    store.save(numbered(3), best=True)
    store.save(numbered(4))
    assert names(store) == ["best.json", "step-00000003", "step-00000004"]


def test_a_replacement_cut_short_leaves_the_old_one_readable(store: CheckpointStore) -> None:
    store.save(numbered(7)).rename(store.directory / "step-00000007.old")
    assert store.steps() == [7]
    assert_same(store.load_newest(on_damaged=never), numbered(7))
    store.clean()
    assert names(store) == ["step-00000007"]
    assert_same(store.load(7), numbered(7))


def test_a_replacement_cut_short_is_rotated_out_like_any_other(store: CheckpointStore) -> None:
    store.save(numbered(7)).rename(store.directory / "step-00000007.old")
    for step in (8, 9):
        store.save(numbered(step))
    assert names(store) == ["step-00000008", "step-00000009"]


def test_a_replacement_finished_but_for_the_deletion_is_finished(store: CheckpointStore) -> None:
    store.save(numbered(7)).rename(store.directory / "step-00000007.old")
    again = Checkpoint(7, model={}, training={}, state={"again": True})
    CheckpointStore(store.directory.parent / "other").save(again).rename(store.directory / "step-00000007")
    assert_same(store.load(7), again)
    store.clean()
    assert names(store) == ["step-00000007"]
    assert_same(store.load(7), again)


# --- damaged checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "damage", "report"),
    [
        ("model.safetensors", corrupt, "is damaged: its sha256 is .* was written \\(manifest.json\\)"),
        ("state.json", Path.unlink, "No such file or directory"),
    ],
)
def test_newest_falls_back_and_names_the_file(
    store: CheckpointStore, name: str, damage: Callable[[Path], object], report: str
) -> None:
    for step in (1, 2):
        store.save(numbered(step))
    damage(store.directory / "step-00000002" / name)
    reports: list[str] = []
    assert_same(store.load_newest(on_damaged=reports.append), numbered(1))
    (said,) = reports
    assert re.fullmatch(f".*step-00000002/{name}'?:? {report}.*; step 1 is loaded instead", said), said


def test_newest_fails_when_none_is_sound(store: CheckpointStore) -> None:
    for step in (1, 2):
        corrupt(store.save(numbered(step)) / "state.json")
    reports: list[str] = []
    with pytest.raises(CheckpointError, match=r"can be loaded \(2 tried\); the first: .*step-00000002/state.json' is damaged"):
        store.load_newest(on_damaged=reports.append)
    assert reports == []  # the error says it


def test_newest_and_best_fail_when_there_is_none(store: CheckpointStore) -> None:
    for load in (store.load_newest, store.load_best):
        with pytest.raises(CheckpointError, match=r"no checkpoint in '.*/checkpoints'; check the path, or train first"):
            load(on_damaged=never)


@pytest.mark.parametrize(
    ("damage", "report"),
    [
        (lambda store: corrupt(store.directory / "best.json"), r"best\.json' is damaged"),
        (lambda store: (store.directory / "best.json").unlink(), "no best checkpoint is recorded in"),
        (lambda store: corrupt(store.directory / "step-00000001" / "state.json"), r"step-00000001/state\.json' is damaged"),
        (
            lambda store: (store.directory / "step-00000001").rename(store.directory / "x"),
            "step-00000001/manifest.json': No such file",
        ),
        (
            lambda store: (store.directory / "best.json").write_bytes(b'{"directory":"step-00000002","step":1}'),
            "is damaged: it does not name a step as it was written",
        ),
        (
            lambda store: (store.directory / "best.json").write_bytes(b'{"format":1,"step":"/"}'),
            "is damaged: it does not name a step as it was written",
        ),
    ],
)
def test_best_falls_back_to_the_newest_and_says_why(
    store: CheckpointStore, damage: Callable[[CheckpointStore], object], report: str
) -> None:
    for step in (1, 2, 3):
        store.save(numbered(step), best=step == 1)
    damage(store)
    with pytest.raises(AssertionError, match=report):
        store.load_best(on_damaged=never)
    reports: list[str] = []
    assert_same(store.load_best(on_damaged=reports.append), numbered(3))
    assert len(reports) == 1


def test_no_damaged_checkpoint_is_tried_twice(store: CheckpointStore) -> None:
    store.save(numbered(1))
    corrupt(store.save(numbered(2), best=True) / "state.json")
    reports: list[str] = []
    assert store.load_best(on_damaged=reports.append).step == 1
    assert len(reports) == 1


def test_nothing_is_deleted_while_the_best_is_unknown(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(numbered(step), best=step == 1)
    corrupt(store.directory / "best.json")
    assert store.best_step is None
    store.save(numbered(4))
    assert store.steps() == [1, 2, 3, 4]
    store.save(numbered(5), best=True)
    assert store.steps() == [4, 5]


# --- room on the disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "n_saved", "outcome"),
    [(999, 0, "refused"), (999, 3, "refused"), (1000, 0, "warned"), (2999, 0, "warned"), (3000, 0, ""), (1000, 2, "")],
)
def test_a_disk_has_room_for_the_checkpoints_that_will_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, n_saved: int, outcome: str
) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=2)
    for step in range(n_saved):
        store.directory.mkdir(parents=True, exist_ok=True)
        CheckpointStore(store.directory, keep=9).save(numbered(step))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    said: list[str] = []
    where = store.directory if n_saved else tmp_path
    has = f"the disk of '{where}' has {short(free, ('B', 'kB'))} free, and a checkpoint takes 1 kB; "
    if outcome == "refused":
        with pytest.raises(CheckpointError, match=f"^{has}free disk space or choose another --out$"):
            store.check_room(1000, warn=said.append)
    else:
        store.check_room(1000, warn=said.append)
        warning = f"{has}train.keep_checkpoints (2) needs room for 3, so free disk space soon"
        assert said == ([warning] if outcome else [])
    assert store.directory.exists() == bool(n_saved)
