"""Runs functions in several processes that work together, as `torchrun` would, but forked: all tests import torch once.

Usage: python -m tests.forked

Forks processes as each line of its standard input says, see `_fork`, and prints a line of JSON with what each of them returned.
"""

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from functools import cache
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
            outcomes = _ask({"jobs": jobs, "world_size": world_size, "environment": variables, "log": log.name}, timeout)
        finally:
            print(log.read().decode(errors="replace"))  # shown if a test fails
    return {name: [own[name] for own in outcomes] for name in jobs}


def _ask(request: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Let the server do something, and return its answer. One whose answer was not heard must not answer the next request."""
    server = _server()
    assert server.stdin and server.stdout
    try:
        server.stdin.write(json.dumps(request) + "\n")
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
    for line in sys.stdin:
        print(json.dumps(_fork(**json.loads(line))), flush=True)


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
