"""How long an XLNet takes, and how much memory: ours against Hugging Face's, same weights, one run.

Three parts: a pretraining step with both streams and memory, a step of fine-tuning with the content stream alone, and reading a
document of 4,096 pieces without gradients. A step is forward, backward and clearing the gradients, with dropout; no optimizer.
Processes, one for each side and part, take turns, step by step, while the others sleep. Before that, losses and gradients of
ours are compared with the peer's; in fp32 they must agree, or nothing is timed.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.machine import describe
from common.report import facts
from common.sides import checked, peer_options
from common.wire import Remote, WorkerError
from common.xlnet_shapes import PARTS, XLNET_SHAPES, XLNetShape

from transformer_xl.console import say, table

HERE = Path(__file__).parent
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-2
SPEED_TARGETS = {"pretrain": {"ours fp32": 2.0, "ours auto": 6.0}, "finetune": {"ours fp32": 1.3, "ours auto": 4.0}}
MEMORY_TARGET = 0.7
N_COMPARED = 2


def main() -> None:
    options = parse_arguments()
    shape, machine = XLNET_SHAPES[options.shape], describe()
    print(facts({**machine, "threads": str(options.threads), f"shape {options.shape}": str(shape)}))
    try:
        parts = {part: compare(part, options) for part in options.parts}
    except WorkerError as error:
        sys.exit(f"error: {error}")
    if options.json:
        found = {"machine": machine, "threads": options.threads, "shape": asdict(shape), "parts": parts}
        options.json.write_text(json.dumps(found, indent=2))


def parse_arguments() -> argparse.Namespace:
    parser = peer_options(__doc__, repeats=5)
    parser.add_argument("--shape", choices=XLNET_SHAPES, default="base", help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    return checked(parser)


def compare(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure one part, print a table, and return all figures."""
    environment = {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    peer = [str(options.peer_python), "-W", "ignore", str(HERE / "common" / "xlnet_peer.py")]
    ours = [sys.executable, str(HERE / "common" / "xlnet_ours.py")]
    commands = {
        "peer": [*peer, "fp32"],
        "peer bf16": [*peer, "bf16"],
        "ours fp32": [*ours, "fp32"],
        "ours auto": [*ours, "auto"],
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        say(f"{part}: building")
        sides = {who: stack.enter_context(Remote(who, command, environment)) for who, command in commands.items()}
        versions = {who: side.ask("versions") for who, side in sides.items()}
        weights = str(Path(folder, "weights.safetensors"))
        for side in sides.values():  # the peer comes first: it writes the weights that the others read
            side.ask("build", shape=options.shape, part=part, weights=weights, n_threads=options.threads)
        failure = sides["peer bf16"].ask("failure")
        if failure:
            del sides["peer bf16"]
        parity = {} if part == "document" else check_parity(sides, Path(folder, "gradients.safetensors"))
        seconds = time_steps(part, sides, options.repeats)
        memory = {who: side.ask("memory") for who, side in sides.items()}
    result = {
        "versions": versions,
        "peer_bf16": failure or "works",
        "parity": parity,
        "seconds": seconds,
        "memory_mb": memory,
    }
    print(summary(part, result, XLNET_SHAPES[options.shape]))
    return result


def check_parity(sides: dict[str, Remote], gradients: Path) -> dict[str, dict[str, float]]:
    """Compare losses and gradients with the peer's, without dropout.

    Raises:
        WorkerError: ours in fp32 computes something else.
    """
    say("comparing losses and gradients")
    own = {who: side for who, side in sides.items() if who.startswith("ours")}
    seeds = list(range(N_COMPARED))
    losses = {who: side.ask("read", seeds=seeds) for who, side in {"peer": sides["peer"], **own}.items()}
    sides["peer"].ask("write_gradients", path=str(gradients))
    parity = {
        who: {
            "loss": max(abs(a - b) for a, b in zip(losses[who], losses["peer"], strict=True)),
            "gradient": side.ask("gradient_difference", path=str(gradients)),
        }
        for who, side in own.items()
    }
    found = parity["ours fp32"]
    if not (found["loss"] <= LOSS_TOLERANCE and found["gradient"] <= GRADIENT_TOLERANCE):
        raise WorkerError(f"ours in fp32 is not the peer's model: {found}; nothing was timed")
    return parity


def time_steps(part: str, sides: dict[str, Remote], repeats: int) -> dict[str, list[float]]:
    """Take steps in turns, after warming up, and return the seconds of each."""
    for who, side in sides.items():
        say(f"{part}: warming up {who}")
        side.ask("start")
    seconds: dict[str, list[float]] = {who: [] for who in sides}
    for i in range(repeats):
        for who, side in sides.items():
            seconds[who].append(side.ask("step", seed=i))
        say(f"{part}, step {i + 1} of {repeats}: " + ", ".join(f"{who} {times[-1]:.3f} s" for who, times in seconds.items()))
    return seconds


def summary(part: str, result: dict[str, Any], shape: XLNetShape) -> str:
    """Lay out what was measured."""
    seconds, memory, versions = result["seconds"], result["memory_mb"], result["versions"]
    context = {
        part: f"{PARTS[part]}; {shape.described(part)}",
        "peer": "transformers {transformers} XLNetLMHeadModel, torch {torch}, Python {python}".format(**versions["peer"]),
        "peer in bf16": f"autocast: {result['peer_bf16']}",
        "ours": "transformer_xl {transformer_xl}, torch {torch}, Python {python}".format(**versions["ours auto"]),
        "auto": "{precision}: {reason}".format(**versions["ours auto"]),
        **{
            f"parity {who.removeprefix('ours ')}": f"loss differs by {found['loss']:.1e}, gradients by {found['gradient']:.1e}"
            for who, found in result["parity"].items()
        },
    }
    head = ["", "median s", "min-max s", "times faster", "min-max", "target", "peak MB", "of peer", "target", "above idle MB"]
    return f"\n{facts(context)}\n\n{table([head, *[row(part, who, seconds, memory) for who in seconds]])}"


def row(part: str, who: str, seconds: dict[str, list[float]], memory: dict[str, dict[str, float]]) -> list[str]:
    times, own = seconds[who], memory[who]
    # of the ratios of each round, in which the machine was about equally fast for all
    ratios = [peer / mine for peer, mine in zip(seconds["peer"], times, strict=True)]
    target = SPEED_TARGETS.get(part, {}).get(who)
    return [
        who,
        f"{statistics.median(times):.3f}",
        f"{min(times):.3f}-{max(times):.3f}",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
        f">= {target:g}" if target else "",
        f"{own['peak']:,.0f}",
        f"{own['peak'] / memory['peer']['peak']:.2f}",
        f"<= {MEMORY_TARGET:g}" if who.startswith("ours") else "",
        f"{own['peak'] - own['idle']:,.0f}",
    ]


if __name__ == "__main__":
    main()
