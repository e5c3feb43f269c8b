"""What a device can do: as a GPU's data sheet says, as the user says, or as measured on this machine."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from transformer_xl.config.run import TrainConfig
from transformer_xl.errors import ConfigError, did_you_mean
from transformer_xl.kernels.device import Precision, activation_dtype, choose_device, choose_precision, processor
from transformer_xl.process import cores

Clock = Callable[[], float]
"""Returns seconds."""

_SHEETS: dict[str, tuple[float, float, float, float, float, Precision]] = {
    "b200": (2250, 75, 7.7, 180, 900, "bf16"),
    "h200": (989, 67, 4.8, 141, 450, "bf16"),
    "h100": (989, 67, 3.35, 80, 450, "bf16"),
    "a100": (312, 19.5, 2.0, 80, 300, "bf16"),
    "a100-40": (312, 19.5, 1.555, 40, 300, "bf16"),
    "l40s": (362, 91.6, 0.864, 48, 32, "bf16"),
    "l4": (121, 30.3, 0.3, 24, 32, "bf16"),
    "rtx4090": (165, 82.6, 1.008, 24, 32, "bf16"),
    "v100": (125, 15.7, 0.9, 32, 150, "fp16"),
    "t4": (65, 8.1, 0.32, 16, 16, "fp16"),
}
"""NVIDIA's data sheets: TFLOP/s of dense 16-bit products and of fp32, TB/s and GB of memory, GB/s of the link, 16-bit type."""

_TRIES = 5
_LEAST_SECONDS = 0.01
_SIZES = (512, 1024, 2048, 4096, 8192)
"""Of the matrices that are multiplied, up to the first that takes at least `_LEAST_SECONDS`."""


@dataclass(frozen=True)
class Hardware:
    """A device and its link to others."""

    name: str
    flops: float  # of the products per second, in `precision`
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    link: float  # between devices of one machine, bytes per second and direction
    precision: Precision  # of a run's products; of a run with `auto`, what the device multiplies fast
    origin: str  # of the figures
    on_cpu: bool = False


def gpu(name: str, precision: str) -> Hardware:
    """Return what the data sheet of a GPU such as h100 says; precision `auto` takes what it multiplies fast."""
    if name.lower() not in _SHEETS:
        hint = did_you_mean(name.lower(), _SHEETS)
        raise ConfigError(f"unknown GPU '{name}'; {hint}; or give --flops, --bandwidth and --memory")
    half, single, bandwidth, memory, link, narrow = _SHEETS[name.lower()]
    chosen: Precision = narrow if precision == "auto" else precision  # pyright: ignore[reportAssignmentType]
    flops = 1e12 * (single if chosen == "fp32" else half)
    return Hardware(name.lower(), flops, 1e12 * bandwidth, 1e9 * memory, 1e9 * link, chosen, "data sheet")


def with_figures(hardware: Hardware, *, flops: float | None, bandwidth: float | None, memory: float | None) -> Hardware:
    """Return the hardware with the user's figures, in TFLOP/s, GB/s and GB; None keeps a figure."""
    figures = {"flops": (flops, 1e12), "bandwidth": (bandwidth, 1e9), "memory": (memory, 1e9)}
    changed = {name: value * unit for name, (value, unit) in figures.items() if value is not None}
    rest = "" if len(changed) == len(figures) else f"{hardware.origin}; {', '.join(changed)} "
    return replace(hardware, origin=f"{rest}as given", **changed) if changed else hardware


def described(precision: str) -> Hardware:
    """Return a GPU whose figures the user will give (`with_figures`), with the link and the 16-bit type of an h100."""
    return replace(gpu("h100", precision), name="the given device")


def assumed(train: TrainConfig, n_device: int) -> Hardware:
    """Return this machine as a run's settings use it, or an h100 if it has fewer devices than `n_device`."""
    if n_device <= max(1, torch.cuda.device_count()):
        return this_machine(train.device, train.precision)
    return replace(gpu("h100", train.precision), origin="data sheet; this machine has fewer devices, --gpu names others")


def this_machine(device: str, precision: str) -> Hardware:
    """Measure, in a second or two, how fast a device of this machine multiplies and reads memory."""
    place = choose_device(device)
    chosen, _ = choose_precision(precision, place)
    if place.type == "cuda":
        name, memory = torch.cuda.get_device_name(place), torch.cuda.get_device_properties(place).total_memory
    else:
        name, memory = f"this machine's {place.type}", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    flops = matmul_rate(place, activation_dtype(chosen, torch.float32))
    bandwidth = memory_bandwidth(place, n_bytes=1 << 28)  # more than caches hold, and a tenth of a second
    link = 1e9 * _SHEETS["h100"][4]  # where several devices are, they are of this kind
    return Hardware(name, flops, bandwidth, memory, link, chosen, "measured now", on_cpu=place.type == "cpu")


def describe(device: torch.device) -> dict[str, str | float]:
    """Return what a reader must know of the machine to judge a figure; `load` is how many programs kept it busy, on average."""
    facts: dict[str, str | float] = {"processor": processor(), "cores": cores(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return {**facts, "load": round(os.getloadavg()[0], 1), "torch": torch.__version__}


def memory_bandwidth(device: torch.device, *, n_bytes: int | None = None, clock: Clock = time.perf_counter) -> float:
    """Measure how many bytes per second all threads together, or a GPU, read: the fastest of several sums of a large tensor.

    `n_bytes` should be more than caches hold; by default 512 MiB, and 1 GiB on a GPU.
    """
    n_bytes = n_bytes or (1 << 29 if device.type == "cpu" else 1 << 30)
    numbers = torch.ones(n_bytes // 4, device=device)
    return numbers.nbytes / min(seconds_of(numbers.sum, device, clock) for _ in range(_TRIES))


def matmul_rate(device: torch.device, dtype: torch.dtype, *, clock: Clock = time.perf_counter) -> float:
    """Measure the operations per second of large square matrix products; a multiplication and an addition count as two."""
    best = 0.0
    for size in _SIZES:
        a = torch.ones(size, size, dtype=dtype, device=device)
        seconds = min(seconds_of(lambda a=a: a @ a, device, clock) for _ in range(_TRIES))
        best = max(best, 2 * size**3 / seconds)
        if seconds >= _LEAST_SECONDS:
            break
    return best


def seconds_of(work: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Return how long work takes until the device has finished it; above 0, although a coarse clock may not have moved."""
    finish(device)
    begin = clock()
    work()
    finish(device)
    return max(clock() - begin, 1e-9)


def finish(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
