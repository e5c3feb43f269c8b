"""`txl plan`."""

import json

from transformer_xl.cli.options import Above0, Json, Overrides, Positive
from transformer_xl.console import fitted


def plan(
    recipe: str = "quickstart",
    /,
    *,
    gpus: Positive = 1,
    set_: Overrides = None,
    gpu: str | None = None,
    flops: Above0 | None = None,
    bandwidth: Above0 | None = None,
    memory: Above0 | None = None,
    json_: Json = False,
) -> None:
    """Estimate what a run will need: memory, operations, bytes sent, time. Nothing is trained or written.

    The model reads without numbers, and its operations and what it keeps are
    counted; time follows from a rate and an efficiency, both printed. Unless a
    GPU or all three figures are given, which stand for another GPU, the plan is
    for this machine, whose speed is measured in a second or two.

    Common uses:
        txl plan wt103-base
        txl plan wt103-large --gpus 8 --gpu a100
        txl plan scale-1b --gpus 64
        txl plan enwik8-large --set train.accumulate=4 --gpu rtx4090
        txl plan wt103-large --flops 300 --bandwidth 1500 --memory 40

    Args:
        recipe: a name (txl recipes) or a TOML file, of a language model.
        gpus: number of devices, eight in each machine.
        set_: section.key=value, overrides the recipe; may be repeated.
        gpu: such as h100, a100, a100-40, l40s, rtx4090, v100. Default: this machine, or h100 for more devices than it has.
        flops: TFLOP/s of matrix products, instead of those of the machine or the data sheet.
        bandwidth: GB/s of memory, likewise.
        memory: GB of memory, likewise.
        json_: print one JSON object.
    """
    from transformer_xl.config.recipes import load_recipe
    from transformer_xl.data.corpora import switch_to_ids

    config = switch_to_ids(load_recipe(recipe, set_ or []), set_ or [])
    from transformer_xl.tools import hardware
    from transformer_xl.tools.plan import make_plan, plan_table

    figures = {"flops": flops, "bandwidth": bandwidth, "memory": memory}
    if gpu is None and None not in figures.values():
        base = hardware.described(config.train.precision)
    else:
        base = hardware.assumed(config.train, gpus) if gpu is None else hardware.gpu(gpu, config.train.precision)
    planned = make_plan(config, hardware.with_figures(base, **figures), gpus=gpus)
    print(json.dumps(planned.as_dict()) if json_ else fitted(plan_table(planned)))
