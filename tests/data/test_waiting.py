import errno
from pathlib import Path

import pytest

from transformer_xl.data import waiting
from transformer_xl.data.waiting import one_at_a_time


def test_a_file_that_was_removed_before_it_was_locked_keeps_nobody_out(tmp_path: Path, monkeypatch) -> None:
    """Who held it removes it, and a third may have made it anew: two would hold what they take for the same file."""
    path, locked, n_tries = tmp_path / "lock", waiting._locked, []

    def late(descriptor: int) -> bool:
        n_tries.append(1)
        if len(n_tries) == 1:
            path.unlink()
        return locked(descriptor)

    monkeypatch.setattr(waiting, "_locked", late)
    with one_at_a_time(path, lambda: None):
        assert path.exists()
    assert len(n_tries) == 2
    assert not path.exists()


def test_nobody_waits_where_files_cannot_be_locked(tmp_path: Path, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(waiting.fcntl, "flock", refuse)
    with one_at_a_time(tmp_path / "lock", lambda: pytest.fail("it waits")):
        assert (tmp_path / "lock").exists()


def test_a_failure_lets_go(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), one_at_a_time(tmp_path / "lock", lambda: pytest.fail("it waits")):
            raise KeyboardInterrupt
    assert not (tmp_path / "lock").exists()
