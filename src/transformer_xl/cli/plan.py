"""`txl plan`."""

import json
import os
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from transformer_xl.planning.hardware import Hardware

_BYTES_READ = 1 << 28
"""So many are read to measure the memory: more than caches hold, and a tenth of a second."""


def plan(
    recipe: str = "quickstart",
    /,
    *,
    gpus: int = 1,
    per_machine: int = 8,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", consume_multiple=False)] = None,
    gpu: str = "h100",
    flops: float | None = None,
    bandwidth: float | None = None,
    memory: float | None = None,
    network: float | None = None,
    efficiency: float | None = None,
    divide: Literal["ddp", "fsdp"] | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Count what a run will need, on paper: memory, operations, bytes sent, time. Nothing is trained and nothing written.

    Parameters, operations, memory of weights, optimizer and hidden states are
    exact; time follows from a rate and an efficiency, both printed.

    Common uses:
        txl plan wt103-large --gpus 8 --gpu a100
        txl plan scale-1b --gpus 64
        txl plan enwik8-large --set train.accumulate=4 --gpu rtx4090
        txl plan wt103-base --flops 0.9 --bandwidth 77 --memory 24 --efficiency 0.5

    Args:
        recipe: a name (docs/recipes.md) or a TOML file.
        gpus: number of devices.
        per_machine: devices of a machine.
        set_: section.key=value laid over the recipe; may be repeated.
        gpu: whose data sheet counts, such as h100, h200, a100, a100-40, l40s, rtx4090, v100.
        flops: TFLOP/s of matrix products, instead of the data sheet's.
        bandwidth: GB/s of its memory, instead of the data sheet's.
        memory: GB of it, instead of the data sheet's.
        network: GB/s that leave a machine. Default: 50, one link of 400 Gb/s.
        efficiency: share of that rate that training reaches. Default: 0.3, an assumption.
        divide: ddp: every device has all weights; fsdp: a share of them. Default: train.parallel, and fsdp if ddp does not fit.
        json_: print one JSON object.
    """
    from transformer_xl.config import load_recipe
    from transformer_xl.planning.display import table
    from transformer_xl.planning.hardware import gpu as data_sheet
    from transformer_xl.planning.hardware import with_figures
    from transformer_xl.planning.plan import make_plan

    config = load_recipe(recipe, set_ or [])
    hardware = with_figures(
        data_sheet(gpu, config.train.precision),
        flops=flops,
        bandwidth=bandwidth,
        memory=memory,
        network=network,
        efficiency=efficiency,
    )
    division = divide or ("fsdp" if config.train.parallel == "fsdp" else None)
    planned = make_plan(config, hardware, gpus=gpus, per_machine=per_machine, division=division)
    print(json.dumps(planned.as_dict()) if json_ else table(planned))


def this_machine(device: str, precision: str) -> "Hardware":
    """Measure, in a second or two, how fast a device of this machine multiplies and reads memory."""
    import torch

    from transformer_xl.model.precision import choose_device, choose_precision
    from transformer_xl.planning.hardware import measured
    from transformer_xl.speed.machine import matmul_rate, memory_bandwidth

    place = choose_device(device)
    chosen, _ = choose_precision(precision, place)
    on_cpu = place.type == "cpu"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[chosen]
    if place.type == "cuda":
        memory = torch.cuda.get_device_properties(place).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return measured(
        torch.cuda.get_device_name(place) if place.type == "cuda" else f"this machine's {place.type}",
        flops=matmul_rate(place, dtype),
        bandwidth=memory_bandwidth(place, n_bytes=_BYTES_READ),
        memory=memory,
        precision=chosen,
        on_cpu=on_cpu,
    )
