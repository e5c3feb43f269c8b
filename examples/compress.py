"""Compress a file with a Transformer-XL that learns it while it reads, from nothing: no model lies beside the result.

    python examples/compress.py compress book.txt book.txl
    python examples/compress.py decompress book.txl book.txt

A text is cut into lanes, which are read side by side. A model predicts the next byte of each, bit by bit. So do counts of what
followed the last bytes, and an arithmetic coder writes each bit with the probability that a mix of all gives. After a segment
the model takes a training step on it. Whoever decompresses does the same, and knows as much of the text at each place.

Both must compute the same numbers to the last bit: on one machine, with the same versions of torch, numpy and this package. The
SHA-256 of the text stands at the end, so that elsewhere this ends with an error and never with another text.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch

import transformer_xl as txl

MODEL = txl.TransformerXLConfig(
    vocab_size=256, n_layer=3, d_model=192, n_head=1, d_head=64, d_inner=512, mem_len=64, ngram_rows=(2048, 2048), dropout=0.0,
    pre_lnorm=True, final_norm=True, activation="relu2", shift="averages",
)  # fmt: skip
TGT_LEN, MOST_LANES, LANE_BYTES = 16, 16, 2048  # bytes of each lane in a segment; lanes; bytes that each has at least
ORDERS, SLOTS = (1, 2, 3, 4, 6), 1 << 20  # how many of the last bytes are a context; slots of each
LR, ONE, FULL = 3e-3, 1 << 32, (1 << 64) - 1  # probabilities are integers p / ONE


class Coder:
    """An arithmetic coder of bits (Witten, Neal and Cleary 1987), which writes to `data`, or reads what another wrote.

    Of an interval of integers, the part of the bit that came is the next one. A first byte that its numbers share is certain.
    """

    def __init__(self, data: bytes | None = None) -> None:
        self.low, self.high, self.data, self.rest = 0, FULL, bytearray(), iter(data or b"")
        self.reads, self.value = data is not None, int.from_bytes(bytes(next(self.rest, 0) for _ in range(8)))

    def code(self, p: int, bit: int) -> int:
        """Write a bit that is 1 with probability p / ONE; or read one, and return it."""
        middle = self.low + (self.high - self.low) * p // ONE
        if self.reads:
            bit = int(self.value <= middle)
        self.low, self.high = (self.low, middle) if bit else (middle + 1, self.high)
        while not (self.low ^ self.high) >> 56:
            if self.reads:
                self.value = (self.value << 8 & FULL) | next(self.rest, 0)
            else:
                self.data.append(self.high >> 56)
            self.low, self.high = self.low << 8 & FULL, (self.high << 8 & FULL) | 255
        return bit

    def end(self) -> bytes:
        """Return what was written; a reader finds zeros after it."""
        return bytes(self.data) + (bytes([(self.low >> 56) + 1]) if self.low else b"")


class Mixer:
    """The next bit of each lane, by counts and a model (Mahoney 2005, Adaptive weighing of context models, CS-2005-16).

    A byte is eight decisions, from node to node of a binary tree. A context, such as the last three bytes, has for each node a
    slot with the mean p of the bits seen there and their number n (the model: 0). The probability of a 1 is

        σ(Σ_k (u[node, k] + v[k, n_k]) logit p_k)

    Shapes: B lanes, K contexts and the model.
    """

    def __init__(self, n_lane: int) -> None:
        n_context = len(ORDERS)
        self.means, self.seen = np.full((n_context, SLOTS), 0.5, np.float32), np.zeros((n_context, SLOTS), np.uint8)
        self.by_node, self.by_seen = np.zeros((256, n_context + 1)), np.full((n_context + 1, 64), 0.2)
        self.last = np.zeros((n_lane, max(ORDERS)), np.int64)
        self.k, self.lanes = np.arange(n_context + 1), np.arange(n_lane)

    def begin(self, model: np.ndarray) -> None:
        """Begin a byte, of which a model gives the probabilities (B, 256)."""
        self.sums = np.pad(model + 1e-9, ((0, 0), (1, 0))).cumsum(1)
        hashes = [self.last[:, :n] @ 0x2F0B4C47 ** np.arange(1, n + 1) + n for n in ORDERS]
        self.contexts, self.node = np.stack(hashes, axis=1), np.ones_like(self.lanes)

    def probability(self, place: int) -> np.ndarray:
        """Return the probability that the bit at `place`, 7 to 0, is a 1, (B,)."""
        self.slots = (self.contexts * 0x9E3779B97F4A7C1 + self.node[:, None] * 0x5851F42D4C957F2D >> 40) % SLOTS
        means, seen = self.means[self.k[:-1], self.slots], self.seen[self.k[:-1], self.slots]
        first, half = (self.node << place + 1) - 256, 1 << place  # of the bytes that are still possible
        none, zeros, both = (self.sums[self.lanes, first + n] for n in (0, half, 2 * half))
        self.p_BK = np.column_stack([means, (both - zeros) / (both - none)]).clip(2e-4, 1 - 2e-4)
        self.n_BK = np.column_stack([seen, np.zeros_like(self.lanes)])
        self.logit_BK = np.log(self.p_BK / (1 - self.p_BK))
        weights_BK = self.by_node[self.node] + self.by_seen[self.k, self.n_BK]
        self.p = (1 / (1 + np.exp(-(weights_BK * self.logit_BK).sum(1)))).clip(2**-20, 1 - 2**-20)
        return self.p

    def learn(self, bits: np.ndarray) -> None:
        """Count the bits (B,) that came, and go on to the next ones."""
        step = 0.0025 * (bits - self.p)[:, None] * self.logit_BK
        np.add.at(self.by_node, self.node, step)
        np.add.at(self.by_seen, (self.k, self.n_BK), step)
        means, seen = self.p_BK[:, :-1], self.n_BK[:, :-1]
        self.means[self.k[:-1], self.slots] = means + (bits[:, None] - means) / (seen + 1.4)
        self.seen[self.k[:-1], self.slots] = np.minimum(seen + 1, 60)
        self.node = 2 * self.node + bits

    def end(self) -> np.ndarray:
        """Return the bytes (B,) that are complete."""
        self.last = np.column_stack([self.node - 256, self.last[:, :-1]])
        return self.node - 256


class Codec:
    """A text in lanes (B, 1 + n), zeros first, which goes through a coder segment by segment; a reader fills it in."""

    def __init__(self, text: np.ndarray, coder: Coder) -> None:
        torch.manual_seed(0)
        self.text, self.coder, self.mixer = text, coder, Mixer(len(text))
        self.model = txl.TransformerXL(MODEL).eval()
        self.mems = self.model.init_mems(len(text))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)

    def run(self) -> None:
        """Code the whole text."""
        n = self.text.shape[1] - 1
        for begin in range(0, n, TGT_LEN):
            end = min(begin + TGT_LEN, n)
            self.code(begin, end)
            self.learn(begin, end, lr=LR * min(1.0, (begin / TGT_LEN + 1) / 20) * (1 - 0.8 * begin / n))
            print(f"\r{end / n:.1%}", end="", file=sys.stderr, flush=True)

    @torch.no_grad()
    def code(self, begin: int, end: int) -> None:
        """Code the next bytes of each lane, those after `begin` up to `end`."""
        mems = self.mems
        for t in range(begin, end):
            out = self.model(torch.from_numpy(self.text[:, t : t + 1]), mems=mems)
            mems = out.mems
            self.mixer.begin(out.logits[:, -1].double().softmax(-1).numpy())
            for place in range(7, -1, -1):
                p = (self.mixer.probability(place) * ONE).astype(np.int64).tolist()
                bits = (self.text[:, t + 1] >> place & 1).tolist()
                self.mixer.learn(np.array([self.coder.code(*each) for each in zip(p, bits, strict=True)]))
            self.text[:, t + 1] = self.mixer.end()

    def learn(self, begin: int, end: int, lr: float) -> None:
        """Take a training step on these bytes."""
        ids, labels = (torch.from_numpy(self.text[:, begin + shift : end + shift]) for shift in (0, 1))
        out = self.model(ids, mems=self.mems, labels=labels)
        self.mems = out.mems
        out.nll.mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()


def lanes(text: bytes) -> np.ndarray:
    """Return a text in lanes of one length, each after a zero and the last one with zeros after its end."""
    n_lane = max(1, min(MOST_LANES, len(text) // LANE_BYTES))
    length = -(-len(text) // n_lane)
    rows = np.frombuffer(text.ljust(n_lane * length, b"\0"), np.uint8).astype(np.int64)
    return np.pad(rows.reshape(n_lane, length), ((0, 0), (1, 0)))


def compress(text: bytes) -> bytes:
    Codec(lanes(text), coder := Coder()).run()
    return len(text).to_bytes(8) + coder.end() + hashlib.sha256(text).digest()


def decompress(data: bytes) -> bytes:
    size, body, digest = int.from_bytes(data[:8]), data[8:-32], data[-32:]
    if len(data) < 40 or size > len(data) << 20:  # no bit takes less than 2**-20 of one
        raise ValueError("it is no file that this program wrote, or only a part of one")
    codec = Codec(lanes(bytes(size)), Coder(body))
    codec.run()
    text = codec.text[:, 1:].astype(np.uint8).tobytes()[:size]
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("another text comes out (SHA-256): the file was altered, or machine or versions are others")
    return text


def main(name: str, source: Path, out: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        data, stray = source.read_bytes(), out.with_name(f"{out.name}.part")
        result = compress(data) if name == "compress" else decompress(data)
        stray.write_bytes(result)
        stray.replace(out)
    except (OSError, ValueError, MemoryError) as error:
        sys.exit(f"\nerror: '{source}' -> '{out}': {error}")
    print(f"\n{len(data):,} bytes -> {len(result):,}")


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("compress", "decompress"):
        sys.exit(__doc__)
    main(sys.argv[1], *map(Path, sys.argv[2:]))
