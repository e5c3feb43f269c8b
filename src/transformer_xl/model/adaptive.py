"""Adaptive embedding and softmax: frequent tokens in a head, rarer ones in tail clusters with narrower vectors.

The head's softmax is over its own tokens and one more class per tail; a token of a tail has the probability of its tail times
its own within it (Grave et al. 2017, arXiv 1609.04309; with inputs: Baevski and Auli 2019, arXiv 1809.10853).

Ids are sorted by frequency: cluster 0 (the head) has ids 0 … cutoffs[0] - 1, cluster i those from cutoffs[i - 1] on. In the
softmax of the head, tail i is class cutoffs[0] + i - 1.

Shapes: B batch, T tgt_len, D d_model, V vocabulary, E_i width of the vectors of cluster i, X any number of tokens.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.kernels.device import at_least_fp32
from transformer_xl.model.softmax import Cluster, Embedding, drawn, linear_nll, look_up


def cluster_sizes(vocab_size: int, cutoffs: Sequence[int]) -> list[int]:
    """Return the number of ids of each cluster, head first.

    Example:
        >>> cluster_sizes(10, (3, 7))
        [3, 4, 3]
    """
    return [high - low for low, high in itertools.pairwise((0, *cutoffs, vocab_size))]


def cluster_widths(n_cluster: int, *, d_embed: int, div_val: int) -> list[int]:
    """Return E_i, the width of the vectors of each cluster.

    Example:
        >>> cluster_widths(4, d_embed=1024, div_val=4)
        [1024, 256, 64, 16]
    """
    return [d_embed // div_val**i for i in range(n_cluster)]


def is_projected(width: int, *, d_model: int, div_val: int, proj_same_dim: bool) -> bool:
    """Say whether vectors of a cluster are projected; with `div_val` above 1 those of width D may be, too."""
    return width != d_model or (div_val > 1 and proj_same_dim)


class AdaptiveEmbedding(nn.Module):
    """Vectors of token ids, narrower for rarer clusters, each cluster with its projection to D; scaled by sqrt(D).

    Reference: `AdaptiveEmbedding` of the authors' `pytorch/mem_transformer.py` with `div_val` above 1.

    Args:
        vocab_size: V.
        cutoffs: first id of each tail.
        div_val: factor between the widths of neighboring clusters.
        d_embed: width of the head's vectors.
        d_model: D.
        proj_same_dim: project vectors of width D too.
    """

    def __init__(
        self, vocab_size: int, *, cutoffs: Sequence[int], div_val: int, d_embed: int, d_model: int, proj_same_dim: bool = True
    ) -> None:
        super().__init__()
        self.borders = (0, *cutoffs, vocab_size)
        sizes = cluster_sizes(vocab_size, cutoffs)
        widths = cluster_widths(len(sizes), d_embed=d_embed, div_val=div_val)
        self.tables = nn.ParameterList(drawn(size, width) for size, width in zip(sizes, widths, strict=True))
        self.projections = nn.ParameterList(
            nn.Parameter(drawn(d_model, width))
            if is_projected(width, d_model=d_model, div_val=div_val, proj_same_dim=proj_same_dim)
            else None
            for width in widths
        )
        self.d_model = d_model

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids (B, T) as (B, T, d_model)."""
        embedded = self.tables[0].new_zeros(*ids.shape, self.d_model)
        for i, table in enumerate(self.tables):
            place = ids - self.borders[i]
            inside = (place >= 0) & (place < len(table))
            # every id is looked up in every cluster and one result is kept: tails are narrow, and shapes do not depend on ids
            first, last = i == 0, i == len(self.tables) - 1  # ids outside of all clusters stay so, and the look-up refuses them
            place = place if first else place.clamp(min=0)
            vectors = look_up(place if last else place.clamp(max=len(table) - 1), table)
            projection = self.projection_of(i)
            projected = vectors if projection is None else F.linear(vectors, projection)
            embedded = torch.where(inside.unsqueeze(-1), projected, embedded)
        return embedded * self.d_model**0.5

    def vectors(self, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return the vectors (size, E_i) of the ids of each cluster."""
        return list(self.tables)

    def projection_of(self, cluster: int) -> Tensor | None:
        """Return the projection (D, E_i) of one cluster, if it has one."""
        return self.projections[cluster]


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities over head and tails; nats per token, in the order of the tokens.

    With `div_val` 1 all clusters share one table of biases, and one of vectors unless these are tied, as in the code of the
    authors, Hugging Face and NVIDIA. An optimizer that looks at whole parameters, such as LAMB, would take other steps if each
    cluster had its own.

    Reference: `ProjectedAdaptiveLogSoftmax` of the authors' `pytorch/utils/proj_adaptive_softmax.py`. Deviations: losses stay
    in order; the head's classes for tails are in the order of the tails, as in the authors' TensorFlow code, not reversed.

    Args:
        vocab_size: V.
        cutoffs: first id of each tail; may be empty.
        div_val: factor between the widths of neighboring clusters.
        d_embed: width of the head's vectors.
        d_model: D.
        tied: use the embedding's vectors.
        tied_projections: per cluster: use the embedding's projection.
        proj_same_dim: with `div_val` above 1, project vectors of width D too.
    """

    is_normalized = True

    def __init__(
        self,
        vocab_size: int,
        *,
        cutoffs: Sequence[int],
        div_val: int,
        d_embed: int,
        d_model: int,
        tied: bool,
        tied_projections: Sequence[bool],
        proj_same_dim: bool = True,
    ) -> None:
        super().__init__()
        self.borders = (0, *cutoffs, vocab_size)
        self.sizes = cluster_sizes(vocab_size, cutoffs)
        self.tied_projections = tuple(tied_projections)
        widths = cluster_widths(len(self.sizes), d_embed=d_embed, div_val=div_val)
        self.joined = div_val == 1
        if self.joined:
            self.weight = None if tied else nn.Parameter(drawn(vocab_size, d_embed))
            self.bias = nn.Parameter(torch.zeros(vocab_size))
        else:
            shapes = zip(self.sizes, widths, strict=True)
            self.weights = None if tied else nn.ParameterList(drawn(size, width) for size, width in shapes)
            self.biases = nn.ParameterList(torch.zeros(size) for size in self.sizes)
        self.cluster_weight = nn.Parameter(torch.zeros(len(cutoffs), d_embed)) if cutoffs else None
        self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs))) if cutoffs else None
        self.projections = nn.ParameterList(
            nn.Parameter(drawn(d_model, width))
            if not tied_projection and is_projected(width, d_model=d_model, div_val=div_val, proj_same_dim=proj_same_dim)
            else None
            for width, tied_projection in zip(widths, tied_projections, strict=True)
        )

    def logits(self, h_BTD: Tensor, embedding: Embedding) -> Tensor:
        """Return log-probabilities (B, T, V), at least in fp32, of hidden states (B, T, D); they are normalized."""
        head, *tails = (_log_softmax(_project(h_BTD, p), w, b) for p, w, b in self._clusters(embedding))
        own, of_tails = head.tensor_split([self.sizes[0]], dim=-1)
        return torch.cat([own, *(tail + of_tails[..., i, None] for i, tail in enumerate(tails))], dim=-1)

    def nll(self, h_BTD: Tensor, labels: Tensor, embedding: Embedding, *, tail_sizes: Sequence[int] | None = None) -> Tensor:
        """Return nats per token (B, T) in fp32, in the order of the tokens; 0 where the label is -100.

        With `tail_sizes`, which `self.tail_sizes` finds, all shapes are known before the labels are, and nothing waits.
        """
        h_XD, label_X = h_BTD.flatten(0, 1), labels.flatten().contiguous()
        cluster_X = self._cluster_of(label_X)
        (projection, vectors, bias), *tails = self._clusters(embedding)
        in_head = torch.where(cluster_X > 0, self.sizes[0] + cluster_X - 1, label_X)
        nats = linear_nll(_project(h_XD, projection), vectors, bias, in_head)
        for i, (projection, vectors, bias) in enumerate(tails, start=1):
            if tail_sizes is None:
                where = (cluster_X == i).nonzero().squeeze(1)  # even if this is empty, every parameter gets a gradient
                own = label_X[where] - self.borders[i]
            else:
                is_own = cluster_X == i
                where = is_own.byte().argsort(descending=True, stable=True)[: tail_sizes[i - 1]]
                own = torch.where(is_own[where], label_X[where] - self.borders[i], -100)
            h = _project(h_XD.index_select(0, where), projection)
            nats = nats.index_add(0, where, linear_nll(h, vectors, bias, own).to(nats.dtype))
        return nats.view_as(labels)

    def tail_sizes(self, labels: Tensor) -> list[int]:
        """Return for each tail a size with room for its labels, of a few sizes, so that shapes recur.

        Example:
            >>> clusters = {"cutoffs": [2, 4], "div_val": 1, "tied_projections": [False] * 3}
            >>> softmax = AdaptiveSoftmax(9, **clusters, d_embed=4, d_model=4, tied=False)
            >>> softmax.tail_sizes(torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8] * 20))  # of 40 and 100
            [48, 112]
        """
        counts = torch.bincount(self._cluster_of(labels.flatten()), minlength=len(self.sizes)).tolist()
        return [min(_roomy(count), labels.numel()) for count in counts[1:]]

    def _cluster_of(self, label_X: Tensor) -> Tensor:
        return sum((label_X >= border for border in self.borders[1:-1]), torch.zeros_like(label_X))

    def clusters(self, embedding: Embedding) -> tuple[list[Cluster], tuple[Tensor, Tensor] | None]:
        """Return the clusters, head first, and the vectors and biases of the tails as classes in the head's softmax."""
        if self.joined:  # split by one node for all: a slice each would cost a gradient of full size each
            vectors = embedding.vectors(self.sizes) if self.weight is None else self.weight.split(self.sizes)
            biases = self.bias.split(self.sizes)
        else:
            vectors = embedding.vectors(self.sizes) if self.weights is None else list(self.weights)
            biases = list(self.biases)
        projections = [
            embedding.projection_of(i) if tied else self.projections[i] for i, tied in enumerate(self.tied_projections)
        ]
        classes = None
        if self.cluster_weight is not None and self.cluster_bias is not None:
            classes = (self.cluster_weight, self.cluster_bias)
        return list(zip(projections, vectors, biases, strict=True)), classes

    def _clusters(self, embedding: Embedding) -> list[Cluster]:
        """Return the clusters; the head's vectors and biases end with those of the tails as classes."""
        (head, *tails), classes = self.clusters(embedding)
        if classes is None:
            return [head, *tails]
        projection, vectors, bias = head
        return [(projection, torch.cat([vectors, classes[0]]), torch.cat([bias, classes[1]])), *tails]


def _roomy(count: int) -> int:
    """Return the next of four sizes between two powers of two, so that a graph is captured for few of them."""
    step = max(16, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


def _project(h: Tensor, projection: Tensor | None) -> Tensor:
    return h if projection is None else h @ projection


def _log_softmax(h: Tensor, vectors: Tensor, bias: Tensor) -> Tensor:
    return F.log_softmax(at_least_fp32(F.linear(h, vectors, bias)), dim=-1)
