"""What a person sees of measurements: tables and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformer_xl.console import table
from transformer_xl.cost.bench import Figures, mode_name
from transformer_xl.pictures import new_figure, save_picture

_MODE = ("precision", "code", "rows")
_SPEED = ("ready s", "ms/step", "min–max", "tokens/s", "of 1 row", "MB/step", "limit ms", "time/limit")
_HELD = ("held", "peak", "counted", "keys+values", "positions", "weights")


def machine_line(machine: Mapping[str, str | float]) -> str:
    """Return what `machine.describe` says, in one line."""
    names = ", ".join(str(machine[name]) for name in ("processor", "gpu") if name in machine)
    load = f", load {machine['load']}" if "load" in machine else ""
    return f"{names}; {machine['cores']} cores, {machine['threads']} threads{load}; torch {machine['torch']}"


def processor_and_threads(machine: Mapping[str, str | float]) -> str:
    """Return what of it stands under a picture."""
    return f"{machine.get('gpu', machine['processor'])}, {machine['threads']} threads"


def decoding_tables(measured: Sequence[Figures]) -> str:
    """Return speeds, and what each decoder holds."""
    speeds: list[Sequence[str]] = [(*_MODE, *_SPEED)]
    held: list[Sequence[str]] = [(*_MODE, *_HELD)]
    for entry in measured:
        name = [entry["precision"], "compiled" if entry["compiled"] else "eager", str(entry["rows"])]
        step, counted = entry["step_seconds"], entry["counted_bytes"] or {}
        speeds.append(
            [
                *name,
                f"{entry['ready_seconds']:.1f}",
                _digits(step["median"], 1e-3),
                f"{_digits(step['min'], 1e-3)}–{_digits(step['max'], 1e-3)}",
                _digits(entry["tokens_per_second"]),
                _digits(entry["of_one_row"]),
                _digits(entry["bytes_per_step"], 1e6),
                _digits(entry["limit_seconds"], 1e-3),
                _digits(entry["time_over_limit"]),
            ]
        )
        parts = (entry["resident_bytes"], entry["peak_bytes"], *map(counted.get, ("total", "memory", "positions", "weights")))
        held.append([*name, *(_digits(part, 1e6) for part in parts)])
    return "\n".join(
        [
            table(speeds, n_left=2),
            "A step is one token of each row. MB/step: weights, keys and values that it reads; limit: the time this takes.",
            "",
            "MB that the decoder adds to the model: measured, at its peak, and by count",
            table(held, n_left=2),
        ]
    )


def loss_table(losses: Sequence[Figures]) -> str:
    """Return what each precision costs."""
    rows = [[entry["precision"], f"{entry['loss']:.4f}", f"{entry['difference']:+.4f}"] for entry in losses]
    return f"loss on {losses[0]['tokens']:,} tokens\n" + table([["precision", "nats/token", "more than fp32"], *rows])


def scoring_table(measured: Sequence[Figures]) -> str:
    """Return speeds, and what large matrix products would reach."""
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


def rereading_table(measured: Sequence[Figures]) -> str:
    """Return times per token of both sides, and what operations would make of them."""
    strides = {entry["stride"]["tokens"] for entry in measured if "stride" in entry}
    head = ["length", "vanilla ms", "ours ms", "slowdown", "min–max", "paper", "vanilla GFLOP", "ours MFLOP", "ratio"]
    rows = [[*head, *(f"every {stride}: ms" for stride in strides), *("slowdown" for _ in strides)]]
    for entry in measured:
        slowdown, published = entry["slowdown"], entry["published_slowdown"]
        strided = [entry["stride"]] if "stride" in entry else []
        rows.append(
            [
                f"{entry['length']:,}",
                _digits(entry["vanilla_seconds"]["median"], 1e-3),
                _digits(entry["our_seconds"]["median"], 1e-3),
                _digits(slowdown["median"]),
                f"{_digits(slowdown['min'])}–{_digits(slowdown['max'])}",
                "-" if published is None else f"{published:,}",
                _digits(entry["vanilla_flops"], 1e9),
                _digits(entry["our_flops"], 1e6),
                _digits(entry["flops_ratio"]),
                *(_digits(s["vanilla_seconds"]["median"], 1e-3) for s in strided),
                *(_digits(s["slowdown"]["median"]) for s in strided),
            ]
        )
    rounds = sorted({entry["rounds"] for entry in measured})
    return "\n".join(
        [
            table(rows, n_left=0),
            f"Per predicted token; medians of {'–'.join(map(str, rounds))} rounds, of times and of each round's slowdown. "
            "paper: arXiv 1901.02860, table 9, on a GPU.",
            "FLOP: operations that a token needs, keys that it may not see left out; ratio: vanilla's to ours.",
        ]
    )


def draw_rereading(path: Path, measured: Sequence[Figures], *, title: str, machine: str) -> None:
    """Draw how many times longer the vanilla model takes against the attention length: measured, counted, published.

    Args:
        path: of the picture; its ending says of what kind.
        measured: one point each.
        title: above it.
        machine: on what it was measured.

    Raises:
        CheckpointError: the file cannot be written.
    """
    figure = new_figure()
    axes = figure.add_subplot()
    lengths = [entry["length"] for entry in measured]
    spread = [entry["slowdown"] for entry in measured]
    medians = [s["median"] for s in spread]
    errors = [[s["median"] - s["min"] for s in spread], [s["max"] - s["median"] for s in spread]]
    axes.errorbar(lengths, medians, yerr=errors, marker="o", capsize=3, label="measured here (min–max)")
    axes.plot(lengths, [entry["flops_ratio"] for entry in measured], "--", color="gray", label="operations")
    published = [(entry["length"], entry["published_slowdown"]) for entry in measured if entry["published_slowdown"]]
    if published:
        axes.plot(*zip(*published, strict=True), "ks", label="the paper's table 9")
    strided = [entry["stride"] for entry in measured if "stride" in entry]
    if strided:
        label = f"vanilla, {strided[0]['tokens']} tokens at a time"
        axes.plot(lengths, [s["slowdown"]["median"] for s in strided], marker="o", label=label)
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.set(xlabel=f"attention length\n{machine}", ylabel="vanilla time / ours, per token", title=title)
    axes.legend(frameon=False)
    save_picture(figure, path)


def draw(path: Path, measured: Sequence[Figures], *, title: str, machine: str) -> None:
    """Draw the tokens per second of decoders as bars, and the limit of each as a mark.

    Args:
        path: of the picture; its ending says of what kind.
        measured: one bar each.
        title: above it.
        machine: on what it was measured.

    Raises:
        CheckpointError: the file cannot be written.
    """
    names, places = [mode_name(entry) for entry in measured], range(len(measured))
    figure = new_figure(height=1.6 + 0.4 * len(measured))
    axes = figure.add_subplot()
    colors = ["tab:blue" if entry["compiled"] else "tab:gray" for entry in measured]
    bars = axes.barh(places, [entry["tokens_per_second"] for entry in measured], color=colors)
    axes.bar_label(bars, [_digits(entry["tokens_per_second"]) for entry in measured], padding=6)
    limits = [(entry["rows"] / entry["limit_seconds"], i) for i, entry in enumerate(measured) if entry["limit_seconds"]]
    if limits:
        axes.plot(*zip(*limits, strict=True), "k|", markersize=14, label="limit: memory cannot be read faster")
        figure.legend(loc="outside lower right", frameon=False)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel=f"tokens per second, all rows together\n{machine}", title=title)
    save_picture(figure, path)


def _digits(value: float | None, unit: float = 1.0) -> str:
    """Return a figure with three digits at least, or a dash."""
    if value is None:
        return "-"
    value /= unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
