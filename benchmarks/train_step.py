"""How long a training step takes, and how much memory: ours against Hugging Face's Transformer-XL, same weights, and a Llama.

A step is forward, backward and clearing the gradients, with dropout and a full memory; no optimizer. Five processes, the
peer's in fp32, ours and a Llama's in fp32 and in the precision that `auto` chooses, take turns, step by step, while the others
sleep. Before that, losses and gradients of ours are compared with the peer's; in fp32 they must agree, or nothing is timed.
The Llama (`common/llama.py`) is another model of these sizes: as many tokens, in rows of T + M, so contexts are equal.
"""

import argparse
import contextlib
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.report import facts
from common.shapes import SHAPES, Shape
from common.sides import at_least, checked, peer_options, ratios, run, spread
from common.wire import Remote, WorkerError

from transformer_xl.console import say, table

HERE = Path(__file__).parent
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-2
MEMORY_TARGET = 0.6
LLAMA_TARGET = 1.2
N_COMPARED = 3
N_WARM_UP = 3

Segment = list[list[int]]


def parse_arguments() -> argparse.Namespace:
    parser = peer_options(__doc__, repeats=9)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all", help="E and S are those of docs/results.md")
    return checked(parser)


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure one shape, print a table, and return all figures."""
    shape = SHAPES[name]
    segments = random_segments(shape)
    environment = {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    commands = {
        "peer": [str(options.peer_python), "-W", "ignore", str(HERE / "common" / "peer.py")],
        "ours fp32": [sys.executable, str(HERE / "common" / "ours.py"), "fp32"],
        "ours auto": [sys.executable, str(HERE / "common" / "ours.py"), "auto"],
        "Llama fp32": [sys.executable, str(HERE / "common" / "llama.py"), "train", "fp32"],
        "Llama auto": [sys.executable, str(HERE / "common" / "llama.py"), "train", "auto"],
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        say(f"shape {name}: building")
        workers = {who: stack.enter_context(Remote(who, command, environment)) for who, command in commands.items()}
        versions = {who: worker.ask("versions") for who, worker in workers.items()}
        for worker in workers.values():  # the peer comes first: it writes the weights that the others read
            worker.ask("build", shape=name, weights=str(Path(folder, "weights.safetensors")), n_threads=options.threads)
        parity = check_parity(workers, list(itertools.islice(segments, N_COMPARED)), Path(folder, "gradients.safetensors"))
        seconds = time_steps(workers, segments, options.repeats)
        memory = {who: worker.ask("memory") for who, worker in workers.items()}
        failure = workers["peer"].ask("bf16_failure", segment=next(segments))
    result = {
        "shape": asdict(shape),
        "versions": versions,
        "parity": parity,
        "seconds": seconds,
        "memory_mb": memory,
        "peer_bf16": failure or "works",
    }
    print(summary(name, result, options))
    return result


def random_segments(shape: Shape) -> Iterator[Segment]:
    """Yield batches of random token ids, the same ones in every run."""
    generator = random.Random(0)
    while True:
        yield [generator.choices(range(shape.vocab_size), k=shape.tgt_len) for _ in range(shape.batch_size)]


def check_parity(workers: dict[str, Remote], segments: list[Segment], gradients: Path) -> dict[str, dict[str, float]]:
    """Compare losses and gradients with the peer's, without dropout.

    Raises:
        WorkerError: ours in fp32 computes something else.
    """
    say("comparing losses and gradients")
    compared = {who: worker for who, worker in workers.items() if not who.startswith("Llama")}
    losses = {who: worker.ask("read", segments=segments) for who, worker in compared.items()}
    workers["peer"].ask("write_gradients", path=str(gradients))
    parity = {
        who: {
            "loss": max(abs(a - b) for a, b in zip(losses[who], losses["peer"], strict=True)),
            "gradient": worker.ask("gradient_difference", path=str(gradients)),
        }
        for who, worker in compared.items()
        if who != "peer"
    }
    found = parity["ours fp32"]
    if not (found["loss"] <= LOSS_TOLERANCE and found["gradient"] <= GRADIENT_TOLERANCE):
        raise WorkerError(f"ours in fp32 is not the peer's model: {found}; nothing was timed")
    return parity


def time_steps(workers: dict[str, Remote], segments: Iterator[Segment], repeats: int) -> dict[str, list[float]]:
    """Run steps in turns, after warming up, and return the seconds of each."""
    first = list(itertools.islice(segments, N_WARM_UP))
    for who, worker in workers.items():
        say(f"warming up {who}")
        worker.ask("start", segments=first, seed=0)
    seconds: dict[str, list[float]] = {who: [] for who in workers}
    for i, segment in enumerate(itertools.islice(segments, repeats)):
        for who, worker in workers.items():
            seconds[who].append(worker.ask("step", segment=segment))
        say(f"step {i + 1} of {repeats}: " + ", ".join(f"{who} {times[-1]:.3f} s" for who, times in seconds.items()))
    return seconds


def summary(name: str, result: dict[str, Any], options: argparse.Namespace) -> str:
    """Lay out what was measured at one shape."""
    shape, seconds, memory = SHAPES[name], result["seconds"], result["memory_mb"]
    targets = {"ours fp32": shape.fp32_target, "ours auto": shape.auto_target}
    head = ["", "median s", "min-max s", "times faster", "min-max", "target", "of Llama's", "min-max", "target"]
    times = table([head, *[time_row(who, seconds, targets.get(who)) for who in seconds]])
    head = ["", "peak MB", "of the peer's", "target", "above idle MB", "of the peer's"]
    megabytes = table([head, *[memory_row(who, memory) for who in memory]])
    return f"\n{facts(context(name, result, options))}\n\n{times}\n\n{megabytes}"


def context(name: str, result: dict[str, Any], options: argparse.Namespace) -> dict[str, str]:
    """Say what was compared, and that it is comparable."""
    peer, auto = result["versions"]["peer"], result["versions"]["ours auto"]
    return {
        f"shape {name}": str(SHAPES[name]),
        "threads": str(options.threads),
        "peer": "transformers {transformers} TransfoXLLMHeadModel, torch {torch}, Python {python}, fp32".format(**peer),
        "ours": "transformer_xl {transformer_xl}, torch {torch}, Python {python}".format(**auto),
        "auto": f"{auto['precision']}: {auto['reason']}",
        "Llama": "{name}, torch {torch}".format(**result["versions"]["Llama fp32"]),
        "peer in bf16": f"autocast, not timed: {result['peer_bf16']}",
        "step": "forward, backward, gradients cleared; no optimizer; memory full; steps alternate",
        **{
            f"parity {who.removeprefix('ours ')}": f"loss differs by {found['loss']:.1e} nats, "
            f"gradients by {found['gradient']:.1e} of their norm"
            for who, found in result["parity"].items()
        },
    }


def time_row(who: str, seconds: dict[str, list[float]], target: float | None) -> list[str]:
    row = [who, *spread(seconds[who], 3), *spread(ratios(seconds["peer"], seconds[who])), at_least(target)]
    if who.startswith("ours"):
        row += [*spread(ratios(seconds[who], seconds[who.replace("ours", "Llama")])), f"<= {LLAMA_TARGET:g}"]
    return row + [""] * (9 - len(row))


def memory_row(who: str, memory: dict[str, dict[str, float]]) -> list[str]:
    own, peer = memory[who], memory["peer"]
    above, peer_above = own["peak"] - own["idle"], peer["peak"] - peer["idle"]
    return [
        who,
        f"{own['peak']:,.0f}",
        f"{own['peak'] / peer['peak']:.2f}",
        f"<= {MEMORY_TARGET:g}" if who.startswith("ours") else "",
        f"{above:,.0f}",
        f"{above / peer_above:.2f}",
    ]


if __name__ == "__main__":
    run(compare, parse_arguments(), SHAPES)
