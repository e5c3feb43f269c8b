"""The models that are read with, one token or one segment at a time, and what of them a token touches."""

import itertools
from dataclasses import dataclass

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Of a number of a weight matrix, by precision; norms and biases are fp32 in all of them."""
MEMORY_BYTES = {"fp32": 4, "bf16": 2, "int8": 2}
"""Of a number of a key, a value or a position key, by precision."""


@dataclass(frozen=True)
class Targets:
    """How many times faster than the peer ours shall be; None: no target.

    Attributes:
        decode_fp32: per token, in fp32.
        decode_fastest: per token, in the fastest way whose loss moves by less than 0.01 nats.
        decode_limit: time per token in fp32, in times of what reading the bytes takes.
        evaluate_fp32: per segment, in fp32.
        evaluate_auto: per segment, with `precision=auto`.
    """

    decode_fp32: float | None = None
    decode_fastest: float | None = None
    decode_limit: float | None = None
    evaluate_fp32: float | None = None
    evaluate_auto: float | None = None


@dataclass(frozen=True)
class ReadingShape:
    """A model, and how it reads: `same_length`, with a memory that begins as zeros that are attended to.

    Attributes:
        tgt_len: tokens per segment of an evaluation.
        init_std: of random weights. Larger than for training: attention that looks at a few keys shows a wrong distance or a
            missing key, attention that averages 2,000 of them hides it.
        peer_tokens: tokens that the peer reads in a turn.
        session_mem_lens: memories with which several rows are read together.
    """

    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_inner: int
    vocab_size: int
    mem_len: int
    clamp_len: int
    tgt_len: int
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    untie_r: bool = False
    proj_share_all_but_first: bool = False
    init_std: float = 0.05
    peer_tokens: int = 2
    session_mem_lens: tuple[int, ...] = ()
    targets: Targets = Targets()

    def __str__(self) -> str:
        clusters = f" in clusters from {self.cutoffs}, div_val {self.div_val}" if self.cutoffs else ""
        return (
            f"{self.n_layer} layers / {self.d_model} / {self.n_head}x{self.d_head} / {self.d_inner}, vocabulary "
            f"{self.vocab_size:,}{clusters}, M={self.mem_len}, clamp_len {self.clamp_len}, same_length"
        )

    def matrices(self) -> int:
        """Numbers in the weight matrices that one token is multiplied by; of an adaptive softmax, those of the head."""
        width = self.n_head * self.d_head
        layer = 4 * self.d_model * width + 2 * self.d_model * self.d_inner
        head = self.cutoffs[0] + len(self.cutoffs) if self.cutoffs else self.vocab_size
        projection = self.d_model**2 if self.div_val > 1 else 0
        return self.n_layer * layer + head * self.d_model + projection

    def vectors(self) -> int:
        """Numbers that stay fp32: norms, biases, and u and v."""
        head = self.cutoffs[0] if self.cutoffs else self.vocab_size
        biases = (self.n_layer if self.untie_r else 1) * 2 * self.n_head * self.d_head
        return self.n_layer * (5 * self.d_model + self.d_inner) + biases + head

    def tails(self) -> int:
        """Numbers in the vectors of an adaptive softmax' tails, which most tokens do not touch."""
        borders = (*self.cutoffs, self.vocab_size) if self.cutoffs else ()
        sizes = [high - low for low, high in itertools.pairwise(borders)]
        return sum(size * (self.d_model // self.div_val**i) for i, size in enumerate(sizes, start=1))

    def copy_bytes(self, precision: str) -> int:
        """Bytes of the weights in a precision other than that of the model, which is fp32."""
        return 0 if precision == "fp32" else (self.matrices() + self.tails()) * WEIGHT_BYTES[precision]

    def weight_bytes(self, precision: str) -> int:
        """Bytes of weights that one token touches, however many rows are read together."""
        return self.matrices() * WEIGHT_BYTES[precision] + self.vectors() * 4

    def position_bytes(self, precision: str, mem_len: int | None = None) -> int:
        """Bytes of position keys that one token touches: one per distance of a visible key that `clamp_len` tells apart."""
        n = min(mem_len or self.mem_len, self.clamp_len + 1)
        return self.n_layer * n * self.n_head * self.d_head * MEMORY_BYTES[precision]

    def memory_bytes(self, precision: str, mem_len: int | None = None) -> int:
        """Bytes of keys and values that one token of one row touches: those of all keys it sees, `mem_len` with its own."""
        return 2 * self.n_layer * (mem_len or self.mem_len) * self.n_head * self.d_head * MEMORY_BYTES[precision]

    def token_bytes(self, precision: str, *, rows: int = 1, mem_len: int | None = None) -> int:
        """Bytes that one token of each row touches: weights and position keys once, keys and values of every row."""
        once = self.weight_bytes(precision) + self.position_bytes(precision, mem_len)
        return once + rows * self.memory_bytes(precision, mem_len)


READING_SHAPES = {
    "E": ReadingShape(
        12,
        512,
        8,
        64,
        2048,
        204,
        mem_len=2100,
        clamp_len=820,
        tgt_len=80,
        session_mem_lens=(2100, 512),
        targets=Targets(decode_fp32=43, decode_fastest=85, decode_limit=1.5, evaluate_fp32=4, evaluate_auto=8),
    ),
    "W": ReadingShape(
        18,
        1024,
        16,
        64,
        4096,
        267_735,
        mem_len=1600,
        clamp_len=1000,
        tgt_len=128,
        cutoffs=(20_000, 40_000, 200_000),
        div_val=4,
        untie_r=True,
        proj_share_all_but_first=True,
        peer_tokens=1,
        targets=Targets(decode_fp32=50, decode_fastest=100, evaluate_fp32=4),
    ),
    "tiny": ReadingShape(
        2,
        16,
        2,
        8,
        32,
        50,
        mem_len=12,
        clamp_len=6,
        tgt_len=5,
        cutoffs=(10, 20),
        div_val=2,
        untie_r=True,
        proj_share_all_but_first=True,
        init_std=0.2,
        session_mem_lens=(12,),
    ),
}
"""E and W: the published 12-layer enwik8 and 18-layer WikiText-103 models as they are evaluated; tiny: for tests of the
benchmarks."""
