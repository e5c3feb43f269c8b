"""Where each head attends: in detail for the tokens of some segments, and by distance on average.

The model reads a segment as always, and the weights of each layer are visited in turn; only those of one are held at a time.

A page has room for the details of some segments: the first ones, and those with the highest score. The weights of a segment are
computed when it is read, because its memory exists only then. They are dropped if later segments score higher.

Shapes: B rows, T tokens read, S = memory + T keys, L layers, N heads, K keys kept, D distances.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from transformer_xl.config.model import AttentionConfig
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.reading.reading import Reading

BYTES = 8 << 20  # for details, before they are compressed
KEYS = 8  # kept of each head


@dataclass(frozen=True)
class Details:
    """What is kept of the attention."""

    places: np.ndarray  # int64 (n,), the tokens in order whose prediction is shown
    distances: np.ndarray  # int64 (n, L·N, K), from the query (the token before) back to the keys, the heaviest first
    weights: np.ndarray  # float32 (n, L·N, K), of these keys
    memory: np.ndarray  # float32 (n, L·N), share of each head's attention that falls on memory


class SegmentDetails:
    """The heaviest keys of the last `tgt_len` queries of a segment, gathered layer by layer."""

    def __init__(self, tgt_len: int) -> None:
        self.tgt_len = tgt_len
        self._distances: list[np.ndarray] = []
        self._weights: list[np.ndarray] = []
        self._memory: list[np.ndarray] = []

    def add(self, weight_NTS: Tensor, *, n_memory: int) -> None:
        """Add the weights of the next layer; the first `n_memory` keys are memory."""
        S = weight_NTS.shape[-1]
        weight, key = weight_NTS.topk(min(KEYS, S), dim=-1)
        own_T1 = torch.arange(S - self.tgt_len, S, device=key.device).unsqueeze(1)
        missing = KEYS - key.shape[-1]
        pad = ((0, 0), (0, 0), (0, missing))
        # a key of weight 0 may lie after the query
        self._distances.append(np.pad((own_T1 - key).clamp(min=0).cpu().numpy(), pad))
        self._weights.append(np.pad(weight.float().cpu().numpy(), pad))
        self._memory.append(weight_NTS[..., :n_memory].sum(-1).float().cpu().numpy())

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return distances and weights (T, L·N, K), and the share of memory (T, L·N)."""
        distances, weights, memory = map(np.concatenate, (self._distances, self._weights, self._memory))
        return distances.swapaxes(0, 1), weights.swapaxes(0, 1), memory.T


