"""How long it takes to score a long text segment by segment: ours against Hugging Face's Transformer-XL, same weights, one run.

Both read the same random tokens with a full memory, and score every token. Three processes, the peer's in fp32, ours in fp32
and ours in the precision that `auto` chooses, take turns, a few segments each, while the others sleep. Before that, the nats of
every segment of a stream longer than the memory are compared; in fp32 they must agree, or nothing is timed.

Of each turn the first segment is left out: with ours, a turn is a call of `evaluate`, which prepares weights and positions
before it. A text of thousands of segments makes up for that; what it takes is shown apart.
"""

import argparse
import contextlib
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.reading_shapes import READING_SHAPES
from common.report import facts
from common.sides import Sides, at_least, checked, random_ids, ratios, reading_options, run, spread
from common.wire import Remote, WorkerError

from transformer_xl.console import say, table

TOLERANCE = 1e-4
N_BEYOND = 4
"""Segments compared beyond those that fill the memory."""


def parse_arguments() -> argparse.Namespace:
    parser = reading_options(__doc__, repeats=5)
    parser.add_argument("--segments", type=int, default=9, help="per turn, the first not counted (default: %(default)s)")
    options = checked(parser)
    if options.segments < 2:
        parser.error(f"--segments ({options.segments}) must be at least 2: the first is not counted")
    return options


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure one shape, print tables, and return all figures."""
    shape = READING_SHAPES[name]
    with contextlib.ExitStack() as stack:
        sides = Sides(name, options, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        say(f"shape {name}: building")
        workers = {"peer": stack.enter_context(sides.peer())}  # first: it writes the weights that the others read
        workers |= {f"ours {precision}": stack.enter_context(sides.ours(precision)) for precision in ("fp32", "auto")}
        versions = {who: worker.ask("versions") for who, worker in workers.items()}
        n_compared = -(-shape.mem_len // shape.tgt_len) + N_BEYOND
        parity = check_parity(workers, random_ids(n_compared * shape.tgt_len + 1, shape.vocab_size, seed=0), shape.tgt_len)
        turns = take_turns(workers, random_ids(options.segments * shape.tgt_len + 1, shape.vocab_size, seed=1), options.repeats)
    result = {"shape": asdict(shape), "versions": versions, "parity": parity, "seconds": turns}
    print(summary(name, result, options))
    return result


def check_parity(workers: dict[str, Remote], ids: list[int], tgt_len: int) -> dict[str, dict[str, float]]:
    """Compare the nats per token of every segment, and of the whole stream, with the peer's.

    Raises:
        WorkerError: ours in fp32 computes something else.
    """
    nats = {}
    for who, worker in workers.items():
        say(f"{who} scores {len(ids) - 1:,} tokens")
        nats[who] = [segment / tgt_len for segment in worker.ask("score", ids=ids)["nats"]]
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


def take_turns(workers: dict[str, Remote], ids: list[int], repeats: int) -> dict[str, list[list[float]]]:
    """Let each score the same segments in turn, once uncounted, and return the seconds of each segment of each round."""
    seconds: dict[str, list[list[float]]] = {who: [] for who in workers}
    for i in range(repeats + 1):
        for who, worker in workers.items():
            seconds[who].append(worker.ask("score", ids=ids)["seconds"])
        times = ", ".join(f"{who} {statistics.fmean(rounds[-1][1:]):.3f} s" for who, rounds in seconds.items())
        say(f"round {i} of {repeats}, per segment: {times}" if i else f"warming up, per segment: {times}")
    return {who: rounds[1:] for who, rounds in seconds.items()}


def summary(name: str, result: dict[str, Any], options: argparse.Namespace) -> str:
    """Lay out what was measured at one shape."""
    shape, targets = READING_SHAPES[name], READING_SHAPES[name].targets
    header = ["", "median s", "min-max s", "times faster", "min-max", "target", "tokens/s", "preparing s"]
    rows = [
        time_row(who, result["seconds"], target, shape.tgt_len)
        for who, target in {"peer": None, "ours fp32": targets.evaluate_fp32, "ours auto": targets.evaluate_auto}.items()
    ]
    return f"\n{facts(context(name, result, options))}\n\n{table([header, *rows])}"


def context(name: str, result: dict[str, Any], options: argparse.Namespace) -> dict[str, str]:
    """Say what was compared, and that it is comparable."""
    shape, peer, ours = READING_SHAPES[name], result["versions"]["peer"], result["versions"]["ours auto"]
    return {
        f"shape {name}": f"{shape}, B=1 T={shape.tgt_len}",
        "threads": str(options.threads),
        "peer": "{name}, torch {torch}, Python {python}, fp32".format(**peer),
        "ours": "{name}, torch {torch}, Python {python}".format(**ours),
        "auto": ours["auto"],
        "seconds": f"per segment; mean of {options.segments - 1} in a turn, without the first; turns alternate",
        **{
            f"parity {who.removeprefix('ours ')}": f"nats per token differ by {found['nats']:.1e}, "
            f"in the worst segment by {found['segment']:.1e}"
            for who, found in result["parity"].items()
        },
    }


def time_row(who: str, seconds: dict[str, list[list[float]]], target: float | None, tgt_len: int) -> list[str]:
    own, peer = ([statistics.fmean(segments[1:]) for segments in seconds[name]] for name in (who, "peer"))
    preparing = [max(0.0, first - statistics.fmean(others)) for first, *others in seconds[who]]
    return [
        who,
        *spread(own, 3),
        *spread(ratios(peer, own)),
        at_least(target),
        f"{tgt_len / statistics.median(own):,.0f}",
        "" if who == "peer" else f"{statistics.median(preparing):.3f}",
    ]


if __name__ == "__main__":
    run(compare, parse_arguments())
