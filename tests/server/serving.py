"""`txl serve` as a process of its own, and programs of the clients' environment, for tests that need them."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

import transformer_xl.server.app  # noqa: F401  # once in the process from which servers are forked, and in none of these
from tests import forked
from tests.world_cases import program as program

CLIENTS = Path(__file__).with_name("clients")
PYTHON = Path(os.environ.get("TXL_CLIENTS_PYTHON", CLIENTS.parents[2] / ".venv-clients" / "bin" / "python"))


@contextmanager
def served(
    *options: str, run: str = "tiny", port: int = 0, key: str = ""
) -> Iterator[tuple[forked.Child, httpx.Client, list[str]]]:
    """Serve a model; the process ends with the block.

    Args:
        options: of `txl serve`.
        run: the model.
        port: 0: a free one.
        key: of its clients.

    Yields:
        The process, a client of it, and the lines that it says, also later ones.
    """
    command = ("serve", run, "--port", str(port), *options)
    with forked.start(f"{__name__}:program", *command) as child:
        said: list[str] = []
        while not any(line.startswith("ready at ") for line in said):
            line = child.stderr.readline().decode()
            assert line, f"it ended: {said}"
            said.append(line.rstrip("\n"))

        def listen() -> None:
            with suppress(ValueError):  # the block ends, and closes it
                said.extend(line.decode() for line in child.stderr)

        threading.Thread(target=listen, daemon=True).start()
        address = next(line for line in said if line.startswith("ready at ")).split()[2]
        with httpx.Client(base_url=address, timeout=30, headers={"authorization": f"Bearer {key}"} if key else {}) as client:
            until = time.monotonic() + 30
            while client.get("/readyz").status_code != 200:
                assert time.monotonic() < until, "it does not become ready"
                time.sleep(0.02)
            yield child, client, said


def run(folder: Path, *command: str, timeout: float = 240, environment: dict[str, str] | None = None) -> str:
    """Run a program of the clients' environment; return what it prints."""
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr
