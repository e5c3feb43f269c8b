"""Adaptive embedding and softmax: frequent tokens in a head, rarer ones in tail clusters with narrower vectors.

The head's softmax is over its own tokens and one more class per tail; a token of a tail has the probability of its tail times
its own within it (Grave et al. 2017, arXiv 1609.04309; with inputs: Baevski and Auli 2019, arXiv 1809.10853).

Ids are sorted by frequency: cluster 0 (the head) has ids 0 … cutoffs[0] - 1, cluster i those from cutoffs[i - 1] on. In the
softmax of the head, tail i is class cutoffs[0] + i - 1.

Shapes: B batch, T tgt_len, D d_model, V vocabulary, E_i width of the vectors of cluster i, X any number of tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.config.model import ModelConfig
from transformer_xl.kernels.device import at_least_fp32
from transformer_xl.model.softmax import Cluster, Embedding, TokenEmbedding, TokenSoftmax, drawn, linear_nll, look_up


@dataclass(frozen=True)
class Clusters:
    """How a vocabulary is divided, and how wide the vectors of its clusters are.

    Attributes:
        vocab_size: V.
        cutoffs: first id of each tail; may be empty.
        div_val: factor between the widths of neighboring clusters.
        d_embed: width of the head's vectors.
        d_model: D.
        proj_same_dim: with `div_val` above 1, project vectors of width D too.

    Example:
        >>> clusters = Clusters(10, cutoffs=(3, 7), div_val=4, d_embed=32, d_model=8)
        >>> clusters.sizes, clusters.widths, clusters.projected
        ((3, 4, 3), (32, 8, 2), (True, True, True))
    """

    vocab_size: int
    cutoffs: tuple[int, ...]
    div_val: int
    d_embed: int
    d_model: int
    proj_same_dim: bool = True

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """Return those of a model."""
        assert config.vocab_size is not None
        sizes = (config.div_val, config.d_embed or config.d_model, config.d_model)
        return cls(config.vocab_size, config.cutoffs, *sizes, config.proj_same_dim)

    @property
    def borders(self) -> tuple[int, ...]:
        """The first id of each cluster, head first, and V."""
        return (0, *self.cutoffs, self.vocab_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ids of each cluster."""
        return tuple(high - low for low, high in itertools.pairwise(self.borders))

    @property
    def widths(self) -> tuple[int, ...]:
        """E_i, the width of the vectors of each cluster."""
        return tuple(self.d_embed // self.div_val**i for i in range(len(self.cutoffs) + 1))

    @property
    def projected(self) -> tuple[bool, ...]:
        """For each cluster, whether a projection connects its vectors with the states."""
        return tuple(width != self.d_model or (self.div_val > 1 and self.proj_same_dim) for width in self.widths)

    def tables(self) -> nn.ParameterList:
        """Draw vectors for each cluster, (size, E_i)."""
        return nn.ParameterList(drawn(*shape) for shape in zip(self.sizes, self.widths, strict=True))

    def projections(self, *, tied: Sequence[bool]) -> nn.ParameterList:
        """Draw the projections (D, E_i) of those clusters that have one and do not share it with another part."""
        places = zip(self.widths, self.projected, tied, strict=True)
        return nn.ParameterList(
            nn.Parameter(drawn(self.d_model, width)) if is_projected and not is_tied else None
            for width, is_projected, is_tied in places
        )


class AdaptiveEmbedding(nn.Module):
    """Vectors of token ids, narrower for rarer clusters, each cluster with its projection to D; scaled by sqrt(D).

    Reference: `AdaptiveEmbedding` of the authors' `pytorch/mem_transformer.py` with `div_val` above 1.
    """

    def __init__(self, clusters: Clusters) -> None:
        super().__init__()
        self.borders, self.embedding_dim = clusters.borders, clusters.d_model
        self.tables = clusters.tables()
        self.projections = clusters.projections(tied=[False] * len(clusters.sizes))

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids (B, T) as (B, T, d_model)."""
        embedded = self.tables[0].new_zeros(*ids.shape, self.embedding_dim)
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
        return embedded * self.embedding_dim**0.5

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
        clusters: of the vocabulary.
        tied: use the embedding's vectors.
        tied_projections: per cluster: use the embedding's projection.
    """

    is_normalized = True

    def __init__(self, clusters: Clusters, *, tied: bool, tied_projections: Sequence[bool]) -> None:
        super().__init__()
        self.borders, self.sizes = clusters.borders, clusters.sizes
        self.tied_projections = tuple(tied_projections)
        self.joined = clusters.div_val == 1
        if self.joined:
            self.weight = None if tied else nn.Parameter(drawn(clusters.vocab_size, clusters.d_embed))
            self.bias = nn.Parameter(torch.zeros(clusters.vocab_size))
        else:
            self.weights = None if tied else clusters.tables()
            self.biases = nn.ParameterList(torch.zeros(size) for size in self.sizes)
        n_tail = len(clusters.cutoffs)
        self.cluster_weight = nn.Parameter(torch.zeros(n_tail, clusters.d_embed)) if n_tail else None
        self.cluster_bias = nn.Parameter(torch.zeros(n_tail)) if n_tail else None
        self.projections = clusters.projections(tied=self.tied_projections)

    def logits(self, h_BTD: Tensor, embedding: Embedding) -> Tensor:
        """Return log-probabilities (B, T, V), at least in fp32, of hidden states (B, T, D); they are normalized."""
        scores = (F.linear(_project(h_BTD, p), w, b) for p, w, b in self._clusters(embedding))
        head, *tails = (at_least_fp32(x).log_softmax(dim=-1) for x in scores)
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
            >>> clusters = Clusters(9, cutoffs=(2, 4), div_val=1, d_embed=4, d_model=4)
            >>> softmax = AdaptiveSoftmax(clusters, tied=False, tied_projections=[False] * 3)
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


def make_embedding(config: ModelConfig) -> TokenEmbedding | AdaptiveEmbedding:
    """Return the vectors of tokens that the settings describe."""
    clusters = Clusters.of(config)
    if config.div_val > 1:
        return AdaptiveEmbedding(clusters)
    d_embed, d_model = clusters.d_embed, clusters.d_model
    return TokenEmbedding(clusters.vocab_size, d_embed=d_embed, d_model=d_model, scale=config.embedding_scale)


def make_softmax(config: ModelConfig) -> TokenSoftmax | AdaptiveSoftmax:
    """Return the softmax over the vocabulary that the settings describe."""
    clusters, tied, tied_projections = Clusters.of(config), config.tie_weight, config.tied_projections
    if config.div_val > 1 or config.cutoffs:
        return AdaptiveSoftmax(clusters, tied=tied, tied_projections=tied_projections)
    return TokenSoftmax(
        clusters.vocab_size,
        d_embed=clusters.d_embed,
        d_model=clusters.d_model,
        tied=tied,
        tied_projection=tied_projections[0],
    )
