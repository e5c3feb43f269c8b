"""The machine that figures belong to, and the memory of this process."""

import os
import platform
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_SHOWN_CAPABILITIES = ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def n_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe() -> dict[str, str]:
    """Return what a reader must know of the machine to judge a figure."""
    from transformer_xl.kernels.device import instructions, processor  # with torch; the other functions do without

    capabilities = instructions()
    return {
        "processor": processor(),
        "cores": str(n_cores()),
        "capabilities": " ".join(name for name in _SHOWN_CAPABILITIES if name in capabilities) or "none of note",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "load before": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "system": platform.platform(),
    }


def resident_mb() -> float:
    """Return the memory (MB) that this process holds now; its peak where the system tells no more."""
    return _from_status("VmRSS")


def peak_mb() -> float:
    """Return the most memory (MB) that this process held since `reset_peak`, or since it began where that is not possible."""
    return _from_status("VmHWM")


def reset_peak() -> None:
    """Make `peak_mb` forget what was before (Linux only)."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _from_status(key: str) -> float:
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
