"""How long it takes to score a long text segment by segment: ours against Hugging Face's Transformer-XL, same weights, one run.

Both read the same random tokens with a full memory, and score every token. Three processes, the peer's in fp32, ours in fp32
and ours in the precision that `auto` chooses, take turns, a few segments each, while the others sleep. Before that, the nats of
every segment of a stream longer than the memory are compared; in fp32 they must agree, or nothing is timed.

Of each turn the first segment is left out: with ours, a turn is a call of `evaluate`, which prepares weights and positions
before it. A text of thousands of segments makes up for that; what it takes is shown apart.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from typing import Any

from common.harness import Sides, at_least, command, facts, parse, ratios, run, spread, take_turns
from common.shapes import READING_SHAPES, ReadingShape, shapes_of
from common.wire import Remote, WorkerError

from transformer_xl.console import say, table

TOLERANCE = 1e-4
N_BEYOND = 4
"""Segments compared beyond those that fill the memory."""
COMMANDS = {"peer": ("peer.py", "read"), "ours fp32": ("ours.py", "read", "fp32"), "ours auto": ("ours.py", "read", "auto")}


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure one shape, print tables, and return all figures."""
    shape = READING_SHAPES[name]
    with Sides(options) as processes:
        sides = {
            who: processes.enter_context(processes.start(who, *command, config=shape.sizes.values()))
            for who, command in COMMANDS.items()
        }
        versions = {who: side.ask("versions") for who, side in sides.items()}
        parity = check_parity(sides, shape)
        ids = random.Random(1).choices(range(shape.sizes.vocab_size), k=options.segments * shape.tgt_len + 1)
        preparing: dict[str, list[float]] = {who: [] for who in sides}

        def turn(who: str) -> float:
            first, *others = sides[who].ask("score", ids=ids, tgt_len=shape.tgt_len)["seconds"]
            mean = statistics.fmean(others)
            preparing[who].append(max(0.0, first - mean))
            return mean

        for who in sides:  # a turn that is not counted
            turn(who)
        turns: dict[str, Callable[[int], float]] = {who: lambda _, who=who: turn(who) for who in sides}
        seconds = take_turns(turns, options.repeats, f"shape {name}, seconds a segment:")
    about = {
        f"shape {name}": f"{shape.sizes}, B=1 T={shape.tgt_len}",
        **{who: "{name}, torch {torch}, {precision}".format(**said) for who, said in versions.items() if who != "ours fp32"},
        "seconds": f"per segment; mean of {options.segments - 1} in a turn, without the first; turns alternate",
        **{f"parity of {who}": "nats per token {nats:.1e}, in the worst segment {segment:.1e}".format(**found)
           for who, found in parity.items()},
    }  # fmt: skip
    rows = [["", "median s", "min-max s", "times faster", "min-max", "target", "tokens/s", "preparing s"]]
    for who, own in seconds.items():
        target, rate = shape.targets.get(who.replace("ours", "evaluate")), shape.tgt_len / statistics.median(own)
        prepared = "" if who == "peer" else f"{statistics.median(preparing[who][1:]):.3f}"
        faster = spread(ratios(seconds["peer"], own))
        rows.append([who, *spread(own, 3), *faster, at_least(target), f"{rate:,.0f}", prepared])
    print(f"\n{facts(about)}\n\n{table(rows)}")
    return {"versions": versions, "parity": parity, "seconds": seconds, "preparing": preparing}


def check_parity(sides: dict[str, Remote], shape: ReadingShape) -> dict[str, dict[str, float]]:
    """Compare the nats per token of every segment, and of the whole stream, with the peer's.

    Raises:
        WorkerError: ours in fp32 computes something else.
    """
    n_compared = -(-shape.sizes.mem_len // shape.tgt_len) + N_BEYOND
    ids = random.Random(0).choices(range(shape.sizes.vocab_size), k=n_compared * shape.tgt_len + 1)
    nats = {}
    for who, side in sides.items():
        say(f"{who} scores {len(ids) - 1:,} tokens")
        nats[who] = [segment / shape.tgt_len for segment in side.ask("score", ids=ids, tgt_len=shape.tgt_len)["nats"]]
    peer = nats.pop("peer")
    parity = {
        who: {
            "nats": abs(statistics.fmean(own) - statistics.fmean(peer)),
            "segment": max(abs(a - b) for a, b in zip(own, peer, strict=True)),
        }
        for who, own in nats.items()
    }
    if not parity["ours fp32"]["segment"] <= TOLERANCE:
        raise WorkerError(f"ours in fp32 is not the peer's model: {parity['ours fp32']}; nothing was timed")
    return parity


if __name__ == "__main__":
    parser = command(__doc__, repeats=5, peer=True)
    parser.add_argument("--shape", choices=[*READING_SHAPES, "all"], default="all", help="E and W are those of docs/results.md")
    parser.add_argument("--segments", type=int, default=9, help="per turn, the first not counted (default: %(default)s)")
    options = parse(parser)
    if options.segments < 2:
        parser.error(f"--segments ({options.segments}) must be at least 2: the first is not counted")
    run(options, compare, shapes_of(options, READING_SHAPES))
