"""The models that are compared with a peer, and what of them a token touches."""

import itertools
from dataclasses import dataclass
from typing import Any

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps import huggingface

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Of a number of a weight matrix, by precision; norms and biases are fp32 in all of them."""
MEMORY_BYTES = {"fp32": 4, "bf16": 2, "int8": 2}
"""Of a number of a key, a value or a position key, by precision."""


@dataclass(frozen=True)
class Sizes:
    """A model of Hugging Face's Transformer-XL."""

    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_inner: int
    vocab_size: int
    mem_len: int
    dropout: float = 0.1
    clamp_len: int = -1
    same_length: bool = False
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    untie_r: bool = False
    proj_share_all_but_first: bool = False
    init_std: float = 0.02

    def values(self) -> dict[str, Any]:
        """Return the settings as the peer names them."""
        fixed = {"d_embed": self.d_model, "proj_init_std": self.init_std, "attn_type": 0, "dropatt": 0.0}
        return {**vars(self), **fixed, "cutoffs": list(self.cutoffs)}

    def config(self, **changes: Any) -> TransformerXLConfig:
        """Return what a conversion of the peer's model would set: a memory begins as zeros that are attended to."""
        return huggingface.config_of({**self.values(), **changes})

    def __str__(self) -> str:
        clusters = f" in clusters from {self.cutoffs}, div_val {self.div_val}" if self.cutoffs else ""
        scored = f", clamp_len {self.clamp_len}, same_length" if self.same_length else f", dropout {self.dropout}"
        return (
            f"{self.n_layer} layers / {self.d_model} / {self.n_head}x{self.d_head} / {self.d_inner}, vocabulary "
            f"{self.vocab_size:,}{clusters}, M={self.mem_len}{scored}"
        )


@dataclass(frozen=True)
class TrainingShape:
    """A model, and what it reads in one step.

    Attributes:
        fp32_target: how many times faster than the peer a step shall be in fp32; None: no target.
        auto_target: the same for `precision=auto`.
    """

    sizes: Sizes
    batch_size: int
    tgt_len: int
    fp32_target: float | None = None
    auto_target: float | None = None

    def __str__(self) -> str:
        return f"{self.sizes}, B={self.batch_size} T={self.tgt_len}"


TRAINING_SHAPES = {
    "E": TrainingShape(Sizes(12, 512, 8, 64, 2048, 204, mem_len=512), 2, 512, fp32_target=1.6, auto_target=7.0),
    "S": TrainingShape(Sizes(6, 384, 6, 64, 1536, 65, mem_len=128), 12, 128, fp32_target=1.5, auto_target=5.0),
    "tiny": TrainingShape(Sizes(2, 16, 2, 8, 32, 11, mem_len=8), 2, 8),
}
"""E: the paper's enwik8 model of 12 layers; S: a character model for a laptop; tiny: for the tests of the benchmark itself."""


