"""The next bit of each lane: counts of what followed the last bytes, mixed with what a model predicts.

A byte is eight decisions, from node to node of a binary tree. A context, such as the last three bytes, has for each node a slot
with the mean p of the bits seen there and their number n. The probability of a 1 is

    σ(Σ_k (u[node, k] + v[k, n_k]) logit p_k)

over all contexts and the model (n = 0). The weights u and v take a step on the nats of each bit, so a context counts for as
much as it was worth at such places.

Reference: Mahoney 2005, Adaptive weighing of context models for lossless data compression (Florida Tech CS-2005-16).
Deviations: slots are not checked for collisions, and weights depend on n.

Shapes: B lanes, K contexts and the model.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transformer_xl.compression.coder import ONE

ORDERS = (1, 2, 3, 4, 5, 6)
"""How many of the last bytes are a context; one more is the word so far."""

MOST_SEEN = (250, 250, 120, 60, 30, 30, 120)
"""In each context, a new bit counts for at least about 1 / this."""

_SLOT_BITS = 21  # 2 million slots of five bytes for each context
_RATE = 0.0025
_SOME, _FLOOR = 1.35, 2e-4  # a first bit counts for 1 / _SOME; no mean comes nearer than _FLOOR to 0 or 1
_MIX, _FACTOR, _WORD = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0x2F0B4C47))


class BitMixer:
    """Probabilities of bits in B lanes, which count together and learn together."""

    def __init__(self, n_lane: int) -> None:
        K = len(MOST_SEEN) + 1
        self._means = np.zeros((K - 1) << _SLOT_BITS, np.float32)  # less a half, so that no page is touched before it is needed
        self._seen = np.zeros((K - 1) << _SLOT_BITS, np.uint8)
        self._by_node, self._by_seen = np.zeros((256, K)), np.full((K, 256), 0.15)
        self._by_seen[-1] = 0.3
        self._last, self._word = np.zeros(n_lane, np.uint64), np.zeros(n_lane, np.uint64)  # last eight bytes; a hash
        self._masks = np.array([2 ** (8 * n) - 1 for n in ORDERS], np.uint64)
        self._first = np.arange(K - 1, dtype=np.uint64) << np.uint64(_SLOT_BITS)
        self._salt, self._k = np.arange(1, K, dtype=np.uint64), np.arange(K)
        self._shares, self._most = 1 / (np.arange(256) + _SOME), np.array(MOST_SEEN, np.uint8)

    def state(self) -> dict[str, Tensor]:
        """Return all that changes, as tensors that share it."""
        own = {name: getattr(self, f"_{name}") for name in ("means", "seen", "by_node", "by_seen", "last", "word")}
        return {name: torch.from_numpy(x.view(np.int64) if x.dtype == np.uint64 else x) for name, x in own.items()}

    def begin(self, model: NDArray[np.float64]) -> None:
        """Begin a byte, of which a model gives the probabilities (B, 256)."""
        self._tree = np.empty((len(model), 512))
        self._tree[:, 256:] = model + 1e-9
        for n in (128, 64, 32, 16, 8, 4, 2, 1):
            self._tree[:, n : 2 * n] = self._tree[:, 2 * n : 4 * n].reshape(-1, n, 2).sum(-1)
        self._node = np.ones(len(model), np.int64)
        contexts = np.concatenate([self._last[:, None] & self._masks, self._word[:, None]], axis=1)
        self._hashes = (contexts + self._salt) * _MIX

    def probability(self) -> NDArray[np.int64]:
        """Return the probability that the next bit of each lane is a 1, (B,), in units of 1 / `ONE`."""
        hashes = (self._hashes + self._node[:, None].astype(np.uint64)) * _FACTOR
        self._slots = (hashes >> np.uint64(64 - _SLOT_BITS)) + self._first
        self._mean, lanes = self._means[self._slots].astype(np.float64), np.arange(len(hashes))
        self._n = np.zeros((len(hashes), len(self._k)), np.uint8)
        self._n[:, :-1] = self._seen[self._slots]
        zero, one = self._tree[lanes, 2 * self._node], self._tree[lanes, 2 * self._node + 1]
        self._logits = np.log(np.column_stack([(0.5 + self._mean) / (0.5 - self._mean), one / zero]))
        weights = self._by_node[self._node] + self._by_seen[self._k, self._n]
        self._p = (1 / (1 + np.exp(-(weights * self._logits).sum(1)))).clip(2**-20, 1 - 2**-20)
        return (self._p * ONE).astype(np.int64)

    def learn(self, bits: NDArray[np.int64]) -> None:
        """Count the bits (B,) that came, and go on to the next ones."""
        step = (_RATE * (bits - self._p))[:, None] * self._logits
        np.add.at(self._by_node, self._node, step)
        np.add.at(self._by_seen, (self._k, self._n), step)
        seen = self._n[:, :-1]
        means = self._mean + (bits[:, None] - 0.5 - self._mean) * self._shares[seen]
        self._means[self._slots] = means.clip(_FLOOR - 0.5, 0.5 - _FLOOR)  # of lanes with the same slot, the last one counts
        self._seen[self._slots] = np.minimum(seen + 1, self._most)
        self._node = 2 * self._node + bits

    def end(self) -> NDArray[np.int64]:
        """Return the bytes (B,) that are complete."""
        byte = self._node - 256
        self._last = (self._last << np.uint64(8)) | byte.astype(np.uint64)
        letter = byte | 32  # ASCII without case
        is_letter = ((letter >= ord("a")) & (letter <= ord("z"))) | (byte >= 128)
        self._word = np.where(is_letter, (self._word + letter.astype(np.uint64) + np.uint64(1)) * _WORD, np.uint64(0))
        return byte
