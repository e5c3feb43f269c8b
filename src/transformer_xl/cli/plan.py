"""`txl plan`."""

import json
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from transformer_xl.cli.options import RECIPES, Above0, Json, Overrides, Positive

_Share = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]


def plan(
    recipe: Annotated[str, RECIPES] = "quickstart",
    /,
    *,
    gpus: Positive = 1,
    per_machine: Positive = 8,
    set_: Overrides = None,
    gpu: str | None = None,
    flops: Above0 | None = None,
    bandwidth: Above0 | None = None,
    memory: Above0 | None = None,
    network: Above0 | None = None,
    efficiency: _Share | None = None,
    divide: Literal["ddp", "fsdp"] | None = None,
    json_: Json = False,
) -> None:
    """Estimate what a run will need: memory, operations, bytes sent, time. Nothing is trained or written.

    Parameters, operations, memory of weights, optimizer and hidden states are
    exact; time follows from a rate and an efficiency, both printed. Unless a
    GPU or figures are given, the plan is for this machine, whose speed is
    measured in a second or two.

    Common uses:
        txl plan wt103-base
        txl plan wt103-large --gpus 8 --gpu a100
        txl plan scale-1b --gpus 64
        txl plan enwik8-large --set train.accumulate=4 --gpu rtx4090
        txl plan wt103-base --flops 0.9 --bandwidth 77 --memory 24 --efficiency 0.5

    Args:
        recipe: a name (txl recipes) or a TOML file.
        gpus: number of devices.
        per_machine: devices in a machine.
        set_: section.key=value, overrides the recipe; may be repeated.
        gpu: such as h100, a100, a100-40, l40s, rtx4090, v100. Default: this machine, or h100 for more devices than it has.
        flops: TFLOP/s of matrix products, instead of those of the machine or the data sheet.
        bandwidth: GB/s of memory, likewise.
        memory: GB of memory, likewise.
        network: GB/s that leave a machine. Default: 50, one link of 400 Gb/s.
        efficiency: share of the rate of products that training reaches. Default: 0.3, an assumption.
        divide: ddp: every device has all weights; fsdp: a share of them. Default: train.parallel, and fsdp if ddp does not fit.
        json_: print one JSON object.
    """
    from transformer_xl.config.recipes import load_recipe
    from transformer_xl.data.corpora import choose_tokenizer

    config = choose_tokenizer(load_recipe(recipe, set_ or []), set_ or [])
    from transformer_xl.cost import hardware
    from transformer_xl.cost.display import plan_table
    from transformer_xl.cost.plan import make_plan

    n_device = min(gpus, per_machine)
    base = hardware.assumed(config.train, n_device) if gpu is None else hardware.gpu(gpu, config.train.precision)
    device = hardware.with_figures(
        base, flops=flops, bandwidth=bandwidth, memory=memory, network=network, efficiency=efficiency
    )
    division = divide or ("fsdp" if config.train.parallel == "fsdp" else None)
    planned = make_plan(config, device, gpus=gpus, per_machine=per_machine, division=division)
    print(json.dumps(planned.as_dict()) if json_ else plan_table(planned))
