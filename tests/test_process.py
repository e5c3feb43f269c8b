import os
import platform
from pathlib import Path

import pytest

from transformer_xl import process
from transformer_xl.process import Busy, busy, keep_freed_memory, running_beside  # the conftest replaces it in the module


def test_only_glibc_is_told():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()


@pytest.mark.parametrize(
    ("running", "others", "n_look"),
    [([6, 6, 6, 6, 6], 5, 5), ([6, 3, 9, 9, 9], 2, 5), ([2, 1], 0, 2), ([1], 0, 1), ([0], 0, 1)],  # gVisor always says 0
)
def test_what_keeps_running_is_counted(running: list[int], others: int, n_look: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads the number runs, too."""
    looks = iter(running)

    class Load:
        @staticmethod
        def read_text(encoding: str) -> str:
            return f"0.70 0.80 0.90 {next(looks)}/110 12345\n"

    monkeypatch.setattr(process, "_LOAD", Load)
    assert running_beside() == others
    assert len(list(looks)) == len(running) - n_look


@pytest.mark.parametrize("content", [None, "", "0.7 0.8", "0.7 0.8 0.9 many/110 5", "\xff"])
def test_without_that_count_the_load_is_taken(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loadavg"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    monkeypatch.setattr(process, "_LOAD", path)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.7, 0.0, 0.0))
    assert running_beside() == 3
    assert running_beside(2) == 1  # threads of its own have been counted
    assert running_beside(8) == 0

    def unknown() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert running_beside() == 0
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert busy(8) is None


@pytest.mark.parametrize(
    ("beside", "threads", "peers", "others"),
    [
        (0, 4, 1, 0),
        (0, 8, 1, 0),
        (1, 4, 1, 1),
        (1, 3, 1, 0),
        (4, 1, 1, 4),
        (3, 1, 1, 0),
        (1, 2, 2, 0),
        (2, 2, 2, 1),
    ],
)
def test_cores_are_busy_if_others_leave_too_few(
    beside: int, threads: int, peers: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "running_beside", lambda own: beside - own)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    if peers > 1:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(peers))
    assert busy(threads) == (Busy(others, 4) if others else None)
    assert busy(4, since_long=True) is None


def test_what_is_said_of_busy_cores() -> None:
    assert str(Busy(1, 8)) == "other programs keep 1 of this machine's 8 cores busy"
    assert str(Busy(8, 8)) == str(Busy(9, 8)) == "other programs keep all 8 cores of this machine busy"
    assert str(Busy(2, 1)) == "other programs keep the only core of this machine busy"
    assert Busy(3, 8).remedy(8) == "wait until they have ended, or compute with OMP_NUM_THREADS=5"
    assert Busy(9, 8).remedy(2, "--set train.threads") == "wait until they have ended, or compute with --set train.threads=1"
    assert Busy(3, 8).remedy(5) == Busy(9, 8).remedy(1) == "wait until they have ended"
