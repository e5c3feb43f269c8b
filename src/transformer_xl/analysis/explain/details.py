"""Attention in detail, for as many tokens as a page can hold: the keys that each head looks at most.

The first segments are kept, and then those with the highest score, such as what memory gained them. A segment is looked at when
it is read, while its memory is there, and dropped if later ones score higher.

Shapes: L layers, N heads, T tokens, S keys, K keys kept.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

BYTES = 8 << 20
"""What details may take, before they are compressed."""

KEYS = 8
"""Keys of each head."""

_BEGINNING = 0.25  # share of the room that is for the beginning of the text


@dataclass(frozen=True)
class Details:
    """What is kept of the attention.

    Attributes:
        places: int64 (n,), the tokens in order whose prediction is shown.
        distances: int64 (n, L·N, K), from the query (the token before) back to the keys, the heaviest first.
        weights: float32 (n, L·N, K), of these keys.
        memory: float32 (n, L·N), share of each head's attention that falls on memory.
    """

    places: np.ndarray
    distances: np.ndarray
    weights: np.ndarray
    memory: np.ndarray


@dataclass(order=True)
class _Kept:
    score: float
    begin: int
    looks: "Looks" = field(compare=False)


class Looks:
    """The heaviest keys of one segment, gathered layer by layer.

    Args:
        tgt_len: T, queries at the end of the keys that count.
        n_memory: how many of the first keys are memory.
    """

    def __init__(self, tgt_len: int, n_memory: int) -> None:
        self.tgt_len, self.n_memory = tgt_len, n_memory
        self._distances: list[np.ndarray] = []
        self._weights: list[np.ndarray] = []
        self._memory: list[np.ndarray] = []

    def add(self, weight_NTS: Tensor) -> None:
        """Take the weights of the next layer."""
        S = weight_NTS.shape[-1]
        weight, key = weight_NTS.topk(min(KEYS, S), dim=-1)
        own_T1 = torch.arange(S - self.tgt_len, S, device=key.device).unsqueeze(1)
        missing = KEYS - key.shape[-1]
        pad = ((0, 0), (0, 0), (0, missing))
        # a key of weight 0 may lie after the query, where nobody looks
        self._distances.append(np.pad((own_T1 - key).clamp(min=0).cpu().numpy(), pad))
        self._weights.append(np.pad(weight.float().cpu().numpy(), pad))
        self._memory.append(weight_NTS[..., : self.n_memory].sum(-1).float().cpu().numpy())

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return distances and weights (T, L·N, K), and the share of memory (T, L·N)."""
        stacked = (np.concatenate(part) for part in (self._distances, self._weights, self._memory))
        distances, weights, memory = stacked
        return distances.swapaxes(0, 1), weights.swapaxes(0, 1), memory.T


class Shelf:
    """Room for the details of so many segments.

    Args:
        n_segment: of the text.
        tgt_len: T.
        n_head: L·N, heads of all layers.
        n_bytes: room, in bytes of the page before it is compressed.
    """

    def __init__(self, n_segment: int, tgt_len: int, n_head: int, *, n_bytes: int = BYTES) -> None:
        room = max(2, n_bytes // (tgt_len * n_head * (3 * KEYS + 1)))
        self.n_first = n_segment if room >= n_segment else max(1, int(room * _BEGINNING))
        self._n_best = room - self.n_first
        self._first: dict[int, Looks] = {}
        self._best: list[_Kept] = []

    def wants(self, index: int, score: float) -> bool:
        """Say whether a segment would be kept, at least for now."""
        if index < self.n_first or len(self._best) < self._n_best:
            return True
        return score > self._best[0].score

    def put(self, index: int, begin: int, score: float, looks: Looks) -> None:
        """Keep a segment, perhaps instead of another one."""
        if index < self.n_first:
            self._first[begin] = looks
            return
        push = heapq.heappush if len(self._best) < self._n_best else heapq.heappushpop
        push(self._best, _Kept(score, begin, looks))

    def details(self) -> Details | None:
        """Return what is on the shelf in the order of the text; None if there is nothing."""
        kept = {**self._first, **{entry.begin: entry.looks for entry in self._best}}
        if not kept:
            return None
        begins = sorted(kept)
        parts = [kept[begin].arrays() for begin in begins]
        places = np.concatenate([begin + 1 + np.arange(kept[begin].tgt_len) for begin in begins])
        return Details(places, *(np.concatenate(part) for part in zip(*parts, strict=True)))
