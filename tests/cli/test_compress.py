"""`txl compress` and `txl decompress`."""

import json
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import forked
from tests.cli.conftest import Txl

TEXT = b"the cat sat on the mat; the dog sat on the log. "


@pytest.fixture(autouse=True)
def text(workbench: Path) -> Path:
    path = workbench / "some.txt"
    path.write_bytes(TEXT)
    return path


def test_a_text_with_a_new_model_and_with_ones_own(txl: Txl) -> None:
    answer = txl("compress", "some.txt", "some.txl")
    size = Path("some.txl").stat().st_size
    assert answer.out.startswith(f"48 bytes -> {size:,} ({size / 48:.1%}, {size / 6:.3f} bits per byte) in 0:")
    assert txl("decompress", "some.txl", "back.txt").out.startswith(f"{size:,} bytes -> 48 in 0:")
    assert Path("back.txt").read_bytes() == TEXT

    for options in ([], ["--learn"]):
        answer = txl("compress", "some.txt", "some.txl", "--model", "run", "--json", "--quiet", *options)
        found = json.loads(answer.out)
        assert answer.err == ""
        assert (found["bytes"], found["compressed"]) == (48, Path("some.txl").stat().st_size)
        assert found["model_bytes"] > 1000
        assert json.loads(txl("decompress", "some.txl", "back.txt", "--model", "run", "--json").out)["bytes"] == 48
        assert Path("back.txt").read_bytes() == TEXT
    n = found["compressed"] + found["model_bytes"]
    assert f"; {n:,} with the model's weights" in txl("compress", "some.txt", "some.txl", "--model", "run", "--learn").out


def test_mistakes_are_one_line(txl: Txl) -> None:
    Path("folder").mkdir()
    assert txl("compress", "none.txt", "x").complaint == "'none.txt' cannot be read: No such file or directory"
    assert txl("compress", "folder", "x").complaint == (
        "'folder' is not a regular file, but a directory, pipe or device; give the path of a file"
    )
    assert txl("compress", "some.txt", "folder").complaint == "--out 'folder' is a directory; name a file"
    assert txl("compress", "some.txt", "no/x").complaint == (
        f"--out 'no/x': the directory '{Path('no').absolute()}' does not exist; make it first"
    )
    assert txl("compress", "some.txt", "some.txt").complaint == (
        "'some.txt' is the file itself; choose another place for the result"
    )
    for name in ("part", "state", "lock"):  # which compressing would write to, and remove
        Path(f"my.{name}").write_bytes(TEXT)
        assert (
            txl("compress", f"my.{name}", "my").complaint
            == f"'my.{name}' is the file itself; choose another place for the result"
        )
        assert Path(f"my.{name}").read_bytes() == TEXT
    assert txl("compress", "some.txt", "x", "--learn").complaint == (
        "--learn is for a model given by --model; a new one learns anyhow"
    )
    assert txl("decompress", "some.txt", "x").complaint == (
        "'some.txt' is no file that txl compress wrote, or only a part of one; name one"
    )
    assert txl("compress", "some.txt", "x", "--model", "rum").complaint.endswith("; did you mean 'run'?")
    assert not Path("x").exists()
    assert Path("some.txt").read_bytes() == TEXT


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_and_the_same_command_go_on(txl: Txl) -> None:
    Path("long.txt").write_bytes(np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8).tobytes())
    command = ("compress", "long.txt", "long.txl", "--model", "run")
    whole = ("compress", "long.txt", "whole.txl", "--model", "run", "--quiet")
    part = Path("long.txl.part")
    with forked.start("tests.world_cases:program", *command) as child:
        deadline = time.monotonic() + 100
        while not part.exists() or part.stat().st_size < 700:
            assert time.monotonic() < deadline, child.stderr.read()
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate()
        assert child.wait() == 130, err
    assert err.decode().splitlines()[-1] == "stopped; the same command goes on from 'long.txl.state'"
    assert Path("long.txl.state").exists()
    assert not Path("long.txl").exists()
    assert txl(*command).status == txl(*whole).status == 0
    assert Path("long.txl").read_bytes() == Path("whole.txl").read_bytes()
