"""What a device can do: a plan takes it from a GPU's data sheet, from the user, or from a measurement here."""

import os
from dataclasses import dataclass, replace

import torch

from transformer_xl.cost import machine
from transformer_xl.errors import ConfigError, did_you_mean
from transformer_xl.model.precision import Precision, choose_device, choose_precision

STATED_EFFICIENCY = 0.3
MEASURED_EFFICIENCY = 0.5

_CITED = (
    "assumed, between 0.12 (NVIDIA's Transformer-XL on A100, from its published tokens/s) and 0.41 (MosaicML's 1.3B "
    "Transformer on 64 H100)"
)
_MEASURED = "training steps on a CPU were measured at 0.47 to 0.66 of the rate of large products"


@dataclass(frozen=True)
class Hardware:
    """One device, and how it is connected."""

    name: str
    flops: float  # of the products per second, in `precision`
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    link: float  # to other devices of the same machine, bytes per second and direction
    network: float  # to other machines, bytes per second and direction, all devices of a machine together
    precision: Precision  # in which a run multiplies that leaves the choice to the device
    origin: str  # where the figures are from
    efficiency: float = STATED_EFFICIENCY  # share of `flops` that training is taken to reach, repeated operations not counted
    efficiency_origin: str = _CITED
    on_cpu: bool = False  # it is a processor
    fuses: bool = True  # it runs the fused kernels of attention


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

_BYTES_READ = 1 << 28
"""So many are read to measure the memory: more than caches hold, and a tenth of a second."""


def gpu(name: str, precision: str) -> Hardware:
    """Return what a GPU's data sheet says.

    Args:
        name: such as h100.
        precision: of a run; `auto` takes what the GPU multiplies fast.

    Raises:
        ConfigError: no such GPU here.
    """
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
    """Return the hardware with figures that are known better; None: as they are.

    Args:
        hardware: what the others are of.
        flops: TFLOP/s of matrix products.
        bandwidth: GB/s of memory.
        memory: GB.
        network: GB/s between machines.
        efficiency: share of `flops` that training reaches.

    Raises:
        ConfigError: a figure that cannot be.
    """
    given = {"flops": flops, "bandwidth": bandwidth, "memory": memory, "network": network}
    for name, value in [*given.items(), ("efficiency", efficiency)]:
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name} ({value:g}) must be above 0")
    if efficiency is not None and efficiency > 1:
        raise ConfigError(f"--efficiency ({efficiency:g}) must be at most 1, the share of the stated rate that is reached")
    units = {"flops": 1e12, "bandwidth": 1e9, "memory": 1e9, "network": 1e9}
    changed = {name: value * units[name] for name, value in given.items() if value is not None}
    named = [name for name in changed if name != "network"]
    if named:
        hardware = replace(hardware, origin=f"{hardware.origin}; {', '.join(named)} as given")
    if efficiency is not None:
        hardware = replace(hardware, efficiency=efficiency, efficiency_origin="as given")
    return replace(hardware, **changed)


def this_machine(device: str, precision: str) -> Hardware:
    """Measure, in a second or two, how fast a device of this machine multiplies and reads memory.

    Args:
        device: auto, cpu, cuda, cuda:N or mps.
        precision: of a run, such as `auto`.

    Raises:
        ConfigError: no such device here, or a precision that it cannot have.
    """
    place = choose_device(device)
    chosen, _ = choose_precision(precision, place)
    if place.type == "cuda":
        name, memory = torch.cuda.get_device_name(place), torch.cuda.get_device_properties(place).total_memory
    else:
        name, memory = f"this machine's {place.type}", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[chosen]
    return measured(
        name,
        flops=machine.matmul_rate(place, dtype),
        bandwidth=machine.memory_bandwidth(place, n_bytes=_BYTES_READ),
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
        efficiency=MEASURED_EFFICIENCY if on_cpu else STATED_EFFICIENCY,
        efficiency_origin=_MEASURED if on_cpu else _CITED,
        on_cpu=on_cpu,
        fuses=not on_cpu,
    )
