"""The sizes at which an XLNet is compared with the peer's, and what both read."""

import random
from dataclasses import dataclass
from typing import Any

PARTS = {
    "pretrain": "two streams, a training step",
    "finetune": "content alone, a training step",
    "document": "content alone, reading without gradients",
}


@dataclass(frozen=True)
class XLNetShape:
    """A model, and what it reads in one step of each part.

    Attributes:
        rows: B of each training step, by part; an even number, because the peer reads half of pretraining's backward.
        lengths: T of each training step, by part, and of a document.
        cut: T of the segments in which ours reads a document.
    """

    n_layer: int
    d_model: int
    n_head: int
    d_inner: int
    vocab_size: int
    rows: dict[str, int]
    lengths: dict[str, int]
    cut: int
    mem_len: int
    reuse_len: int
    n_target: int
    dropout: float = 0.1

    def __str__(self) -> str:
        return (
            f"{self.n_layer} layers / {self.d_model} / {self.n_head} heads / {self.d_inner}, vocabulary {self.vocab_size}, "
            f"dropout {self.dropout}"
        )

    def described(self, part: str) -> str:
        """Say what a part reads."""
        size = f"B={self.rows[part]} T={self.lengths[part]}"
        if part == "pretrain":
            return f"{size} M={self.mem_len} reuse {self.reuse_len}, {self.n_target} targets a row, half of the rows backward"
        return size if part == "finetune" else f"{size}; ours: segments of {self.cut}, M={self.mem_len}; the peer: one window"


XLNET_SHAPES = {
    "base": XLNetShape(
        12, 768, 12, 3072, 32_000,
        rows={"pretrain": 2, "finetune": 8, "document": 1}, lengths={"pretrain": 512, "finetune": 128, "document": 4096},
        cut=512, mem_len=384, reuse_len=256, n_target=85,
    ),
    "tiny": XLNetShape(
        2, 16, 2, 32, 11,
        rows={"pretrain": 2, "finetune": 2, "document": 1}, lengths={"pretrain": 8, "finetune": 6, "document": 16},
        cut=8, mem_len=6, reuse_len=4, n_target=3,
    ),
}  # fmt: skip
"""base: the paper's smaller model, as its authors train it; tiny: for the tests of the benchmark itself."""


def rows_of(shape: XLNetShape, part: str, seed: int) -> dict[str, Any]:
    """Return ids and texts (B, T), and for pretraining rank and sees (B, T) and targets (B, K), as `Order` has them.

    The same for the same seed in every process.
    """
    generator = random.Random(seed)
    B, T = shape.rows[part], shape.lengths[part]
    rows: dict[str, Any] = {
        "ids": [generator.choices(range(shape.vocab_size), k=T) for _ in range(B)],
        "texts": [[int(t > T // 2) + int(t == T - 1) for t in range(T)] for _ in range(B)],
    }
    if part == "pretrain":
        targets = [generator.sample(range(T), shape.n_target) for _ in range(B)]
        place = [{t: i for i, t in enumerate(row)} for row in targets]
        rows["targets"] = targets
        rows["rank"] = [[row.get(t, -1) for t in range(T)] for row in place]
        rows["sees"] = [[row.get(t, 0) for t in range(T)] for row in place]
    return rows
