"""The process that unpickles is confined, starts fast, and its failures are errors of one line."""

import ast
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conversion.hostile import value, whole
from transformer_xl.conversion.readers import pickle_child, sandbox
from transformer_xl.conversion.readers.pickle_files import read_pickle
from transformer_xl.errors import CheckpointError

# What code in the child could do, if there were any: run in an interpreter like the child's, after the same limits.
PROBE = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("child", sys.argv[1])
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
child._limit(96, 2)
def outcome(action):
    try:
        return repr(action())
    except BaseException as error:
        return type(error).__name__
def burn():
    while True:
        pass
print(outcome(lambda: open(sys.argv[1])), outcome(lambda: open(sys.argv[2], "w")), outcome(lambda: bytearray(10**8)))
print(outcome(lambda: __import__("zipfile")), sorted({"torch", "numpy", "transformer_xl"} & set(sys.modules)), flush=True)
burn()
"""


@pytest.fixture
def sound(tmp_path):
    path = tmp_path / "vocab.pkl"
    path.write_bytes(pickle.dumps({"sym2idx": {"a": 0}}))
    return path


def test_the_child_can_do_nothing(tmp_path):
    command = [sys.executable, "-I", "-S", "-B", "-c", PROBE, pickle_child.__file__, str(tmp_path / "written")]
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    reading, writing, memory, importing, loaded = result.stdout.split()
    assert (reading, writing, memory, importing, loaded) == ("OSError", "OSError", "MemoryError", "OSError", "[]"), result
    assert result.returncode < 0, "it computed for longer than it may"
    assert time.perf_counter() - start < 50
    assert list(tmp_path.iterdir()) == []


def test_the_child_imports_the_standard_library_alone():
    tree = ast.parse(Path(pickle_child.__file__).read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert len(modules) > 5
    assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


def test_a_small_file_takes_little_time(sound):
    before = os.times()
    assert read_pickle(sound) == {"sym2idx": {"a": 0}}
    after = os.times()
    assert sum(after[:4]) - sum(before[:4]) < 0.3


def test_the_child_gets_no_secrets(sound, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    given = {}
    popen = subprocess.Popen

    def spy(*args, **kwargs):
        given.update(kwargs, command=args[0])
        return popen(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", spy)
    read_pickle(sound)
    assert given["command"][1:4] == ["-I", "-S", "-B"], "no code of the user or of installed packages runs"
    assert set(given["env"]) <= {"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "SYSTEMROOT"}


def colliding(path, n):
    """Write a dict whose keys all have one hash: every new key is compared with all before."""
    keys = b"".join(value(i * (2**61 - 1)) + b"N" for i in range(n))
    path.write_bytes(whole(b"}(" + keys + b"u"))


def test_too_much_time(tmp_path, monkeypatch):
    colliding(tmp_path / "x.pkl", 30_000)
    monkeypatch.setattr(sandbox, "MIN_SECONDS", 1)
    with pytest.raises(CheckpointError, match=r"x\.pkl' needs more than 1 s to read; is it a checkpoint"):
        read_pickle(tmp_path / "x.pkl")


def test_too_much_waiting(sound, monkeypatch):
    monkeypatch.setattr(sandbox, "WALL_FACTOR", 0)
    with pytest.raises(CheckpointError, match="needs more than 2 s to read"):
        read_pickle(sound)


def test_too_much_memory(tmp_path):
    (tmp_path / "x.pkl").write_bytes(whole(b"]" * 10 + b"r\xff\xff\xff\x01"))
    with pytest.raises(CheckpointError, match="needs more than 80 MB to read"):
        read_pickle(tmp_path / "x.pkl")


def test_too_long_a_reply(tmp_path, monkeypatch):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(["x" * 1000] * 900))
    monkeypatch.setattr(sandbox, "MAX_REPLY", 100_000)
    with pytest.raises(CheckpointError, match="more than 100000 bytes of text"):
        read_pickle(tmp_path / "x.pkl")


def test_no_interpreter(sound, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(CheckpointError, match="no process for it can be started"):
        read_pickle(sound)


def test_a_broken_child(sound, monkeypatch, tmp_path):
    broken = tmp_path / "child.py"
    broken.write_text("raise RuntimeError")
    monkeypatch.setattr(sandbox, "_CHILD", broken)
    with pytest.raises(CheckpointError, match=r"breaks the reader \(status 1\)"):
        read_pickle(sound)


@pytest.mark.parametrize(
    "body",
    ['{"\\u0000tensor": ["0"]}', '{"\\u0000stub": []}', '{"\\u0000dict": [[[]], [1]]}', "{", "[" * 100_000],
)
def test_a_lying_child(sound, monkeypatch, body, tmp_path):
    """What the child says is checked, in case a file takes it over."""
    broken = tmp_path / "child.py"
    broken.write_text(f"print({json.dumps({'storages': {}})!r}); print({body!r})")
    monkeypatch.setattr(sandbox, "_CHILD", broken)
    with pytest.raises(CheckpointError, match=r"vocab\.pkl"):
        read_pickle(sound)


def test_nothing_is_left_open(sound):
    descriptors = Path("/dev/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(3):
        read_pickle(sound)
    assert len(list(descriptors.iterdir())) == before
