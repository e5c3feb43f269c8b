"""Measurements and plans as a person reads them."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from transformer_xl.console import in_bytes, printable, short, table
from transformer_xl.cost.plan import USABLE, Plan

Figures = dict[str, Any]
"""Plain numbers in seconds, bytes and operations, ready for JSON; None where a figure is unknown."""

_DECODING = ("precision", "code", "rows", "ready s", "ms/step", "min–max", "tokens/s", "MB/step", "limit ms")
_DECODING += ("time/limit", "MB held")

_PLAN_WIDTH = 100
_MEMORY_NAMES = {
    "weights": ("weights", "fp32"),
    "gradients": ("gradients", "fp32"),
    "optimizer": ("optimizer", ""),
    "mems": ("hidden states", "that all lanes remember, before and after the step"),
    "activations": ("activations", "kept for the backward pass"),
    "logits": ("logits", "scores of the vocabulary, for the tokens scored at once"),
    "lowered": ("rounded weights", "copies in the precision of the products"),
    "gathered": ("fetched weights", "of other devices, a part at a time"),
}
_flops = partial(short, units=("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))


def machine_line(machine: Mapping[str, str | float]) -> str:
    """Return the facts of `hardware.describe` in one line."""
    names = ", ".join(str(machine[name]) for name in ("processor", "gpu") if name in machine)
    return f"{names}; {machine['cores']} cores, {machine['threads']} threads, load {machine['load']}; torch {machine['torch']}"


def mode_name(figures: Figures) -> str:
    """Return a decoder's mode in words.

    Example:
        >>> mode_name({"precision": "int8", "compiled": True, "rows": 4})
        'int8 compiled, 4 rows'
    """
    rows = f", {figures['rows']} rows" if figures["rows"] > 1 else ""
    return f"{figures['precision']} {'compiled' if figures['compiled'] else 'eager'}{rows}"


def decoding_table(measured: Sequence[Figures]) -> str:
    """Return a table of each decoder's speed, and of what it holds."""
    rows: list[Sequence[str]] = [_DECODING]
    for entry in measured:
        step, held = entry["step_seconds"], entry["held_bytes"]
        rows.append(
            [
                entry["precision"],
                "compiled" if entry["compiled"] else "eager",
                str(entry["rows"]),
                f"{entry['ready_seconds']:.1f}",
                _digits(step["median"], 1e-3),
                f"{_digits(step['min'], 1e-3)}–{_digits(step['max'], 1e-3)}",
                _digits(entry["tokens_per_second"]),
                _digits(entry["bytes_per_step"], 1e6),
                _digits(entry["limit_seconds"], 1e-3),
                _digits(entry["time_over_limit"]),
                _digits(held and held["total"], 1e6),
            ]
        )
    note = (
        "A step is one token of each row. MB/step: weights, keys and values that it reads; limit: the time this takes.\n"
        "MB held: keys, values, positions and copies of weights, which the decoder adds to the model."
    )
    return f"{table(rows, n_left=2)}\n{note}"


def scoring_table(measured: Sequence[Figures]) -> str:
    """Return a table of speeds and of what large matrix products would reach."""
    rows = [
        [
            entry["precision"],
            str(entry["tgt_len"]),
            str(entry["batch_size"]),
            _digits(entry["tokens_per_second"]),
            _digits(entry["flops_per_token"], 1e6),
            _digits(entry["limit_tokens_per_second"]),
            f"{entry['reached']:.0%}",
        ]
        for entry in measured
    ]
    head = ["precision", "tgt_len", "lanes", "tokens/s", "MFLOP/token", "limit tokens/s", "reached"]
    limit = "limit: large matrix products, of as many operations as a token needs, would reach this."
    return f"{table([head, *rows])}\n{limit}"


