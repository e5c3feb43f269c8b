"""If the disk fails at any call of a save, earlier checkpoints stay, the error names the place, and the next save succeeds."""

import errno
import io
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.helpers import assert_same, never, numbered
from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore


class Fault:
    """Fails one of the calls that pass through `guard`, or that call and every later one."""

    def __init__(self, code: int, *, at: int, for_good: bool) -> None:
        self.code, self.at, self.for_good = code, at, for_good
        self.n_calls = 0

    @property
    def fired(self) -> bool:
        return self.n_calls > self.at

    def strike(self, path: object = None) -> None:
        """Raise the system's error, which names a path but no open file, whose number a call was given."""
        self.n_calls += 1
        if self.n_calls == self.at + 1 or (self.for_good and self.fired):
            raise OSError(self.code, os.strerror(self.code), None if isinstance(path, int) else path)

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.strike(*args[:1])
            return function(*args, **kwargs)

        return guarded


class FailingFile(io.FileIO):
    """A file whose failing write first stores half of the bytes, like a full disk."""

    fault: Fault

    def write(self, data: Any) -> int:
        try:
            self.fault.strike()
        except OSError:
            super().write(memoryview(data)[: len(data) // 2])
            raise
        return super().write(data)


def fail_writes(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    real_open = io.open

    def failing_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "x" not in mode:
            return real_open(file, mode, *args, **kwargs)
        raw = FailingFile(file, "xb")
        raw.fault = fault
        return io.BufferedWriter(raw)

    monkeypatch.setattr(io, "open", failing_open)


def fail_opens(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr(io, "open", fault.guard(io.open))


def fail_call(name: str) -> Callable[[pytest.MonkeyPatch, Fault], None]:
    def install(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
        monkeypatch.setattr(os, name, fault.guard(getattr(os, name)))

    return install


FAULTS = {
    "write-ENOSPC": (fail_writes, errno.ENOSPC),
    "open-EROFS": (fail_opens, errno.EROFS),
    "fsync-EDQUOT": (fail_call("fsync"), errno.EDQUOT),
    "mkdir-EACCES": (fail_call("mkdir"), errno.EACCES),
    "rename-ENOSPC": (fail_call("rename"), errno.ENOSPC),
    "replace-EIO": (fail_call("replace"), errno.EIO),
    "unlink-EPERM": (fail_call("unlink"), errno.EPERM),
    "rmdir-EIO": (fail_call("rmdir"), errno.EIO),
    "listdir-EIO": (fail_call("listdir"), errno.EIO),
}


def later(step: int) -> Checkpoint:
    checkpoint = numbered(step)
    return Checkpoint(step, checkpoint.model, checkpoint.training, {**checkpoint.state, "later": True})


def prepare(directory: Path) -> CheckpointStore:
    store = CheckpointStore(directory, keep=2)
    for step in (1, 2, 3):
        store.save(numbered(step), best=step == 1)
    return store


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The start of every attempt; copying it forces nothing to the disk."""
    return prepare(tmp_path_factory.mktemp("prepared")).directory


def is_same(actual: Checkpoint, expected: Checkpoint) -> bool:
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("step", [3, 4], ids=["existing step", "new step"])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("fault_name", FAULTS)
def test_a_fault_at_any_call_loses_nothing(prepared: Path, tmp_path: Path, fault_name: str, for_good: bool, step: int) -> None:
    install, code = FAULTS[fault_name]
    n_fired = 0
    while True:
        store = CheckpointStore(shutil.copytree(prepared, tmp_path / str(n_fired)), keep=2)
        fault = Fault(code, at=n_fired, for_good=for_good)
        failure = save_under(fault, install, store, later(step))
        if not fault.fired:
            break
        n_fired += 1
        check_failure(failure, store, code)
        check_nothing_lost(store, step)
        check_resume(store)
        check_recovery(store, step)
    assert failure is None
    assert n_fired > 0
    print(f"{n_fired} calls failed in turn")


def save_under(
    fault: Fault, install: Callable[[pytest.MonkeyPatch, Fault], None], store: CheckpointStore, checkpoint: Checkpoint
) -> OSError | None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, fault)
        try:
            store.save(checkpoint, best=True)
        except OSError as error:
            return error
    return None


def check_failure(failure: OSError | None, store: CheckpointStore, code: int) -> None:
    assert failure is not None and failure.errno == code
    assert failure.filename is not None
    assert (store.directory / failure.filename).is_relative_to(store.directory)  # `shutil.rmtree` gives a file's name alone


def check_nothing_lost(store: CheckpointStore, step: int) -> None:
    newest = store.load_newest(on_damaged=never)
    assert any(is_same(newest, expected) for expected in (numbered(3), later(step)))
    best = store.load_best(on_damaged=never)
    assert any(is_same(best, expected) for expected in (numbered(1), later(step)))
    if store.best_step == 1:
        for kept in {1, 2, 3} - {step}:
            assert_same(store.load(kept), numbered(kept))


def check_resume(store: CheckpointStore) -> None:
    """A run that goes on keeps the two newest and the best."""
    store.clean()
    store.rewind(store.load_newest(on_damaged=never).step, best=store.best_step)
    assert set(store.steps()) == {*store.steps()[-2:], store.best_step}


def check_recovery(store: CheckpointStore, step: int) -> None:
    store.save(later(step), best=True)
    assert_same(store.load_newest(on_damaged=never), later(step))
    store.clean()
    assert sorted(path.name for path in store.directory.iterdir()) == [
        "best.json",
        f"step-{step - 1:08d}",
        f"step-{step:08d}",
    ]


def test_a_failed_save_leaves_no_stray_while_the_disk_still_deletes(tmp_path: Path) -> None:
    store = prepare(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    failure = save_under(Fault(errno.ENOSPC, at=2, for_good=True), fail_writes, store, numbered(4))
    assert failure is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_interrupt_leaves_no_stray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = prepare(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(numbered(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_everything_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files, their directory; after the rename the parent; then the best; deletions come last."""
    store = prepare(tmp_path)
    events: list[str] = []
    for name in ("fsync", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name), events))
    store.save(numbered(4), best=True)
    parent = f"fsync {tmp_path.name}"
    files = [f"fsync {name}" for name in ("model.safetensors", "training.safetensors", "state.json", "manifest.json")]
    assert [event for event in events if not event.startswith("unlink")] == [
        *files,
        "fsync step-00000004.tmp",
        "rename step-00000004.tmp",
        parent,
        *("fsync best.json.tmp", "replace best.json.tmp", parent),
        *("rename step-00000001", parent),
        *("rename step-00000002", parent),
    ]
    deletions = [index for index, event in enumerate(events) if event.startswith("unlink") and "safetensors" in event]
    assert min(deletions) > events.index("rename step-00000001")


def test_a_new_directory_is_on_the_disk_before_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(os, "fsync", recorded("fsync", os.fsync, events))
    CheckpointStore(tmp_path / "checkpoints").save(numbered(1))
    assert events[0] == f"fsync {tmp_path.name}"


def recorded(name: str, function: Callable[..., Any], events: list[str]) -> Callable[..., Any]:
    def record(target: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
        events.append(f"{name} {path.name}")
        return function(target, *args, **kwargs)

    return record


# --- real limits -----------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", directory], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        store = CheckpointStore(disk / "checkpoints")
        store.save(numbered(1))
        big = Checkpoint(2, model={"w": torch.ones(100_000)}, training={}, state={})
        with pytest.raises(OSError, match=r"No space left on device: '.*step-00000002.tmp/model.safetensors'"):
            store.save(big)
        assert [path.name for path in store.directory.iterdir()] == ["step-00000001"]
        assert_same(store.load_newest(on_damaged=never), numbered(1))
        store.save(numbered(2))
        assert_same(store.load_newest(on_damaged=never), numbered(2))


def test_a_file_that_is_really_too_large(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(numbered(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*model\.safetensors'"):
            store.save(Checkpoint(2, model={"w": torch.ones(100_000)}, training={}, state={}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert_same(store.load_newest(on_damaged=never), numbered(1))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only directories; the EROFS fault stands in")
def test_a_directory_that_is_really_read_only(tmp_path: Path) -> None:
    store = prepare(tmp_path)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            store.save(numbered(4))
    finally:
        tmp_path.chmod(0o700)
    assert_same(store.load_newest(on_damaged=never), numbered(3))
