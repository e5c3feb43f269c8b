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

_STATED_EFFICIENCY = 0.3
_MEASURED_EFFICIENCY = 0.5

_CITED = (
    "between 0.12 (NVIDIA's Transformer-XL on A100, from its published tokens/s) and 0.41 (MosaicML's 1.3B "
    "Transformer on 64 H100)"
)
_MEASURED = "training steps on a CPU were measured at 0.47 to 0.66 of the rate of large products"


@dataclass(frozen=True)
class Hardware:
    """A device and its connections."""

    name: str
    flops: float  # of the products per second, in `precision`
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    link: float  # between devices of one machine, bytes per second and direction
    network: float  # between machines, bytes per second and direction, for all devices of a machine together
    precision: Precision  # of a run's products; of a run with `auto`, what the device multiplies fast
    origin: str  # of the figures
    efficiency: float = _STATED_EFFICIENCY  # assumed share of `flops` in training, repeated operations not counted
    efficiency_origin: str = _CITED
    on_cpu: bool = False
    fuses: bool = True  # whether it runs the fused kernels of attention


@dataclass(frozen=True)
class _Sheet:
    """A data sheet: TFLOP/s of dense 16-bit products and of fp32, TB/s and GB of memory, GB/s of the link."""

    half: float
    single: float
    bandwidth: float
    memory: float
    link: float
    precision: Precision = "bf16"


_SHEETS = {
    "b200": _Sheet(2250, 75, 7.7, 180, 900),
    "h200": _Sheet(989, 67, 4.8, 141, 450),
    "h100": _Sheet(989, 67, 3.35, 80, 450),
    "a100": _Sheet(312, 19.5, 2.0, 80, 300),
    "a100-40": _Sheet(312, 19.5, 1.555, 40, 300),
    "l40s": _Sheet(362, 91.6, 0.864, 48, 32),
    "l4": _Sheet(121, 30.3, 0.3, 24, 32),
    "rtx4090": _Sheet(165, 82.6, 1.008, 24, 32),
    "v100": _Sheet(125, 15.7, 0.9, 32, 150, "fp16"),
    "t4": _Sheet(65, 8.1, 0.32, 16, 16, "fp16"),
}
_NETWORK = 50e9  # one link of 400 Gb/s

_TRIES = 5
_LEAST_SECONDS = 0.01
_SIZES = (512, 1024, 2048, 4096, 8192)
"""Of the matrices that are multiplied, up to the first that takes at least `_LEAST_SECONDS`."""


def gpu(name: str, precision: str) -> Hardware:
    """Return what the data sheet of a GPU such as h100 says; precision `auto` takes what it multiplies fast."""
    sheet = _SHEETS.get(name.lower())
    if sheet is None:
        raise ConfigError(
            f"unknown GPU '{name}'; {did_you_mean(name.lower(), _SHEETS)}; or give --flops, --bandwidth and --memory"
        )
    chosen: Precision = sheet.precision if precision == "auto" else precision  # pyright: ignore[reportAssignmentType]
    return Hardware(
        name=name.lower(),
        flops=1e12 * (sheet.single if chosen == "fp32" else sheet.half),
        bandwidth=1e12 * sheet.bandwidth,
        memory=1e9 * sheet.memory,
        link=1e9 * sheet.link,
        network=_NETWORK,
        precision=chosen,
        origin="data sheet",
        fuses=sheet.precision == "bf16",  # Ampere and later have both
    )


def with_figures(
    hardware: Hardware,
    *,
    flops: float | None = None,
    bandwidth: float | None = None,
    memory: float | None = None,
    network: float | None = None,
    efficiency: float | None = None,
) -> Hardware:
    """Return the hardware with the user's figures, in the units of `txl plan`; None keeps a figure."""
    figures = {"flops": (flops, 1e12), "bandwidth": (bandwidth, 1e9), "memory": (memory, 1e9), "network": (network, 1e9)}
    changed = {name: value * unit for name, (value, unit) in figures.items() if value is not None}
    named = [name for name in changed if name != "network"]
    if named:
        hardware = replace(hardware, origin=f"{hardware.origin}; {', '.join(named)} as given")
    if efficiency is not None:
        hardware = replace(hardware, efficiency=efficiency, efficiency_origin="as given")
    return replace(hardware, **changed)


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
    return measured(
        name,
        flops=matmul_rate(place, activation_dtype(chosen, torch.float32)),
        bandwidth=memory_bandwidth(place, n_bytes=1 << 28),  # more than caches hold, and a tenth of a second
        memory=memory,
        precision=chosen,
        on_cpu=place.type == "cpu",
    )


def measured(name: str, *, flops: float, bandwidth: float, memory: float, precision: Precision, on_cpu: bool) -> Hardware:
    """Return a device whose figures were all measured."""
    return Hardware(
        name=name,
        flops=flops,
        bandwidth=bandwidth,
        memory=memory,
        link=_NETWORK,
        network=_NETWORK,
        precision=precision,
        origin="measured now",
        efficiency=_MEASURED_EFFICIENCY if on_cpu else _STATED_EFFICIENCY,
        efficiency_origin=_MEASURED if on_cpu else _CITED,
        on_cpu=on_cpu,
        fuses=not on_cpu,
    )


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
