"""The sizes at which ours and the peer are compared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A model and what it reads in one step.

    Attributes:
        fp32_target: how many times faster than the peer a step shall be in fp32; None: no target.
        auto_target: the same for `precision=auto`.
    """

    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_inner: int
    vocab_size: int
    batch_size: int
    tgt_len: int
    mem_len: int
    dropout: float = 0.1
    fp32_target: float | None = None
    auto_target: float | None = None

    def __str__(self) -> str:
        return (
            f"{self.n_layer} layers / {self.d_model} / {self.n_head}x{self.d_head} / {self.d_inner}, "
            f"vocabulary {self.vocab_size}, B={self.batch_size} T={self.tgt_len} M={self.mem_len}, dropout {self.dropout}"
        )


SHAPES = {
    "E": Shape(12, 512, 8, 64, 2048, 204, batch_size=2, tgt_len=512, mem_len=512, fp32_target=1.6, auto_target=7.0),
    "S": Shape(6, 384, 6, 64, 1536, 65, batch_size=12, tgt_len=128, mem_len=128, fp32_target=1.5, auto_target=5.0),
    "tiny": Shape(2, 16, 2, 8, 32, 11, batch_size=2, tgt_len=8, mem_len=8),
}
"""E: the paper's enwik8 model of 12 layers; S: a character model for a laptop; tiny: for the tests of the benchmark itself."""