class DetailStore:
    """Keeps the details of some segments in `n_bytes` before compression. `n_head` counts the heads of all layers."""

    def __init__(self, n_segment: int, tgt_len: int, n_head: int, *, n_bytes: int = BYTES) -> None:
        room = max(2, n_bytes // (tgt_len * n_head * (3 * KEYS + 1)))
        self._n_first = n_segment if room >= n_segment else max(1, int(room * 0.25))  # for the beginning
        self._n_best = room - self._n_first
        self._first: dict[int, SegmentDetails] = {}  # by place of the first token
        self._best: list[tuple[float, int, SegmentDetails]] = []  # a heap of scores; places differ, so details are not compared

    def wants(self, index: int, score: float) -> bool:
        """Return whether a segment would be kept, at least for now."""
        return index < self._n_first or len(self._best) < self._n_best or score > self._best[0][0]

    def put(self, index: int, begin: int, score: float, segment: SegmentDetails) -> None:
        """Keep a segment, perhaps instead of another one."""
        if index < self._n_first:
            self._first[begin] = segment
            return
        push = heapq.heappush if len(self._best) < self._n_best else heapq.heappushpop
        push(self._best, (score, begin, segment))

    def joined(self) -> Details | None:
        """Return the details of all kept segments in the order of the text; None if there are none."""
        kept = self._first | {begin: segment for _, begin, segment in self._best}
        if not kept:
            return None
        begins = sorted(kept)
        parts = [kept[begin].arrays() for begin in begins]
        places = np.concatenate([begin + 1 + np.arange(kept[begin].tgt_len) for begin in begins])
        return Details(places, *(np.concatenate(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class DistanceBins:
    """Attention by distance, in bins that grow with it: means over queries."""

    edges: np.ndarray  # int64 (bins + 1,): bin i has the distances edges[i] … edges[i + 1] - 1
    mass: np.ndarray  # float64 (L, N, bins), share of attention that goes to these distances
    in_memory: np.ndarray  # the same, for keys in memory only
    memory_share: np.ndarray  # float64 (L, N), share of attention that goes to memory
    queries: int  # number of queries that the means are over

    @property
    def per_distance(self) -> np.ndarray:
        """Mean mass of a single distance of each bin (L, N, bins), because a bin's mass also grows with its width."""
        return self.mass / np.diff(self.edges)


class DistanceSums:
    """Adds up attention by distance, segment by segment.

    A distance is the number of positions from a query back to a key, 0 for its own; `n_distance` is the longest plus one.
    """

    def __init__(self, n_layer: int, n_head: int, n_distance: int) -> None:
        self._mass = torch.zeros(n_layer, n_head, n_distance, dtype=torch.float64)
        self._in_memory = torch.zeros(n_layer, n_head, n_distance, dtype=torch.float64)
        self._queries = 0

    def add(self, layer: int, weight_NTS: Tensor, *, n_memory: int) -> None:
        """Add a segment's attention in one layer. Queries are the last T keys; the first `n_memory` keys are memory."""
        T, S = weight_NTS.shape[1:]
        own_T1 = torch.arange(S - T, S).unsqueeze(1)
        distance_TS = (own_T1 - torch.arange(S)).clamp(min=0)  # later keys have weight 0
        weight = weight_NTS.detach().double().cpu()
        self._mass[layer].index_add_(1, distance_TS.flatten(), weight.flatten(1))
        if n_memory:
            far = distance_TS[:, :n_memory].flatten()
            self._in_memory[layer].index_add_(1, far, weight[..., :n_memory].flatten(1))
        self._queries += T if layer == 0 else 0

    def binned(self) -> DistanceBins:
        """Return the mean over all queries, in bins."""
        edges = bin_edges(self._mass.shape[-1])
        n = max(self._queries, 1)
        mass, in_memory = (np.add.reduceat(x.numpy(), edges[:-1], axis=-1) / n for x in (self._mass, self._in_memory))
        return DistanceBins(edges, mass, in_memory, self._in_memory.sum(-1).numpy() / n, self._queries)


class AttentionWatch:
    """Chooses the segments whose attention is computed, and keeps what is shown of it."""

    def __init__(self, model: LanguageModel, reading: Reading, n_segment: int) -> None:
        config = cast("AttentionConfig", model.config)
        self._model = model
        self._every = math.ceil(n_segment / 256)  # so that at most 256 segments are averaged by distance
        n_distance = reading.tgt_len + reading.ext_len + model.mem_len  # which may be less than asked for, in a short text
        self.distances = DistanceSums(config.n_layer, config.n_head, n_distance)
        self.details = DetailStore(n_segment, reading.tgt_len, config.n_layer * config.n_head)

    def add(self, index: int, places_BT: np.ndarray, ids: Tensor, mems: Memory, scores: Sequence[float]) -> None:
        """Add those rows whose details are kept or that are sampled for the distances.

        The rows are segments `index`, `index` + 1, … of the text, with a score each. `places_BT` are their tokens that are
        scored, the last ones of `ids`.
        """
        wanted = [self.details.wants(index + row, score) for row, score in enumerate(scores)]
        sampled = [(index + row) % self._every == 0 for row in range(len(scores))]
        if not any(wanted) and not any(sampled):
            return
        T = places_BT.shape[1]
        details = [SegmentDetails(T) for _ in scores]

        def add(layer: int, weight_BNTS: Tensor) -> None:
            n_memory = weight_BNTS.shape[-1] - ids.shape[1]
            for row, weight_NTS in enumerate(weight_BNTS[:, :, -T:]):
                if wanted[row]:
                    details[row].add(weight_NTS, n_memory=n_memory)
                if sampled[row]:
                    self.distances.add(layer, weight_NTS, n_memory=n_memory)

        self._model.attention_weights(ids, mems=mems, keep=add)
        for row, score in enumerate(scores):
            if wanted[row]:
                self.details.put(index + row, int(places_BT[row, 0]), score, details[row])


def bin_edges(n_distance: int, *, growth: float = 1.12) -> np.ndarray:
    """Return borders of bins for distances from 0 on: single ones first, then each bin wider than the one before.

    Example:
        >>> bin_edges(30, growth=1.5).tolist()
        [0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 30]
    """
    edges = [0]
    while edges[-1] < n_distance:
        edges.append(min(max(edges[-1] + 1, int(edges[-1] * growth)), n_distance))
    return np.array(edges)
