"""Runs functions in processes of their own, but forked, so that all tests import torch once.

`run_jobs` starts several that work together, as `torchrun` would; `start` one that a test talks to and sends signals.

Usage: python -m tests.forked

Does what each line of its standard input says, the name of an action and its arguments in JSON, and prints a line of JSON.
"""

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
_ENVIRONMENT = dict(os.environ)  # before any test changes it


def run_forked(function: str, world_size: int, *arguments: Any, **options: Any) -> list[Any]:
    """Run MODULE:FUNCTION in `world_size` processes and return what each returned; see `run_jobs`."""
    return run_jobs({function: (function, *arguments)}, world_size, **options)[function]


def run_jobs(
    jobs: dict[str, tuple[Any, ...]], world_size: int, *, timeout: float = 200, environment: dict[str, str] | None = None
) -> dict[str, list[Any]]:
    """Run several functions, each (MODULE:FUNCTION, its arguments), one after another; as many processes are started once.

    Returns:
        By job, what each process returned: JSON values, or {"error", "type"}. A process that died without a word gives
        {"error": None, "status": its wait status}.
    """
    variables = {**os.environ, "TXL_TIMEOUT_SECONDS": "60", **(environment or {})}
    with tempfile.NamedTemporaryFile() as log:
        try:
            outcomes = _ask(timeout, "run", jobs=jobs, world_size=world_size, environment=variables, log=log.name)
        finally:
            print(log.read().decode(errors="replace"))  # shown if a test fails
    return {name: [own[name] for own in outcomes] for name in jobs}


class Child:
    """A process that runs one function; its streams are unbuffered.

    Attributes:
        stdin, stdout, stderr: its streams; None if it has a terminal.
    """

    def __init__(self, pid: int, streams: list[Any]) -> None:
        self.pid, self._streams, self._status = pid, streams, None
        self.stdin, self.stdout, self.stderr = streams

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 60) -> int:
        """Return its status; a signal that ended it is negative."""
        if self._status is None:
            self._status = _ask(timeout + 10, "wait", pid=self.pid, seconds=timeout)
        if self._status is None:
            raise TimeoutError(f"it goes on after {timeout} seconds")
        return self._status

    def communicate(self, given: bytes = b"", timeout: float = 60) -> tuple[bytes, bytes]:
        """Write to its standard input, close that, and return what is left of its output when it has ended."""
        with self.stdin:
            self.stdin.write(given)
        found: dict[Any, bytes] = {self.stdout: b"", self.stderr: b""}
        left, end = set(found), time.monotonic() + timeout
        while left:
            ready = select.select(list(left), [], [], max(0, end - time.monotonic()))[0]
            if not ready:
                raise TimeoutError(f"it goes on after {timeout} seconds")
            for stream in ready:
                piece = stream.read(65536)
                found[stream] += piece
                left -= set() if piece else {stream}
        self.wait(timeout)
        return found[self.stdout], found[self.stderr]

    def end(self) -> None:
        """End it, whatever it does."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
        for stream in self._streams:
            if stream:
                stream.close()


@contextlib.contextmanager
def start(
    function: str, *arguments: Any, environment: dict[str, str] | None = None, terminal: str | None = None
) -> Iterator[Child]:
    """Run MODULE:FUNCTION as a program of its own in the current directory; it is ended with the block.

    Args:
        function: called once; a `SystemExit` says the status.
        arguments: of it, JSON values.
        environment: None: this process's.
        terminal: a device that is its terminal; None: it has pipes.

    Yields:
        The process.
    """
    variables = dict(os.environ) if environment is None else environment
    what = {"function": function, "arguments": arguments, "directory": str(Path.cwd()), "environment": variables}
    with tempfile.TemporaryDirectory() as folder:
        paths = [terminal] * 3 if terminal else [f"{folder}/{name}" for name in ("in", "out", "err")]
        for path in [] if terminal else paths:
            os.mkfifo(path)
        pid = _ask(60, "start", **what, streams=paths)
        ends = (
            [None] * 3 if terminal else [FileIO(path, mode) for path, mode in zip(paths, "wrr", strict=True)]
        )  # as it opens them
        child = Child(pid, ends)
    try:
        yield child
    finally:
        child.end()


def _ask(timeout: float, action: str, **arguments: Any) -> Any:
    """Let the server do something, and return its answer. One whose answer was not heard must not answer the next request."""
    server = _server()
    assert server.stdin and server.stdout
    try:
        server.stdin.write(json.dumps([action, arguments]) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], timeout)[0]:
            raise TimeoutError(f"no answer within {timeout} seconds")
        return json.loads(server.stdout.readline())
    except BaseException:
        _end(server)
        _server.cache_clear()
        raise


@cache
def _server() -> "subprocess.Popen[str]":
    """The process from which all are forked."""
    variables = {**_ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command, pipe = [sys.executable, "-m", "tests.forked"], subprocess.PIPE
    server = subprocess.Popen(command, cwd=ROOT, env=variables, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[str]") -> None:
    """End it and what it has forked."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def main() -> None:
    import torch
    import torch._dynamo  # noqa: F401  # else each process would do it, when it makes an optimizer

    torch.set_num_threads(1)  # a second thread would not survive the fork
    actions = {"run": _fork, "start": _start, "wait": _wait}
    for line in sys.stdin:
        action, arguments = json.loads(line)
        print(json.dumps(actions[action](**arguments)), flush=True)


