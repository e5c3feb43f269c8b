import errno
import inspect
import os
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from transformer_xl.errors import ConfigError
from transformer_xl.files import check_file, files_below, locked, make_directories, replace_file, whole_file


def test_a_waiting_process_gets_the_lock_although_its_file_is_removed(tmp_path: Path) -> None:
    """Who waits for a file that its holder removes would hold another lock than whoever comes next."""
    path, busy, order = tmp_path / "lock", threading.Event(), []

    def wait() -> None:
        with locked(path, on_busy=busy.set):
            order.append("second")
            assert path.exists()

    waiting = threading.Thread(target=wait)
    with locked(path, on_busy=lambda: pytest.fail("it waits")):
        waiting.start()
        assert busy.wait(20)
        order.append("first")
    waiting.join(20)
    assert order == ["first", "second"]
    assert not path.exists()


def test_nobody_waits_where_files_cannot_be_locked(tmp_path: Path, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path / "lock", on_busy=lambda: pytest.fail("it waits")):
        assert (tmp_path / "lock").exists()


def test_a_lock_that_was_deleted_is_left_to_whoever_made_it_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, on_busy=lambda: pytest.fail("it waits")):
        path.unlink()
        path.touch()  # somebody else's
    assert path.exists()


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")
    with pytest.raises(RuntimeError), whole_file(path) as stray:
        assert stray.suffix == ".png"
        stray.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old"
    with whole_file(path) as stray:
        stray.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe, device = tmp_path / "pipe", tmp_path / "device"
    os.mkfifo(pipe)
    device.symlink_to(os.devnull)
    for path in (pipe, device):
        before = path.lstat()
        with pytest.raises(FileExistsError, match="it is a device or pipe"), whole_file(path):
            pytest.fail("it is written")
        assert path.lstat() == before


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (link := tmp_path / "link").symlink_to("folder/file")
    for content in (b"new", b"newer"):
        replace_file(link, content)
        assert link.is_symlink() and (tmp_path / "folder" / "file").read_bytes() == content
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]


def test_who_is_refused_leaves_the_lock_to_its_owner(tmp_path: Path) -> None:
    def refuse() -> None:
        raise BlockingIOError

    with locked(tmp_path / "lock", on_busy=refuse):
        with pytest.raises(BlockingIOError), locked(tmp_path / "lock", on_busy=refuse):
            pytest.fail("two hold it")
        assert (tmp_path / "lock").exists()


@pytest.mark.parametrize("name", ["folder", "pipe", "no/file", "/proc/sys/file"])
def test_a_place_where_no_file_can_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    check_file(tmp_path / "new", option="out")
    with pytest.raises(ConfigError, match=r"^--out '.*; (name a file|choose another)$"):
        check_file(tmp_path / name, option="out")


def test_more_directories_than_python_makes_are_too_long_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many these are depends on what called it, so here it is one."""

    def give_up(*args: object, **options: object) -> None:
        raise RecursionError

    monkeypatch.setattr(Path, "mkdir", give_up)
    with pytest.raises(OSError, match="File name too long"):
        make_directories(tmp_path / "d")


def test_files_are_found_however_deep_they_lie(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path
    for _ in range(300):
        folder = folder / "d"
        folder.mkdir()
    for path in (folder / "z", tmp_path / "a", tmp_path / ".hidden", folder / ".hidden"):
        path.touch()
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").touch()
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    (tmp_path / "odd").symlink_to("y" * 300)  # cannot be looked at
    assert files_below(tmp_path) == [tmp_path / "a", folder / "z"]
    assert files_below(tmp_path / "none") == []
    assert files_below(tmp_path, skip={"d"}) == [tmp_path / "a"]
