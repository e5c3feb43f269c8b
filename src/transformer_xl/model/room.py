"""Whether there is room for what settings ask for, said where it is about to be allotted, whoever asks: a person or a file."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from transformer_xl.console import in_bytes
from transformer_xl.errors import ConfigError

_SMALL = 64 * 2**20
"""What is smaller is allotted without a look at the machine."""

_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def check_room(n_bytes: int, device: torch.device | str | None, what: str) -> None:
    """Refuse what a device has no memory for.

    Args:
        n_bytes: that are about to be allotted.
        device: where; None: the CPU.
        what: what takes them, with the settings that make it large.

    Raises:
        ConfigError: fewer bytes are free.
    """
    if type(n_bytes) is not int or n_bytes < _SMALL:  # a graph that is traced has no numbers
        return
    free = free_bytes(torch.device(device or "cpu"))
    if free is not None and n_bytes > free:
        raise ConfigError(f"{what} takes {in_bytes(n_bytes)}, and {in_bytes(free)} are free; ask for less")


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory of a device this process could have, with what it holds already; None: that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    left = [*_left()]
    return min(left) + _held() if left else None


def _left() -> Iterator[int]:
    """Yield what the system says that it could give, and what a container may still take."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        yield 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    for folder, limit, usage in _CGROUPS:
        with suppress(OSError, ValueError):
            most, used = (int(Path(folder, name).read_text(encoding="ascii")) for name in (limit, usage))
            yield max(most - used, 0)


def _held() -> int:
    """Return what this process holds: some of it is free again, but not given back."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
