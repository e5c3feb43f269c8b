"""Whether there is room for what settings ask for, said before anything is allotted.

There are two limits. A small file could ask for a memory that fills the machine; so what only a file asks for is bounded by its
weights, and whoever wants more says so. And nothing is allotted that this machine has no memory for.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from transformer_xl.console import in_bytes
from transformer_xl.errors import ConfigError

UNASKED_BYTES = 256 * 2**20
"""What the memory of one text may take, however small the weights are, if only a file asks for it."""

_UNASKED_SHARE = 2
"""The same in bytes of the weights; the papers' models with their longest memories take less than one."""

_SMALL = 64 * 2**20
"""What is smaller is allotted without a look at the machine."""

_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def check_unasked(n_bytes: int, weights: int, *, what: str, remedy: str) -> None:
    """Refuse a memory that a file asks for, and nobody else.

    Args:
        n_bytes: of the memory of one text.
        weights: bytes of the model's weights.
        what: what asks for what, such as "config.json asks for a memory of 1,000 positions, which".
        remedy: how to ask for it.
    """
    most = max(UNASKED_BYTES, _UNASKED_SHARE * weights)
    if n_bytes > most:
        raise ConfigError(
            f"{what} takes {in_bytes(n_bytes)} for each text, and a file may ask for {in_bytes(most)} at most; {remedy}"
        )


def check_room(n_bytes: int, device: torch.device | str | None, *, what: str, remedy: str) -> None:
    """Refuse what a device has no memory for.

    Args:
        n_bytes: that are about to be allotted.
        device: where; None: the CPU.
        what: what takes them.
        remedy: what to do.
    """
    if type(n_bytes) is not int or n_bytes < _SMALL:  # a graph that is traced has no numbers
        return
    free = free_bytes(torch.device(device or "cpu"))
    if free is not None and n_bytes > free:
        raise ConfigError(f"{what} takes {in_bytes(n_bytes)}, and {in_bytes(free)} are free; {remedy}")


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory of a device this process could have, with what it holds already; None: that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [*_available(), *_left_in_group()]
    return min(known) + _held() if known else None


_MUCH = 1 / 4
"""Share of a GPU's memory; what a desktop and CUDA itself take is less."""


def shared(device: torch.device) -> str | None:
    """Say how much of a GPU's memory other processes hold, if that is much; None if it is not, or there is no GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others <= _MUCH * total:
        return None
    return (
        f"other processes hold {in_bytes(others)} of the {in_bytes(total)} of {device}, and {in_bytes(free)} are free, so this "
        "may be slow or run out of memory"
    )


def _available() -> Iterator[int]:
    """Yield what the system says that it could give."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        yield 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])


def _left_in_group() -> Iterator[int]:
    """Yield what a container may still take."""
    for folder, limit, usage in _CGROUPS:
        with suppress(OSError, ValueError):
            most, used = (int(Path(folder, name).read_text(encoding="ascii")) for name in (limit, usage))
            yield max(most - used, 0)


def _held() -> int:
    """Return what this process holds: some of it is free again, but not given back."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