@dataclass(frozen=True)
class ReadingShape:
    """A model, and how it reads: `same_length`, with a clamped distance.

    Its weights are larger than for training: attention that looks at a few keys shows a wrong distance or a missing key,
    attention that averages 2,000 of them hides it.

    Attributes:
        tgt_len: tokens per segment of an evaluation.
        peer_tokens: tokens that the peer reads in a turn.
        session_mem_lens: memories with which several rows are read together.
        targets: how many times faster than the peer ours shall be, by what is done.
    """

    sizes: Sizes
    tgt_len: int
    peer_tokens: int
    session_mem_lens: tuple[int, ...]
    targets: dict[str, float]

    def matrices(self) -> int:
        """Numbers in the weight matrices that one token is multiplied by; of an adaptive softmax, those of the head."""
        s = self.sizes
        layer = 4 * s.d_model * s.n_head * s.d_head + 2 * s.d_model * s.d_inner
        head = s.cutoffs[0] + len(s.cutoffs) if s.cutoffs else s.vocab_size
        return s.n_layer * layer + head * s.d_model + (s.d_model**2 if s.div_val > 1 else 0)

    def vectors(self) -> int:
        """Numbers that stay fp32: norms, biases, and u and v."""
        s = self.sizes
        head = s.cutoffs[0] if s.cutoffs else s.vocab_size
        biases = (s.n_layer if s.untie_r else 1) * 2 * s.n_head * s.d_head
        return s.n_layer * (5 * s.d_model + s.d_inner) + biases + head

    def tails(self) -> int:
        """Numbers in the vectors of an adaptive softmax' tails, which most tokens do not touch."""
        s = self.sizes
        borders = (*s.cutoffs, s.vocab_size) if s.cutoffs else ()
        counts = [high - low for low, high in itertools.pairwise(borders)]
        return sum(n * (s.d_model // s.div_val**i) for i, n in enumerate(counts, start=1))

    def copy_bytes(self, precision: str) -> int:
        """Bytes of the weights in a precision other than that of the model, which is fp32."""
        return 0 if precision == "fp32" else (self.matrices() + self.tails()) * WEIGHT_BYTES[precision]

    def weight_bytes(self, precision: str) -> int:
        """Bytes of weights that one token touches, however many rows are read together."""
        return self.matrices() * WEIGHT_BYTES[precision] + self.vectors() * 4

    def position_bytes(self, precision: str, mem_len: int | None = None) -> int:
        """Bytes of position keys that one token touches: one per distance of a visible key that `clamp_len` tells apart."""
        s = self.sizes
        return s.n_layer * min(mem_len or s.mem_len, s.clamp_len + 1) * s.n_head * s.d_head * MEMORY_BYTES[precision]

    def memory_bytes(self, precision: str, mem_len: int | None = None) -> int:
        """Bytes of keys and values that one token of one row touches: those of all keys it sees, `mem_len` with its own."""
        s = self.sizes
        return 2 * s.n_layer * (mem_len or s.mem_len) * s.n_head * s.d_head * MEMORY_BYTES[precision]

    def token_bytes(self, precision: str, *, rows: int = 1, mem_len: int | None = None) -> int:
        """Bytes that one token of each row touches: weights and position keys once, keys and values of every row."""
        once = self.weight_bytes(precision) + self.position_bytes(precision, mem_len)
        return once + rows * self.memory_bytes(precision, mem_len)


_WIDE = {"same_length": True, "untie_r": True, "proj_share_all_but_first": True}
READING_SHAPES = {
    "E": ReadingShape(
        Sizes(12, 512, 8, 64, 2048, 204, mem_len=2100, clamp_len=820, same_length=True, init_std=0.05),
        tgt_len=80,
        peer_tokens=2,
        session_mem_lens=(2100, 512),
        targets={"decode fp32": 43, "decode fastest": 85, "decode limit": 1.5, "evaluate fp32": 4, "evaluate auto": 8},
    ),
    "W": ReadingShape(
        Sizes(
            *(18, 1024, 16, 64, 4096, 267_735),
            **_WIDE,
            mem_len=1600,
            clamp_len=1000,
            cutoffs=(20_000, 40_000, 200_000),
            div_val=4,
            init_std=0.05,
        ),
        tgt_len=128,
        peer_tokens=1,
        session_mem_lens=(),
        targets={"decode fp32": 50, "decode fastest": 100, "evaluate fp32": 4},
    ),
    "tiny": ReadingShape(
        Sizes(2, 16, 2, 8, 32, 50, mem_len=12, clamp_len=6, cutoffs=(10, 20), div_val=2, init_std=0.2, **_WIDE),
        tgt_len=5,
        peer_tokens=2,
        session_mem_lens=(12,),
        targets={},
    ),
}
"""E and W: the published 12-layer enwik8 and 18-layer WikiText-103 models as they are evaluated; tiny: for tests of the
benchmarks."""


def shapes_of(options: Any, shapes: dict[str, Any]) -> list[str]:
    """Return the shapes that are asked for; all are those of models that somebody uses."""
    return [name for name in shapes if name != "tiny"] if options.shape == "all" else [options.shape]
