"""Runs command lines in processes of their own, each in its own copy of a small directory, and says how they ended."""

import contextlib
import gzip
import importlib
import json
import os
import pkgutil
import random
import re
import resource
import shutil
import signal
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.forked import run_program

CPU_SECONDS = 20
_WAITING_SECONDS = 120  # of a process that waits for something, such as a pipe
_ROOM_BYTES = 2 << 30  # of memory, besides what the libraries take
_FILE_BYTES = 64 << 20
_LONGEST_ERROR = 700  # characters


class Ending(NamedTuple):
    """How a command line ended."""

    status: int  # negative: a signal
    err: str
    replaced: list[str]  # links and pipes that are something else now


def fault(ending: Ending) -> str | None:
    """Return what is wrong with how a line ended; None: nothing."""
    errors = [line for line in ending.err.splitlines() if line.startswith("txl: error: ")]
    signals = {-signal.SIGXCPU: f"more than {CPU_SECONDS} s of the processor", -signal.SIGALRM: "waits for ever"}
    if ending.status < 0:
        return signals.get(ending.status, f"signal {-ending.status}")
    if "Traceback" in ending.err:
        return "traceback"
    if len(errors) != (ending.status != 0):
        return f"status {ending.status} and {len(errors)} errors"
    if errors and len(errors[0]) > _LONGEST_ERROR:
        return f"an error of {len(errors[0]):,} characters"
    if found := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", ending.err):
        return f"a raw control character: {found[0]!a}"
    if found := re.search(r"\.py:\d+: \w*Warning", ending.err):
        return f"a warning for programmers: {found[0]}"
    return f"replaced {', '.join(ending.replaced)}" if ending.replaced else None


def furnish(home: Path) -> None:
    """Put what lines name into a directory that has text.txt, tiny.toml and run."""
    from transformer_xl.checkpoint.run_directory import load

    text = (home / "text.txt").read_bytes()
    model, tokenizer = load(home / "run")
    model.save_pretrained(home / "exported")
    tokenizer.save(home / "exported" / "tokenizer.json")
    shutil.copytree(home / "run", home / "damaged")
    (home / "damaged" / "config.json").write_text("{")
    for folder in ("folder", "empty", "stdlib"):
        (home / folder).mkdir()
    for i in range(8):
        (home / "folder" / f"{i}.txt").write_bytes(text[300 * i : 300 * i + 300])
        (home / "stdlib" / f"{i}.py").write_text(f"# {i}\n" * 50)
    (home / "packed.txt.gz").write_bytes(gzip.compress(text))
    (home / "nothing.gz").write_bytes(b"x")
    (home / "empty.txt").touch()
    (home / "noise.bin").write_bytes(random.Random(0).randbytes(5000))
    (home / "latin.txt").write_bytes(b"caf\xe9 " * 400)
    (home / "ünïcödé.txt").write_bytes(text)
    (home / "words.jsonl").write_text("\n".join(json.dumps({"prompt": word}) for word in ("the", "cat")))
    (home / "nested.toml").write_text("name = " + "[" * 5000)
    (home / "bytes.toml").write_bytes(b"\xff\xfe")
    (home / "big.toml").write_text(f"[train]\nmax_steps = 1{'0' * 20}\nbatch_size = {2**63 - 1}\n")
    for name, target in {
        "null": "/dev/null",
        "null.png": "/dev/null",
        "zero": "/dev/zero",
        "full": "/dev/full",
        "loop": "loop",
    }.items():
        (home / name).symlink_to(target)  # the devices themselves belong to the machine
    for name in ("fifo", "fifo.png", "fifo.toml", "fifo.txt.gz"):
        os.mkfifo(home / name)


def attempt(home: str, lines: Sequence[tuple[list[str], str]], cpu_seconds: int = CPU_SECONDS) -> list[Ending]:
    """Run lines, each its arguments and what is piped in, one after another."""
    _prepare(home)
    return [_attempt(Path(home), arguments, piped, cpu_seconds) for arguments, piped in lines]


def _prepare(home: str) -> None:
    """Import everything once, and replace what takes long."""
    import torch

    import transformer_xl
    from transformer_xl.tools import hardware
    from transformer_xl.training import record

    os.environ |= {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    for module in pkgutil.walk_packages(transformer_xl.__path__, "transformer_xl."):
        if not re.search(r"__main__|huggingface|fused|onnx", module.name):
            importlib.import_module(module.name)
    for name in ("huggingface_hub", "matplotlib.figure", "rich.progress"):
        importlib.import_module(name)
    fast: dict[tuple[Any, str], Any] = {
        (hardware, "memory_bandwidth"): lambda *_, **__: 1e10,
        (hardware, "matmul_rate"): lambda *_, **__: 1e11,
        (record, "_tensorboard"): lambda *_: None,
        (torch, "compile"): lambda function=None, **_: function or (lambda it: it),
        (sysconfig, "get_path"): lambda *_, **__: str(Path(home) / "stdlib"),
    }
    for (owner, name), replacement in fast.items():
        setattr(owner, name, replacement)


def _attempt(home: Path, arguments: list[str], piped: str, cpu_seconds: int) -> Ending:
    with tempfile.TemporaryDirectory(prefix="txl-line-") as place:
        work, streams = Path(place) / "work", [Path(place) / name for name in ("in", "out", "err")]
        _copy(home, work)
        before = _kinds(work)
        streams[0].write_bytes(piped.encode("utf-8", "surrogateescape"))
        child = os.fork()
        if child == 0:
            _become_txl(work, streams, arguments, cpu_seconds)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):  # what it started
            os.killpg(child, signal.SIGKILL)
        after = _kinds(work)
        replaced = [name for name, kind in before.items() if not stat.S_ISREG(kind) and after.get(name) != kind]
        return Ending(os.waitstatus_to_exitcode(status), streams[2].read_text("utf-8", "replace"), replaced)


def _copy(home: Path, work: Path) -> None:
    """Copy a directory, with its links and pipes."""
    work.mkdir()
    for path in home.iterdir():
        if stat.S_ISFIFO(path.lstat().st_mode):
            os.mkfifo(work / path.name)
        elif path.is_dir():
            shutil.copytree(path, work / path.name)
        else:
            shutil.copy(path, work / path.name, follow_symlinks=False)


def _kinds(work: Path) -> dict[str, int]:
    return {path.name: stat.S_IFMT(path.lstat().st_mode) for path in work.iterdir()}


def _become_txl(work: Path, streams: list[Path], arguments: list[str], cpu_seconds: int) -> NoReturn:
    from transformer_xl.cli import main

    status = 1
    try:
        os.setsid()
        os.chdir(work)
        for number, path in enumerate(streams):
            os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600), number)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)
        os.environ |= {"HOME": str(work), "TXL_CACHE": str(work / "cache"), "TXL_DATA": str(work / "data")}
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = {resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_AS: now + _ROOM_BYTES, resource.RLIMIT_FSIZE: _FILE_BYTES}
        for what, most in limits.items():
            resource.setrlimit(what, (most, most + 5 if what == resource.RLIMIT_CPU else most))
        signal.alarm(_WAITING_SECONDS)
        status = run_program(main, [arguments])
    finally:
        os._exit(status)
