"""How long a training step takes, and how much memory: ours against Hugging Face's Transformer-XL, same weights, and a Llama.

A step is forward, backward and clearing the gradients, with dropout and a full memory; no optimizer. Five processes, the
peer's in fp32, ours and a Llama's in fp32 and in the precision that `auto` chooses, take turns, step by step, while the others
sleep. Before that, losses and gradients of ours are compared with the peer's; in fp32 they must agree, or nothing is timed.
The Llama (`common/llama.py`) is another model of these sizes: as many tokens, in rows of T + M, so contexts are equal.
"""

import argparse
import random
from collections.abc import Iterator
from typing import Any

from common.harness import command, parse, run
from common.shapes import TRAINING_SHAPES, TrainingShape, shapes_of
from common.steps import Batch, compare_steps

COMMANDS = {
    "peer": ("peer.py", "train"),
    "ours fp32": ("ours.py", "train", "fp32"),
    "ours auto": ("ours.py", "train", "auto"),
    "Llama fp32": ("llama.py", "train", "fp32"),
    "Llama auto": ("llama.py", "train", "auto"),
}


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure one shape."""
    shape = TRAINING_SHAPES[name]
    return compare_steps(
        f"shape {name}",
        {f"shape {name}": str(shape)},
        COMMANDS,
        options,
        config=shape.sizes.values(),
        batches=random_batches(shape),
        n_compared=3,
        failure_of=("peer", "bf16_failure"),
        speed_targets={"ours fp32": shape.fp32_target, "ours auto": shape.auto_target},
        memory_target=0.6,
    )


def random_batches(shape: TrainingShape) -> Iterator[Batch]:
    """Yield batches of random token ids, the same ones in every run."""
    generator = random.Random(0)
    while True:
        rows = [generator.choices(range(shape.sizes.vocab_size), k=shape.tgt_len) for _ in range(shape.batch_size)]
        yield {"ids": rows}


if __name__ == "__main__":
    parser = command(__doc__, repeats=9, peer=True)
    parser.add_argument("--shape", choices=[*TRAINING_SHAPES, "all"], default="all", help="E and S are docs/results.md's")
    options = parse(parser)
    run(options, compare, shapes_of(options, TRAINING_SHAPES))
