"""How much attention goes how far: the mass of each layer and head against distance, and what of it falls on memory.

Shapes: L layers, N heads, T queries, S keys, D distances.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class DistanceBins:
    """Attention mass by distance, in bins that grow with it.

    Attributes:
        edges: int64 (bins + 1,), bin i has the distances edges[i] … edges[i + 1] - 1.
        mass: float64 (L, N, bins), share of its attention that a query gives to keys of those distances.
        in_memory: the same, of keys in memory only.
        memory_share: float64 (L, N), share of its attention that a query gives to memory.
        queries: number of queries that this is the mean of.
    """

    edges: np.ndarray
    mass: np.ndarray
    in_memory: np.ndarray
    memory_share: np.ndarray
    queries: int

    @property
    def per_distance(self) -> np.ndarray:
        """Mean mass of a single distance of each bin, float64 (L, N, bins): wide bins hold more, and are not looked at more."""
        return self.mass / np.diff(self.edges)


class Distances:
    """Adds up attention by distance, segment by segment.

    A distance is what lies between a query and the key it looks at, 0 for its own position. Memory lies beyond the border of
    the segment, which is nearer to the segment's first tokens than to its last.

    Args:
        n_layer: L.
        n_head: N.
        n_distance: D, the longest distance that occurs and one more.
    """

    def __init__(self, n_layer: int, n_head: int, n_distance: int) -> None:
        self._mass = torch.zeros(n_layer, n_head, n_distance, dtype=torch.float64)
        self._in_memory = torch.zeros(n_layer, n_head, n_distance, dtype=torch.float64)
        self._queries = 0

    def add(self, layer: int, weight_NTS: Tensor, *, n_memory: int) -> None:
        """Add one segment's attention in one layer.

        Args:
            layer: which.
            weight_NTS: of the queries of the segment, which are the last T positions of the keys.
            n_memory: how many of the first keys are memory.
        """
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
    """Return borders of bins for distances from 0 on, single ones first, then each bin wider than the one before.

    Example:
        >>> bin_edges(30, growth=1.5).tolist()
        [0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 30]
    """
    edges = [0]
    while edges[-1] < n_distance:
        edges.append(min(max(edges[-1] + 1, int(edges[-1] * growth)), n_distance))
    return np.array(edges)
