"""`txl bench eval-speed`: how much time a memory saves, compared with a vanilla Transformer."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.bench import check_fp16
from transformer_xl.cli.options import Flag, FloatPrecision, Json, Overrides, check_least, numbers_of
from transformer_xl.console import progress
from transformer_xl.errors import ConfigError, room_for
from transformer_xl.pictures import check_picture

if TYPE_CHECKING:
    from transformer_xl.config import RunConfig
    from transformer_xl.model_config import TransformerXLConfig


def eval_speed(
    recipe: str = "enwik8-base",
    /,
    *,
    lengths: str = "800,1800,2800,3800",
    tgt_len: int = 256,
    stride: int | None = None,
    repeats: int = 3,
    precision: FloatPrecision = "auto",
    set_: Overrides = None,
    plot: Path | None = None,
    device: str = "auto",
    cpu_time: Flag = False,
    json_: Json = False,
) -> None:
    """Measure how much longer a vanilla Transformer, which reads its whole context anew, takes per token (the paper's table 9).

    Both have the recipe's sizes, random weights, and the same context.
    Ctrl-C stops and prints what was measured so far. Other programs on the
    same cores distort the times, less so with --cpu-time.

    Common uses:
        txl bench eval-speed
        txl bench eval-speed --stride 64 --plot speed.png
        txl bench eval-speed wt103-base --lengths 640,1600 --json
        txl bench eval-speed --set eval.clamp_len=none

    Args:
        recipe: of the model: a name (txl recipes) or a TOML file. eval.clamp_len counts, other lengths do not.
        lengths: positions that a token sees, itself among them, with commas between.
        tgt_len: tokens per segment of Transformer-XL.
        stride: also measure the vanilla model predicting this many tokens at a time, the first of them with less context.
        repeats: rounds; the two sides take turns in each.
        precision: of both: fp32, bf16, fp16, or auto for what the processor does fast.
        set_: section.key=value, overrides the recipe; may be repeated.
        plot: draw the ratios into this file, such as speed.png.
        device: auto, cpu, cuda, cuda:N or mps.
        cpu_time: count processor seconds, all threads together, instead of elapsed ones: for a CPU that others use.
        json_: print one JSON object.
    """
    numbers = sorted(numbers_of("lengths", lengths))
    check_least({"tgt-len": (tgt_len, 1), "stride": (stride, 1), "repeats": (repeats, 1)})
    check_picture(plot)
    from transformer_xl.config import load_recipe

    config = load_recipe(recipe, set_ or [])
    from transformer_xl.cost.display import draw_eval_speed, eval_speed_table, processor_and_threads
    from transformer_xl.cost.eval_speed import Times, count_parameters, eval_speed_figures, make_sides, run
    from transformer_xl.cost.hardware import describe
    from transformer_xl.model.precision import choose_device, choose_precision
    from transformer_xl.process import keep_freed_memory

    model, ids = _model_and_text(config)
    place = choose_device(device)
    chosen, _ = choose_precision(precision, place)
    check_fp16([chosen], place)
    if cpu_time and place.type != "cpu":
        raise ConfigError(f"--cpu-time counts what a processor does, and device {place.type} does the work here; leave it out")
    machine = describe(place)  # before this program adds to the load
    keep_freed_memory()  # as txl eval does
    clamp_len = config.eval.clamp_len
    room = f"an attention length of {numbers[-1]:,} and segments of {tgt_len:,} tokens", "lower --lengths or --tgt-len"
    with room_for(*room):
        sides = make_sides(
            model, ids, lengths=numbers, precision=chosen, tgt_len=tgt_len, stride=stride, clamp_len=clamp_len, device=place
        )
    times, interrupted = [Times(length) for length in numbers], False
    with progress(total=repeats * len(numbers), unit=None) as bar, room_for(*room):
        try:
            clock = time.process_time if cpu_time else time.perf_counter
            run(sides, times, n_round=repeats, clock=clock, report=bar.next)
        except KeyboardInterrupt:
            interrupted = True
    figures = [eval_speed_figures(entry, sides) for entry in times if entry.ours]
    if not figures:
        raise KeyboardInterrupt
    parameters = count_parameters(sides, max_len=config.train.tgt_len)
    facts: dict[str, Any] = {
        "recipe": config.name,
        "parameters": parameters,
        "precision": chosen,
        "tgt_len": tgt_len,
        "clamp_len": clamp_len,
        "cpu_time": cpu_time,
        "machine": machine,
    }
    if plot:
        where = f"{processor_and_threads(machine)}, {chosen}"
        draw_eval_speed(plot, figures, title=f"a token of a vanilla Transformer, against {config.name}", machine=where)
    if json_:
        print(json.dumps(facts | {"figures": figures, "interrupted": interrupted}))
    else:
        print(f"{_describe(config, facts)}\n\n{eval_speed_table(figures)}")
    if interrupted:
        raise KeyboardInterrupt


def _model_and_text(config: "RunConfig") -> "tuple[TransformerXLConfig, Any]":
    """Return the settings of our model, and tokens as frequent as words in a text."""
    import numpy as np

    from transformer_xl.cost.work import with_vocabulary

    if not config.model.keeps_keys:
        raise ConfigError(
            f"recipe '{config.name}' ({config.model.reads_by}) keeps no keys in a memory; give one that does, such as "
            "enwik8-base; the vanilla model takes its sizes"
        )
    model, _ = with_vocabulary(config)
    ranks = np.exp(np.random.default_rng(0).random(1 << 16) * np.log(model.vocab_size or 1))  # Zipf's law
    return model, ranks.astype(np.int64) - 1


def _describe(config: "RunConfig", facts: dict[str, Any]) -> str:
    """Return a few lines on the models and the machine."""
    from transformer_xl.cost.display import machine_line

    ours, whole, positions = (facts["parameters"][name] for name in ("ours", "vanilla", "vanilla_positions"))
    with_table, without = (f"{n:,} ({n / ours - 1:+.1%})" for n in (whole, whole - positions))
    clamp_len = f"distances beyond {facts['clamp_len']} alike" if facts["clamp_len"] else "all distances told apart"
    return (
        f"{config.name}: {ours:,} parameters; vanilla of the same sizes {with_table} with learned positions for the training's "
        f"{config.train.tgt_len:,}, {without} without\n"
        f"ours reads segments of {facts['tgt_len']:,} with kept keys and values, {clamp_len}; "
        f"vanilla a whole context for every token; both {facts['precision']}, one row"
        f"{'; seconds of the processor' if facts['cpu_time'] else ''}\n"
        f"{machine_line(facts['machine'])}"
    )
