"""What the machine can do: read memory, and multiply; and what this process holds of its memory."""

import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

Clock = Callable[[], float]
"""Returns seconds."""

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

_TRIES = 5
_LEAST_SECONDS = 0.01
_SIZES = (512, 1024, 2048, 4096, 8192)
"""Of the matrices that are multiplied, up to the first that takes a while."""


def describe(device: torch.device) -> dict[str, str | float]:
    """Return what a reader must know of a machine to judge a figure; `load` is how many programs kept it busy, on average."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts: dict[str, str | float] = {"processor": processor(), "cores": cores, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    load = {"load": round(os.getloadavg()[0], 1)} if hasattr(os, "getloadavg") else {}
    return {**facts, **load, "torch": torch.__version__}


def memory_bandwidth(device: torch.device, *, n_bytes: int | None = None, clock: Clock = time.perf_counter) -> float:
    """Measure how fast all threads together, or a GPU, read memory: the best of several sums over one large tensor.

    Args:
        device: whose memory is read.
        n_bytes: how much, more than caches hold; None: 512 MiB, on a GPU 1 GiB.
        clock: for tests.

    Returns:
        Bytes per second.
    """
    n_bytes = n_bytes or (1 << 29 if device.type == "cpu" else 1 << 30)
    numbers = torch.ones(n_bytes // 4, device=device)
    return numbers.nbytes / min(seconds_of(numbers.sum, device, clock) for _ in range(_TRIES))


def matmul_rate(device: torch.device, dtype: torch.dtype, *, clock: Clock = time.perf_counter) -> float:
    """Measure how fast a device multiplies large square matrices.

    Args:
        device: what multiplies.
        dtype: of the matrices.
        clock: for tests.

    Returns:
        Floating-point operations per second, a multiplication and an addition counted as two.
    """
    best = 0.0
    for size in _SIZES:
        a = torch.ones(size, size, dtype=dtype, device=device)
        seconds = min(seconds_of(lambda a=a: a @ a, device, clock) for _ in range(_TRIES))
        best = max(best, 2 * size**3 / seconds)
        if seconds >= _LEAST_SECONDS:
            break
    return best


def seconds_of(work: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Return how long work takes, until the device is done with it."""
    finish(device)
    begin = clock()
    work()
    finish(device)
    return clock() - begin


class MemoryWatch:
    """How much memory work took: what it still holds, and the most that it held. Begins with the `with` block.

    On a GPU its tensors count, else this process (Linux only). What is held does not include copies of files, since the system
    takes pages of libraries away and brings them back as it likes; the most does, as the system records it with them only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held_before = self._in_use_before = 0

    def __enter__(self) -> "MemoryWatch":
        _give_back()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _CLEAR.exists():
            _CLEAR.write_text("5")  # forgets the peak
        self._held_before, self._in_use_before, _ = self._now() or (0, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def resident(self) -> int | None:
        """Bytes held now that were not before; None where the system does not tell."""
        _give_back()
        now = self._now()
        return None if now is None else max(now[0] - self._held_before, 0)

    @property
    def peak(self) -> int | None:
        """The most bytes held at once since the beginning, less those held before."""
        now = self._now()
        return None if now is None else max(now[2] - self._in_use_before, 0)

    def _now(self) -> tuple[int, int, int] | None:
        """Return bytes held, bytes in use, copies of files included, and the most that were in use."""
        if self._device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self._device)
            return allocated, allocated, torch.cuda.max_memory_allocated(self._device)
        if not _STATUS.exists():
            return None
        fields = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines())
        if not {"RssAnon", "VmRSS", "VmHWM"} <= fields.keys():  # a system that only resembles Linux
            return None
        anonymous, in_use, peak = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS", "VmHWM"))
        return anonymous, in_use, peak


def finish(device: torch.device) -> None:
    """Wait until a device is done with what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _give_back() -> None:
    """Let the C library return what was freed: it would seem to be held, and what is made of it to take nothing."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim:
        trim(0)


def processor() -> str:
    """Return the processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'unknown'} ({platform.machine()})"
