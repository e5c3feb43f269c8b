"""Reads pickles as data: a child process parses them, and its JSON becomes plain values.

The child (`pickle_child.py`) never imports or calls what a file names. In case Python's own unpickler has a defect, the process
has limits on time and memory, and it cannot open or write files or start processes. macOS has no limit of memory. There, the
limit on time remains, and the child still calls nothing.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from transformer_xl.conversion.readers.inert import Stub
from transformer_xl.conversion.readers.pickle_child import MAX_OUTPUT
from transformer_xl.errors import CheckpointError
from transformer_xl.untrusted import open_regular

MAX_BYTES = 4 * 2**30
"""Bytes of a file that is one pickle. The authors' cached WikiText-103 has 900 million, mostly arrays, which are skipped."""
MIN_MB = 32  # address space for the smallest file, beyond what the interpreter takes; a vocabulary of 30,000 words needs 17
MB_PER_MB = 20  # address space per byte of pickle; large vocabularies need up to 14, millions of empty dicts more
MAX_MB = 4096
"""Most address space: an 800 MB array twice (untouched, so it takes no real memory) and a vocabulary of a million words."""
MIN_SECONDS = 0.8  # processor time for the smallest file, which takes 0.05
SECONDS_PER_MB = 1  # processor time per megabyte of pickle, which takes 0.1
MAX_SECONDS = 120  # most processor time; a cached corpus of a gigabyte takes 3
WALL_FACTOR = 5  # most time on the clock per processor time, on a busy machine
MAX_REPLY = 2 * MAX_OUTPUT  # bytes of JSON; the child counts characters, and JSON escapes some of them

_HINT = "is it a checkpoint of a Transformer-XL?"
_CHILD = Path(__file__).with_name("pickle_child.py")


def read_pickle(path: Path) -> Any:
    """Read a pickle of any protocol without running anything that it names; return plain values, with objects as `Stub`s.

    Dicts of any class become dict, sets become list. NumPy arrays, bytes, and texts of more than a million characters become a
    `Stub` without their content: `numpy.ndarray` with (shape, type), `builtins.str` or `builtins.bytes` with (length,). Texts
    of Python 2 are decoded as latin-1, so `text.encode("latin-1")` gives their bytes, which may be UTF-8.

    Raises:
        CheckpointError: the file is missing, damaged, hostile, needs too much time or memory for its size, or refers to names
            that no Transformer-XL needs.
    """
    file, size = open_regular(path)
    with file:
        if size > MAX_BYTES:
            raise CheckpointError(f"'{path}' has {size} bytes; {MAX_BYTES} is the most that a pickle may have")
        _, body = read_in_child(path, file, "pickle", 0, size)

    def tensor(found: list[Any]) -> Any:
        raise CheckpointError(f"'{path}' holds a tensor, which a plain pickle cannot")

    return rebuild(path, body, tensor)


def read_in_child(path: Path, file: BinaryIO, kind: str, start: int, end: int) -> tuple[dict[str, Any], str]:
    """Let a child parse the pickles between two bytes of a file; return `pickle_child.parse`'s header, and JSON for `rebuild`.

    Raises:
        CheckpointError: the child refused the file, or needed more time or memory than a file of this size may take.
    """
    size_mb = (end - start) / 2**20
    memory = min(MAX_MB, MIN_MB + int(MB_PER_MB * size_mb))
    seconds = min(MAX_SECONDS, max(MIN_SECONDS, SECONDS_PER_MB * size_mb))
    arguments = [kind, str(start), str(end), str(memory), str(seconds)]
    reply, code = _run(path, file, arguments, WALL_FACTOR * seconds)
    if len(reply) > MAX_REPLY:
        raise CheckpointError(f"'{path}' holds more than {MAX_REPLY} bytes of text and numbers; {_HINT}")
    head, _, body = reply.partition(b"\n")
    if code or not head:
        cause = f"needs more than {memory} MB to read, or breaks the reader (status {code})"
        if -code in (getattr(signal, name, None) for name in ("SIGPROF", "SIGXCPU", "SIGKILL")):
            cause = f"needs more than {seconds:.3g} s to read"
        raise CheckpointError(f"'{path}' {cause}; {_HINT}")
    header = json.loads(head)
    if "error" in header:
        raise CheckpointError(f"'{path}' {header['error']}")
    return header, body.decode("ascii")


def _run(path: Path, file: BinaryIO, arguments: list[str], wall: float) -> tuple[bytes, int]:
    # -I: no environment variables, no user or current directory. -S: no site-packages. So only this file runs.
    command = [sys.executable or "python3", "-I", "-S", "-B", str(_CHILD), *arguments]
    needed = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "SYSTEMROOT")
    environment = {name: os.environ[name] for name in needed if name in os.environ}
    try:
        child = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: no process for it can be started ({error})") from error
    timer = threading.Timer(wall, child.kill)
    timer.start()
    with child:
        assert child.stdout is not None
        try:
            reply = child.stdout.read(MAX_REPLY + 1)
            if len(reply) > MAX_REPLY:
                child.kill()
            return reply, child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            timer.cancel()


def rebuild(path: Path, body: str, tensor: Callable[[list[Any]], Any]) -> Any:
    """Turn the child's JSON into plain values, `Stub`s and tensors; `tensor` makes a tensor from its description."""

    def revive(found: dict[str, Any]) -> Any:
        if len(found) != 1:
            return found
        ((mark, content),) = found.items()
        match mark:
            case "\0tuple":
                return tuple(content)
            case "\0dict":
                return dict(zip(*content, strict=True))
            case "\0stub":
                name, args, state, items = content
                return Stub(name, tuple(args), state, items)
            case "\0tensor":
                return tensor(content)
        return found

    try:
        return json.loads(body, object_hook=revive)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"'{path}' holds something that is not a plain value ({error}); {_HINT}") from error
