"""How long a training step of an XLNet takes, and how much memory: ours against Hugging Face's, same weights, one run.

Two parts: a pretraining step with both streams and memory, and a step of fine-tuning with the content stream alone. A step is
forward, backward and clearing the gradients, with dropout; no optimizer. Processes, one for each side and part, take turns,
step by step, while the others sleep. Before that, losses and gradients of ours are compared with the peer's; in fp32 they must
agree, or nothing is timed.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.harness import command, parse, run
from common.steps import Batch, compare_steps

COMMANDS = {
    "peer": ("peer.py", "xlnet", "fp32"),
    "peer bf16": ("peer.py", "xlnet", "bf16"),
    "ours fp32": ("ours.py", "xlnet", "fp32"),
    "ours auto": ("ours.py", "xlnet", "auto"),
}
SPEED_TARGETS = {"pretrain": {"ours fp32": 2.0, "ours auto": 6.0}, "finetune": {"ours fp32": 1.3, "ours auto": 4.0}}


@dataclass(frozen=True)
class Shape:
    """A model, and what it reads in one step of each part.

    Attributes:
        rows: B of each part; an even number, because the peer reads half of pretraining's backward.
        lengths: T of each part.
        n_target: K of pretraining.
    """

    sizes: dict[str, int]
    rows: dict[str, int]
    lengths: dict[str, int]
    n_target: int

    def values(self, part: str) -> dict[str, Any]:
        """Return the settings as the peer names them."""
        fixed = {"ff_activation": "gelu_new", "dropout": 0.1, "bi_data": part == "pretrain"}  # the original's activation
        return {**self.sizes, **fixed}

    def batches(self, part: str) -> Iterator[Batch]:
        """Yield ids and texts (B, T), and for pretraining rank and sees (B, T) and targets (B, K), as `Order` has them."""
        generator, B, T = random.Random(0), self.rows[part], self.lengths[part]
        texts = [[int(t > T // 2) + int(t == T - 1) for t in range(T)] for _ in range(B)]
        while True:
            batch: Batch = {"ids": [generator.choices(range(self.sizes["vocab_size"]), k=T) for _ in range(B)], "texts": texts}
            if part == "pretrain":
                targets = [generator.sample(range(T), self.n_target) for _ in range(B)]
                place = [{t: i for i, t in enumerate(row)} for row in targets]
                batch["targets"] = targets
                batch["rank"] = [[row.get(t, -1) for t in range(T)] for row in place]
                batch["sees"] = [[row.get(t, 0) for t in range(T)] for row in place]
            yield batch


SHAPES = {
    "base": Shape(
        {"n_layer": 12, "d_model": 768, "n_head": 12, "d_inner": 3072, "vocab_size": 32_000, "mem_len": 384, "reuse_len": 256},
        rows={"pretrain": 2, "finetune": 8},
        lengths={"pretrain": 512, "finetune": 128},
        n_target=85,
    ),
    "tiny": Shape(
        {"n_layer": 2, "d_model": 16, "n_head": 2, "d_inner": 32, "vocab_size": 11, "mem_len": 6, "reuse_len": 4},
        rows={"pretrain": 2, "finetune": 2},
        lengths={"pretrain": 8, "finetune": 6},
        n_target=3,
    ),
}
"""base: the paper's smaller model, as its authors train it; tiny: for the tests of the benchmark itself."""


def compare(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure one part."""
    shape = SHAPES[options.shape]
    size = f"B={shape.rows[part]} T={shape.lengths[part]}"
    return compare_steps(
        part,
        {part: f"{size}, {shape.n_target} targets a row" if part == "pretrain" else f"{size}, content alone"},
        COMMANDS,
        options,
        config=shape.values(part),
        batches=shape.batches(part),
        n_compared=2,
        failure_of=("peer bf16", "failure"),
        speed_targets=SPEED_TARGETS[part],
        memory_target=0.7,
    )


if __name__ == "__main__":
    parser = command(__doc__, repeats=5, peer=True)
    parser.add_argument("--shape", choices=SHAPES, default="base", help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=SPEED_TARGETS, default=list(SPEED_TARGETS), help="default: all")
    options = parse(parser)
    run(options, compare, options.parts, model=str(SHAPES[options.shape].sizes))