def _digits(value: float | None, unit: float = 1.0) -> str:
    """Return a figure in the unit with at least three digits, or a dash."""
    if value is None:
        return "-"
    value /= unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def plan_table(plan: Plan) -> str:
    """Return a plan on one screen: lines of a name, a figure and its parts, then advice and assumptions."""
    rows = list(_plan_rows(plan))
    left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{name:{left}}  {figure:>{middle}}  {note}".rstrip() for name, figure, note in rows]
    notes = [*(f"advice: {text}" for text in plan.advice), *(f"assumed: {text}" for text in plan.assumptions)]
    wrapped = [line for note in notes for line in textwrap.wrap(note, _PLAN_WIDTH, subsequent_indent="  ")]
    model, layout = plan.model, plan.layout
    heads = f"{model.n_head} heads" if model.n_head > 1 else "1 head"
    shape = f"{model.n_layer} layers, width {model.d_model}, {heads} of {model.d_head}, inner {model.d_inner}"
    where = plan.hardware.name if layout.gpus == 1 else f"{layout.gpus} × {plan.hardware.name}"
    machines = f" on {layout.machines} machines" if layout.machines > 1 else ""
    title = f"{plan.recipe}: {shape}, memory {model.mem_len:,}; {where}{machines}, {plan.precision}"
    return "\n".join([printable(title), *lines, "", *wrapped])


def _plan_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    layout, memory, flops, timing, budget = plan.layout, plan.memory, plan.flops, plan.timing, plan.budget
    many = layout.gpus > 1
    groups = f"in {layout.accumulate} groups of lanes, one after another" if layout.accumulate > 1 else ""
    again = "layers computed again backward" if layout.checkpointing else ""
    yield "parameters", f"{plan.parameters:,}", ""
    details = filter(None, (layout.division if many else "", groups, again))
    yield "tokens of a step", f"{plan.tokens_per_step:,}", ", ".join(details)
    usable = f"the {in_bytes(USABLE * plan.hardware.memory)} that may be used"
    yield "memory of a device", in_bytes(memory.total), f"{'fits into' if plan.fits else 'DOES NOT FIT into'} {usable}"
    for part, n_byte in vars(memory).items():
        if n_byte:
            name, note = _MEMORY_NAMES[part]
            yield f"  {name}", in_bytes(n_byte), note
    yield "operations of a token", _flops(flops.needed), f"forward {_flops(flops.forward)}, backward {_flops(flops.backward)}"
    yield "  for attention", f"{flops.attention / flops.needed:.0%}", ""
    if flops.memory:
        yield "  for memory", f"{flops.memory / flops.needed:.0%}", "which a model without memory would not compute"
    if flops.repeated:
        yield "  repeated", f"{flops.repeated / flops.needed:.0%}", "in the backward pass, to save memory; not in the sum"
    if many:
        sent = f"gradients {in_bytes(plan.traffic.reduced)}, weights {in_bytes(plan.traffic.gathered)}"
        yield "sent by a device", in_bytes(plan.traffic.total), f"a step: {sent}"
        yield "sent by a machine", in_bytes(plan.traffic.total if layout.machines > 1 else 0), "a step, to other machines"
    parts = f"computing {_seconds(timing.compute)}, updating weights {_seconds(timing.update)}"
    overlap = f"; {_seconds(timing.serial)} without overlap"
    sending = f", sending {_seconds(timing.send)}{overlap}" if many else ""
    yield "time of a step", _seconds(timing.overlapped), f"{parts}{sending}"
    each = f"{plan.tokens_per_second / layout.gpus:,.0f} per device" if many else ""
    yield "tokens per second", f"{plan.tokens_per_second:,.0f}", each
    if budget.tokens is None or budget.seconds is None:
        yield "budget", "?", "in epochs: the length of the corpus tells"
    else:
        yield "budget", _duration(budget.seconds), f"{budget.tokens:,.0f} tokens, {budget.steps:,.0f} steps"


def _seconds(s: float) -> str:
    return f"{s:.3g} s" if s >= 1 else f"{1000 * s:.3g} ms"


def _duration(s: float) -> str:
    """Return a long duration.

    Example:
        >>> _duration(90), _duration(7200), _duration(864_000)
        ('1.5 min', '2.0 h', '10.0 days')
    """
    if s < 5400:
        return f"{s / 60:.1f} min"
    return f"{s / 3600:.1f} h" if s < 2 * 86400 else f"{s / 86400:,.1f} days"
