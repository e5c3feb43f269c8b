"""Runs a function in several processes that work together, as `torchrun` would, but forked: torch is imported once.

Usage: python -m tests.forked MODULE:FUNCTION WORLD_SIZE ARGUMENTS_AS_JSON

Each process prints what the function returned, or the error that it ended with.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_forked(
    function: str, world_size: int, *arguments: Any, timeout: float = 200, environment: dict[str, str] | None = None
) -> list[Any]:
    """Run MODULE:FUNCTION in `world_size` processes and return what each returned: JSON values, or {"error", "type"}.

    A process that died without a word gives {"error": None, "status": its wait status}.
    """
    command = [sys.executable, "-m", "tests.forked", function, str(world_size), json.dumps(arguments)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TXL_TIMEOUT_SECONDS": "60", **(environment or {})}
    child = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, timeout=timeout, check=False
    )
    print(child.stderr)  # shown if a test fails
    assert child.returncode == 0
    return json.loads(child.stdout.splitlines()[-1])


def run_jobs(jobs: dict[str, tuple[Any, ...]], world_size: int, **options: Any) -> dict[str, list[Any]]:
    """Run several functions, each (MODULE:FUNCTION, its arguments), one after another; as many processes are started once.

    Returns:
        By job, what each process returned; see `run_forked`.
    """
    outcomes = run_forked("tests.forked:several", world_size, jobs, **options)
    return {name: [own[name] for own in outcomes] for name in jobs}


def several(jobs: dict[str, list[Any]]) -> dict[str, Any]:
    """Run functions in this process."""
    return {name: _outcome(_function(function), arguments) for name, (function, *arguments) in jobs.items()}


def main(function: Callable[..., Any], world_size: int, arguments: list[Any]) -> None:
    """Fork the processes, and print what they returned."""
    import torch

    torch.set_num_threads(1)  # a second thread would not survive the fork
    port = _free_port()
    pipes = []
    for rank in range(world_size):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with os.fdopen(writer, "w") as pipe:
                json.dump(_outcome(function, arguments), pipe)
            os._exit(0)
        os.close(writer)
        pipes.append((child, reader))
    outcomes = []
    for child, reader in pipes:
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        outcomes.append(json.loads(text) if text else {"error": None, "status": status})
    print(json.dumps(outcomes))


def _outcome(function: Callable[..., Any], arguments: list[Any]) -> Any:
    try:
        return function(*arguments)
    except BaseException as error:
        traceback.print_exc()
        return {"error": str(error), "type": type(error).__name__}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    main(_function(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
