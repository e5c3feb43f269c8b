"""Run a command in a process of its own and watch its memory, children included."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

try:
    import psutil
except ImportError:
    sys.exit("error: psutil is missing; pip install psutil, or the package with its extra `test`")

SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Watched:
    """What a command took.

    Attributes:
        output: what it printed.
        seconds: from start to end, starting Python included.
        peak_mb: the largest memory seen of the process and its children together.
    """

    output: str
    seconds: float
    peak_mb: float


def run_watched(command: Sequence[str], what: str) -> Watched:
    """Run a command to its end; exit with a message if it fails.

    Args:
        command: program and arguments.
        what: it does, for the message.
    """
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak_mb = max(memory_of(process), default=0.0)
        output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"error: {what} failed; see the messages above")
    return Watched(output, time.perf_counter() - begin, peak_mb)


def memory_of(process: subprocess.Popen[str]) -> Iterator[float]:
    """Yield the memory (MB) of a process and its children until it ends."""
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            family = [watched, *watched.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        yield sum(map(own_mb, family))
        time.sleep(SAMPLE_SECONDS)


def own_mb(process: psutil.Process) -> float:
    """Return the memory (MB) of one process, 0 if it is gone."""
    try:
        memory = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return 0.0
    return getattr(memory, "pss", memory.uss) / 1e6  # only Linux tells the proportional size
