"""Where each head looks: the attention weights of a segment, in detail for some tokens, and by distance for all.

The model reads the segment as always. Hooks see what enters each attention block, and the block computes its weights from it.
Weights of only one layer are held at a time.

A page has room for the details of some segments: the first ones, and then those with the highest score. A segment is looked at
when it is read, because its memory is there then, and dropped if later ones score higher.

Shapes: B rows, T tokens read, S = memory + T keys, L layers, N heads, K keys kept, D distances.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_xl.model.attention.block import AttentionBlock
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory

BYTES = 8 << 20  # for details, before they are compressed
KEYS = 8  # kept of each head


def visit_attention(model: LanguageModel, ids: Tensor, mems: Memory | None, visit: Callable[[int, Tensor], None]) -> None:
    """Read a segment with a model whose layers attend; hand each layer and its weights (B, N, T, S) in fp32 to `visit`."""

    def watcher(layer: int) -> Callable[..., None]:
        def watch(block: AttentionBlock, arguments: tuple[Tensor, ...], told: dict[str, Any]) -> None:
            visit(layer, block.weights(*arguments, **told).float())

        return watch

    blocks = model.attention_blocks()
    hooks = [block.register_forward_pre_hook(watcher(layer), with_kwargs=True) for layer, block in enumerate(blocks)]
    try:
        with torch.no_grad():
            model.read(ids, mems=mems)
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Details:
    """What is kept of the attention."""

    places: np.ndarray  # int64 (n,), the tokens in order whose prediction is shown
    distances: np.ndarray  # int64 (n, L·N, K), from the query (the token before) back to the keys, the heaviest first
    weights: np.ndarray  # float32 (n, L·N, K), of these keys
    memory: np.ndarray  # float32 (n, L·N), share of each head's attention that falls on memory


@dataclass(order=True)
class _Kept:
    score: float
    begin: int
    looks: "Looks" = field(compare=False)


class Looks:
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
        # a key of weight 0 may lie after the query, where nobody looks
        self._distances.append(np.pad((own_T1 - key).clamp(min=0).cpu().numpy(), pad))
        self._weights.append(np.pad(weight.float().cpu().numpy(), pad))
        self._memory.append(weight_NTS[..., :n_memory].sum(-1).float().cpu().numpy())

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return distances and weights (T, L·N, K), and the share of memory (T, L·N)."""
        stacked = (np.concatenate(part) for part in (self._distances, self._weights, self._memory))
        distances, weights, memory = stacked
        return distances.swapaxes(0, 1), weights.swapaxes(0, 1), memory.T


class Shelf:
    """Room for the details of some segments of a text: `n_bytes` before compression. `n_head` counts heads of all layers."""

    def __init__(self, n_segment: int, tgt_len: int, n_head: int, *, n_bytes: int = BYTES) -> None:
        room = max(2, n_bytes // (tgt_len * n_head * (3 * KEYS + 1)))
        self.n_first = n_segment if room >= n_segment else max(1, int(room * 0.25))  # for the beginning
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


@dataclass(frozen=True)
class DistanceBins:
    """Attention by distance, in bins that grow with it: means over queries."""

    edges: np.ndarray  # int64 (bins + 1,): bin i has the distances edges[i] … edges[i + 1] - 1
    mass: np.ndarray  # float64 (L, N, bins), share of attention that goes to these distances
    in_memory: np.ndarray  # the same, for keys in memory only
    memory_share: np.ndarray  # float64 (L, N), share of attention that goes to memory
    queries: int  # over how many the means are

    @property
    def per_distance(self) -> np.ndarray:
        """Mean mass of a single distance of each bin (L, N, bins), so that a wide bin does not seem to be looked at more."""
        return self.mass / np.diff(self.edges)


class Distances:
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
