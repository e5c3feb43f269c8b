"""Tokens in and out: the embedding and the plain softmax over the whole vocabulary.

Their adaptive counterparts (`adaptive.py`, clusters of rarer words with narrower vectors) have the same methods, so the model
does not ask which kind it has.

Shapes: B batch, T tgt_len, D d_model, V vocabulary, E width of a token's vector, X any number of tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_xl.errors import TokenizerError
from transformer_xl.kernels.cpu_linear import linear
from transformer_xl.kernels.device import at_least_fp32, in_autocast
from transformer_xl.kernels.fused import fused_problem

CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 1 << 25, 1 << 27
"""Scores held at once, 128 or 512 MB in fp32; where tokens x vocabulary is more, losses are computed in chunks of tokens."""

_IN_ORDER = 3072
"""Up to this many tokens, PyTorch's embedding adds gradients in a fixed order on a GPU."""


class Embedding(Protocol):
    """The part of an embedding, plain or adaptive, that a tied softmax uses."""

    def vectors(self, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return the vectors (size, E) of the ids of each cluster."""
        ...

    def projection_of(self, cluster: int) -> Tensor | None:
        """Return the projection (D, E) of a cluster, if it has one."""
        ...


Cluster = tuple[Tensor | None, Tensor, Tensor]
"""Projection (D, E) if there is one, vectors (size, E) and biases (size,) of the tokens of a cluster."""


def check_ids(ids: Tensor | np.ndarray, *, vocab_size: int) -> None:
    """Refuse ids that a model has no vector for; `ids` may have any shape, and may be empty."""
    if 0 in ids.shape:
        return
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocab_size:
            raise TokenizerError(f"token id {extreme} is outside the vocabulary ({vocab_size}); is this the model's tokenizer?")


def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of a table, ids.shape + (E,), as `F.embedding` does; their gradients are added in a fixed order.

    Where more tokens share few ids, PyTorch's embedding adds them on a GPU in no fixed order; its sums of bags always have one.
    """
    if table.device.type == "cuda" and ids.numel() > _IN_ORDER:
        return _rows_of_bags(ids, table)
    return F.embedding(ids, table)


def _rows_of_bags(ids: Tensor, table: Tensor) -> Tensor:
    """Return the same rows as sums of bags of one token each, ids.shape + (E,)."""
    return F.embedding_bag(ids.reshape(-1, 1), table, mode="sum").view(*ids.shape, table.shape[1])


def drawn(*shape: int) -> Tensor:
    """Return normal numbers. On the meta device, which has none, nothing is drawn, because that would load SymPy for 0.3 s.

    Example:
        >>> drawn(3, 2).shape
        torch.Size([3, 2])
    """
    return torch.empty(shape) if torch.get_default_device().type == "meta" else torch.randn(shape)


class TokenEmbedding(nn.Module):
    """Vectors of token ids, projected where `d_embed` differs from `d_model`, and scaled, usually by sqrt(d_model).

    Reference: `AdaptiveEmbedding` of the authors' `pytorch/mem_transformer.py` with `div_val` 1.
    """

    def __init__(self, vocab_size: int, *, d_embed: int, d_model: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(vocab_size, d_embed))
        self.projection = nn.Linear(d_embed, d_model, bias=False) if d_embed != d_model else None
        self.scale, self.embedding_dim = scale, d_model

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids (B, T) as (B, T, d_model)."""
        embedded = look_up(ids, self.weight)
        projected = embedded if self.projection is None else self.projection(embedded)
        return projected.to(self.weight.dtype) * self.scale  # under autocast, too, hidden states stay fp32

    def vectors(self, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return the vectors (size, E) of the ids of each cluster of an adaptive softmax."""
        return self.weight.split(list(sizes))  # one node for all: a slice each would cost a gradient of full size each

    def projection_of(self, cluster: int) -> Tensor | None:
        """Return the projection (D, E) that all clusters share, if there is one."""
        return None if self.projection is None else self.projection.weight


class TokenSoftmax(nn.Module):
    """Scores of every token of the vocabulary.

    Reference: `ProjectedAdaptiveLogSoftmax` of the authors' `pytorch/utils/proj_adaptive_softmax.py` without clusters.

    Args:
        vocab_size: V.
        d_embed: E, width of the output vectors.
        d_model: D, width of the hidden states.
        tied: use the embedding's vectors.
        tied_projection: use the embedding's projection.
    """

    is_normalized = False
    """Whether `logits` returns log-probabilities."""

    def __init__(self, vocab_size: int, *, d_embed: int, d_model: int, tied: bool, tied_projection: bool = False) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(drawn(vocab_size, d_embed))
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        projected = d_embed != d_model and not tied_projection
        self.projection = nn.Linear(d_model, d_embed, bias=False) if projected else None

    def logits(self, h_BTD: Tensor, embedding: Embedding) -> Tensor:
        """Return unnormalized scores (B, T, V) of hidden states (B, T, D)."""
        return linear(self._project(h_BTD, embedding), self._vectors(embedding), self.bias)

    def nll(self, h_BTD: Tensor, labels: Tensor, embedding: Embedding, *, tail_sizes: Sequence[int] | None = None) -> Tensor:
        """Return nats per token (B, T) in fp32, in the order of the tokens; 0 where the label is -100. It has no tails."""
        projected = self._project(h_BTD, embedding).flatten(0, 1)
        return linear_nll(projected, self._vectors(embedding), self.bias, labels.flatten()).view_as(labels)

    def advantage(self, h_BTD: Tensor, labels: Tensor, embedding: Embedding) -> Tensor:
        """Return the sum of the labels' scores less the mean score of all tokens each; -100 is no label.

        The nats of a token and eps times this are together its cross entropy with label smoothing eps (Szegedy et al. 2016,
        section 7), because log softmax subtracts the same number from every score. The mean of the scores is the score of the
        mean vector, so no token's scores need be held.
        """
        label_X = labels.flatten()
        vectors, where, label_X = self._vectors(embedding), label_X >= 0, label_X.clamp(min=0)
        with torch.autocast(h_BTD.device.type, enabled=False):
            projected = self._project(h_BTD.to(vectors.dtype), embedding).flatten(0, 1)
            score_X = (projected * (look_up(label_X, vectors) - vectors.mean(0))).sum(-1)
            return ((score_X + self.bias[label_X] - self.bias.mean()) * where).sum()

    def clusters(self, embedding: Embedding) -> tuple[list[Cluster], None]:
        """Return the whole vocabulary as one cluster, and no classes of tails; see `AdaptiveSoftmax.clusters`."""
        projection = embedding.projection_of(0) if self.projection is None else self.projection.weight.T
        return [(projection, self._vectors(embedding), self.bias)], None

    def _vectors(self, embedding: Embedding) -> Tensor:
        return embedding.vectors([len(self.bias)])[0] if self.weight is None else self.weight

    def _project(self, h_BTD: Tensor, embedding: Embedding) -> Tensor:
        if self.projection is not None:
            return self.projection(h_BTD)
        borrowed = embedding.projection_of(0)
        return h_BTD if borrowed is None else h_BTD @ borrowed


def linear_nll(h_XE: Tensor, vectors_VE: Tensor, bias_V: Tensor, label_X: Tensor) -> Tensor:
    """Return -log softmax(h · vectors + bias) at each token's label, without holding the scores of all tokens at once.

    Nats (X,) are in fp32 at least, and 0 where the label is -100. The backward pass recomputes scores chunk by chunk. A CPU
    computes no scores of tokens without a label; a GPU would have to wait to know how many there are.

    Example:
        >>> linear_nll(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4), torch.tensor([1, -100])).exp().tolist()
        [4.0, 1.0]
    """
    on_cpu, n_missing = h_XE.device.type == "cpu", -len(bias_V) % 8
    n_chunk = max(1, (CHUNK_ELEMENTS if on_cpu else GPU_CHUNK_ELEMENTS) // vectors_VE.shape[0])
    if n_missing and not on_cpu:  # a GPU multiplies matrices of other widths slowly
        vectors_VE, bias_V = F.pad(vectors_VE, (0, 0, 0, n_missing)), F.pad(bias_V, (0, n_missing), value=float("-inf"))
    if on_cpu and not (is_scored := label_X != -100).all():
        where = is_scored.nonzero().squeeze(1)
        nats = linear_nll(h_XE[where], vectors_VE, bias_V, label_X[where])
        return torch.zeros(len(label_X), dtype=nats.dtype).index_add(0, where, nats)
    if len(h_XE) <= n_chunk:
        return _nll(h_XE, vectors_VE, bias_V, label_X)
    is_narrow = in_autocast(h_XE.device) or h_XE.dtype not in (torch.float32, torch.float64)
    if not is_narrow and hasattr(nn, "LinearCrossEntropyOptions"):  # not in torch 2.10
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=n_chunk, chunking_method=None)
        return F.linear_cross_entropy(h_XE, vectors_VE, label_X, linear_bias=bias_V, reduction="none", options=options)
    # the library's function ignores autocast, and multiplies bf16 on a CPU three times slower than this
    chunks = zip(h_XE.split(n_chunk), label_X.split(n_chunk), strict=True)
    return torch.cat(
        [checkpoint(_nll, h, vectors_VE, bias_V, label, use_reentrant=False, preserve_rng_state=False) for h, label in chunks]
    )


def _nll(h_XE: Tensor, vectors_VE: Tensor, bias_V: Tensor, label_X: Tensor) -> Tensor:
    scores = linear(h_XE, vectors_VE, bias_V)
    is_narrow = scores.dtype in (torch.bfloat16, torch.float16)  # those of fp32 are read as they are, anyway
    if scores.device.type == "cuda" and is_narrow and fused_problem(scores.device, scores.dtype, 1) is None:
        from transformer_xl.kernels.nll import FusedNll  # Triton takes a second

        return FusedNll.apply(scores, label_X)
    return F.cross_entropy(at_least_fp32(scores), label_X, reduction="none", ignore_index=-100)
