"""A plan as a person reads it: one screen."""

import textwrap
from collections.abc import Iterator
from functools import partial

from transformer_xl.console import short
from transformer_xl.cost.plan import USABLE, Plan

_bytes = partial(short, units=("B", "kB", "MB", "GB", "TB", "PB"))
_flops = partial(short, units=("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))

_WIDTH = 100


def plan_table(plan: Plan) -> str:
    """Return the plan as lines of a name, a figure and what it is made of."""
    rows = list(_rows(plan))
    left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{name:{left}}  {figure:>{middle}}  {note}".rstrip() for name, figure, note in rows]
    notes = [*(f"advice: {text}" for text in plan.advice), *(f"assumed: {text}" for text in plan.assumptions)]
    wrapped = [line for note in notes for line in textwrap.wrap(note, _WIDTH, subsequent_indent="  ")]
    return "\n".join([_title(plan), *lines, "", *wrapped])


def _title(plan: Plan) -> str:
    model, layout = plan.model, plan.layout
    shape = f"{model.n_layer} / {model.d_model} / {model.n_head}×{model.d_head} / {model.d_inner}"
    where = f"{layout.gpus} × {plan.hardware.name}"
    machines = f" on {layout.machines} machines" if layout.machines > 1 else ""
    return f"{plan.recipe}: {shape}, memory {model.mem_len:,}; {where}{machines}, {plan.precision}"


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    layout, memory, flops, timing, budget = plan.layout, plan.memory, plan.flops, plan.timing, plan.budget
    lanes = f"{layout.division}, accumulate {layout.accumulate}" if layout.gpus > 1 else f"accumulate {layout.accumulate}"
    yield "parameters", f"{plan.parameters:,}", ""
    yield "tokens of a step", f"{plan.tokens_per_step:,}", f"{lanes}{', checkpointing' if layout.checkpointing else ''}"
    usable = USABLE * plan.hardware.memory
    yield "memory of a device", _bytes(memory.total), f"{'fits' if plan.fits else 'DOES NOT FIT'} {_bytes(usable)} usable"
    for part, n_byte in vars(memory).items():
        if n_byte:
            yield f"  {part}", _bytes(n_byte), _MEMORY_NOTES.get(part, "")
    yield "operations of a token", _flops(flops.needed), f"forward {_flops(flops.forward)}, backward {_flops(flops.backward)}"
    yield "  of attention", f"{flops.attention / flops.needed:.0%}", f"there for the memory: {flops.memory / flops.needed:.0%}"
    yield "  repeated", f"{flops.repeated / flops.needed:.0%}", "in the backward pass, to save memory"
    if layout.gpus > 1:
        sent = f"gradients {_bytes(plan.traffic.reduced)}, weights {_bytes(plan.traffic.gathered)}"
        yield "sent by a device", _bytes(plan.traffic.total), f"a step: {sent}"
        yield "sent by a machine", _bytes(plan.traffic.total if layout.machines > 1 else 0), "a step, to other machines"
    detail = f"computing {_seconds(timing.compute)}, sending {_seconds(timing.send)}, update {_seconds(timing.update)}"
    yield "time of a step", _seconds(timing.overlapped), f"{detail}; in a row {_seconds(timing.serial)}"
    yield "tokens per second", f"{plan.tokens_per_second:,.0f}", f"{plan.tokens_per_second / layout.gpus:,.0f} of a device"
    if budget.tokens is None or budget.seconds is None:
        yield "budget", "?", "in epochs: the length of the corpus tells"
    else:
        yield "budget", _duration(budget.seconds), f"{budget.tokens:,.0f} tokens, {budget.steps:,.0f} steps"


_MEMORY_NOTES = {
    "weights": "fp32",
    "gradients": "fp32",
    "mems": "hidden states of all lanes, before and after the step",
    "activations": "kept for the backward pass",
    "logits": "scores of the tokens scored at once",
    "lowered": "weights in the precision of the products",
    "gathered": "of other devices, a part at a time",
}


def _seconds(s: float) -> str:
    return f"{s:.3g} s" if s >= 1 else f"{1000 * s:.3g} ms"


def _duration(s: float) -> str:
    """Return a long time.

    Example:
        >>> _duration(90), _duration(7200), _duration(864_000)
        ('1.5 min', '2.0 h', '10.0 days')
    """
    if s < 5400:
        return f"{s / 60:.1f} min"
    return f"{s / 3600:.1f} h" if s < 2 * 86400 else f"{s / 86400:,.1f} days"
