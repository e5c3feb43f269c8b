"""A plan as a person reads it: one screen."""

import textwrap
from collections.abc import Iterator

from transformer_xl.planning.plan import USABLE, Plan

_WIDTH = 100


def table(plan: Plan) -> str:
    """Return the plan as lines of a name, a figure and what it is made of."""
    rows = list(_rows(plan))
    left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{name:{left}}  {figure:>{middle}}  {note}".rstrip() for name, figure, note in rows]
    notes = [*(("advice", text) for text in plan.advice), *(("assumed", text) for text in plan.assumptions)]
    return "\n".join([_title(plan), *lines, "", *(line for kind, text in notes for line in _note(kind, text))])


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
    parts = ("weights", "gradients", "optimizer", "mems", "activations", "logits", "lowered", "gathered")
    for part in parts:
        if getattr(memory, part):
            yield f"  {part}", _bytes(getattr(memory, part)), _MEMORY_NOTES.get(part, "")
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


def _note(kind: str, text: str) -> list[str]:
    return textwrap.wrap(f"{kind}: {text}", _WIDTH, subsequent_indent="  ")


def _bytes(n: float) -> str:
    """Return bytes in decimal units, as data sheets do.

    Example:
        >>> _bytes(1_234_000_000), _bytes(56_700), _bytes(0)
        ('1.23 GB', '56.7 kB', '0 B')
    """
    return _short(n, ("B", "kB", "MB", "GB", "TB", "PB"))


def _flops(n: float) -> str:
    return _short(n, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _short(n: float, units: tuple[str, ...]) -> str:
    i = 0
    while n >= 999.5 and i < len(units) - 1:
        n, i = n / 1000, i + 1
    return f"{n:.3g} {units[i]}"


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
