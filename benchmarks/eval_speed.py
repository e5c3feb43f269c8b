"""How much longer a vanilla Transformer takes to score a token than ours: the paper's table 9 (arXiv 1901.02860).

Both have the sizes of a recipe and random weights, and a token sees L positions, itself among them:

    vanilla   slides a window of L tokens over the text, and predicts the one that follows it (with a stride of S the last S)
    ours      reads a segment after a memory of L positions whose keys and values are kept, and predicts all its tokens

The two take turns at all lengths, round by round, so that what slows the machine slows all.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common.harness import command, parse, ratios, run, take_turns
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.config.model import TransformerXLConfig, VanillaConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.console import table
from transformer_xl.inference.reader import Reader
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.pictures import new_figure, save_picture
from transformer_xl.tools.flops import blueprint_of
from transformer_xl.tools.plan import with_vocabulary

PUBLISHED = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""How many times longer the vanilla model takes for a token, by attention length, on the authors' GPU."""
N_SEGMENT = 2
"""Segments of ours that a round times, after one that brings its data back into the caches."""


@torch.no_grad()
def measure(recipe: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a recipe's sizes at all lengths, print a table, and return all figures."""
    torch.manual_seed(0)
    config = load_recipe(recipe)
    sizes = cast(TransformerXLConfig, with_vocabulary(config)[0])
    ours = TransformerXL(sizes).eval().with_context(clamp_len=config.eval.clamp_len)
    shared = sizes.model_dump(include=VanillaConfig.model_fields.keys() - {"mem_len", "max_len"})
    vanilla = Vanilla(VanillaConfig(**shared, max_len=max(options.lengths))).eval()
    ids = torch.randint(sizes.vocab_size or 1, (max(*options.lengths, options.tgt_len) + 1,))
    turns: dict[str, Callable[[int], float]] = {}
    for length in options.lengths:
        turns[f"{length} vanilla"] = window(vanilla, ids[-length - 1 :], n_scored=1)
        turns[f"{length} strided"] = window(vanilla, ids[-length - 1 :], n_scored=options.stride)
        turns[f"{length} ours"] = segment(with_length(ours, length), ids[-options.tgt_len - 1 :])
    rounds = take_turns(turns, options.repeats, "seconds a token:")
    seconds = {length: {way: rounds[f"{length} {way}"] for way in ("vanilla", "strided", "ours")} for length in options.lengths}
    figures = [figures_of(length, own, ours, vanilla, options) for length, own in seconds.items()]
    print("\n" + table([list(figures[0]), *([shown(value) for value in row.values()] for row in figures)], n_left=0))
    if options.plot:
        draw(options.plot, figures, title=f"a token of a vanilla Transformer, against {recipe}")
    return {"figures": figures, "seconds": seconds}


def with_length(model: TransformerXL, length: int) -> TransformerXL:
    """Return a view of the model whose tokens see `length` positions each, themselves among them."""
    return model.with_context(mem_len=max(length - model.config.same_length_besides_self, 1), same_length=True)


def window(model: Vanilla, ids: Tensor, *, n_scored: int) -> Callable[[int], float]:
    """Return what reads a window (L + 1,) anew and gives the seconds per token scored at its end."""

    def turn(_: int) -> float:
        begin = time.perf_counter()
        h_BTD = model.read(ids[None, :-1])[0]
        model.softmax.nll(h_BTD[:, -n_scored:], ids[None, -n_scored:], model.embedding)
        return (time.perf_counter() - begin) / n_scored

    return turn


def segment(model: TransformerXL, ids: Tensor) -> Callable[[int], float]:
    """Return what reads segments (T + 1,) after a full memory and gives the seconds per token."""
    reader, empty = Reader(model, tgt_len=len(ids) - 1, precision="fp32"), model.init_mems(1)
    hidden = tuple(map(torch.randn_like, empty.hidden))
    memory = reader.from_mems(replace(empty, hidden=hidden, n_valid=torch.full_like(empty.n_valid, model.mem_len)))

    def read() -> None:
        reader.softmax.nll(reader.read(ids[None, :-1], memory).flatten(0, 1), ids[1:])

    def turn(_: int) -> float:
        read()
        begin = time.perf_counter()
        for _ in range(N_SEGMENT):
            read()
        return (time.perf_counter() - begin) / (N_SEGMENT * (len(ids) - 1))

    return turn


def operations(model: LanguageModel, n_token: int, n_scored: int) -> int:
    """Count the operations of reading tokens after a full memory, and of the scores of the last ones, without numbers."""
    with FlopCounterMode(display=False) as counter:
        ids = torch.zeros(1, n_token, dtype=torch.int64, device="meta")
        h_BTD, _ = model.read(ids, mems=model.init_mems(1))
        model.softmax.logits(h_BTD[:, -n_scored:], model.embedding)
    return counter.get_total_flops()


def figures_of(
    length: int,
    seconds: dict[str, list[float]],
    ours: TransformerXL,
    vanilla: Vanilla,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return a row of the table; times are medians, and a slowdown is that of each round."""
    slowdowns = ratios(seconds["vanilla"], seconds["ours"])
    needed = operations(with_length(cast(TransformerXL, blueprint_of(ours.config)), length), options.tgt_len, options.tgt_len)
    return {
        "length": length,
        "vanilla ms": 1000 * statistics.median(seconds["vanilla"]),
        "ours ms": 1000 * statistics.median(seconds["ours"]),
        "slowdown": statistics.median(slowdowns),
        "min": min(slowdowns),
        "max": max(slowdowns),
        "paper": PUBLISHED.get(length),
        "operations": operations(blueprint_of(vanilla.config), length, 1) / (needed / options.tgt_len),
        f"every {options.stride}": statistics.median(seconds["strided"]) / statistics.median(seconds["ours"]),
    }


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(path: Path, figures: list[dict[str, Any]], *, title: str) -> None:
    """Draw by attention length how many times longer the vanilla model takes: measured, counted and published."""
    figure = new_figure()
    axes = figure.add_subplot()
    lengths, medians = ([row[name] for row in figures] for name in ("length", "slowdown"))
    spread = [[row["slowdown"] - row["min"] for row in figures], [row["max"] - row["slowdown"] for row in figures]]
    axes.errorbar(lengths, medians, yerr=spread, marker="o", capsize=3, label="measured (min–max)")
    axes.plot(lengths, [row["operations"] for row in figures], "--", color="gray", label="operations")
    axes.plot(lengths, [row["paper"] for row in figures], "ks", label="the paper's table 9")
    axes.set_yscale("log")
    axes.set(xlabel="attention length", ylabel="vanilla time / ours, per token", title=title)
    axes.legend(frameon=False)
    save_picture(figure, path)


if __name__ == "__main__":
    parser = command(__doc__, repeats=3)
    parser.add_argument("--recipe", default="enwik8-base", help="whose sizes both have (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(PUBLISHED), help="positions that a token sees")
    parser.add_argument("--tgt-len", type=int, default=256, help="tokens of a segment of ours (default: %(default)s)")
    parser.add_argument("--stride", type=int, default=64, help="tokens of vanilla's second way (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file")
    options = parse(parser)
    if options.stride > min(options.lengths):
        parser.error("--stride must be at most the least of --lengths")
    run(options, measure, [options.recipe], model=options.recipe, precision="fp32")