def _fork(jobs: dict[str, list[Any]], world_size: int, environment: dict[str, str], log: str) -> list[dict[str, Any]]:
    """Fork processes that do the jobs, and return what each returned.

    Args:
        jobs: functions and their arguments.
        world_size: how many processes.
        environment: of the processes.
        log: the file that takes all that they print.
    """
    modules = {name: importlib.import_module(function.partition(":")[0]) for name, (function, *_) in jobs.items()}
    environment |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    pipes = []
    for rank in range(world_size):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.environ.clear()
            os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            _redirect(log)
            with os.fdopen(writer, "w") as pipe:
                json.dump({name: _outcome(modules[name], *job) for name, job in jobs.items()}, pipe)
            os._exit(0)
        os.close(writer)
        pipes.append((child, reader))
    outcomes = []
    for child, reader in pipes:
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        outcomes.append(json.loads(text) if text else {name: {"error": None, "status": status} for name in jobs})
    return outcomes


def _start(function: str, arguments: list[Any], directory: str, environment: dict[str, str], streams: list[str]) -> int:
    """Fork a process that runs a function as a program, and return its number."""
    module, _, name = function.partition(":")
    program = getattr(importlib.import_module(module), name)
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells that run something in the background ignore it
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        for number, (path, flags) in enumerate(zip(streams, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
            stream = os.open(path, os.O_RDWR if path.startswith("/dev/") else flags)
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)
        status = run_program(program, arguments)
    finally:
        os._exit(status)


def run_program(program: Callable[..., object], arguments: list[Any]) -> int:
    """Run a program to its end as the interpreter does, and return its status."""
    status = 0
    try:
        program(*arguments)
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
    except OSError:
        traceback.print_exc()
        status = 120
    return status


def _wait(pid: int, seconds: float) -> int | None:
    """Wait for a process to end, and return its status; None: it goes on."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.005)


def _redirect(log: str) -> None:
    """Read nothing, and print to the log: the server's own streams are for requests and answers."""
    nothing, shown = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    for ours, theirs in ((nothing, 0), (shown, 1), (shown, 2)):
        os.dup2(ours, theirs)


def _outcome(module: ModuleType, function: str, *arguments: Any) -> Any:
    try:
        return getattr(module, function.partition(":")[2])(*arguments)
    except BaseException as error:
        traceback.print_exc()
        return {"error": str(error), "type": type(error).__name__}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
