"""The softmax with frozen weights, as inference computes it; an adaptive one cluster by cluster.

Shapes: X tokens, D d_model, E width of a cluster's vectors or tokens of an event, V vocabulary, K temperatures.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_xl.batch import NOT_SCORED
from transformer_xl.inference.frozen import Matrix, Product, freeze, freeze_vector, product
from transformer_xl.kernels.device import InferencePrecision, activation_dtype, at_least_fp32
from transformer_xl.kernels.graphs import sent
from transformer_xl.model.adaptive import AdaptiveSoftmax
from transformer_xl.model.softmax import Embedding, TokenSoftmax, check_ids

_CHUNK_ELEMENTS = 1 << 25
"""Scores held at once when a text is scored, 128 MB in fp32."""


class FrozenCluster(NamedTuple):
    """One cluster: a projection (E, D) if it has one, vectors (size, E) and biases."""

    projection: Matrix | None
    vectors: Matrix
    bias: Tensor


def compute_head(
    h_XD: Tensor,
    cluster: FrozenCluster,
    tail_classes: tuple[Matrix, Tensor] | None,
    dtype: torch.dtype,
    product: Product = product,
) -> tuple[Tensor, Tensor]:
    """Return the scores of the head's tokens and of the tails, see `FrozenSoftmax.head`; a function, so it can be compiled."""
    projected = _project(cluster, h_XD, dtype, product)
    own = _scores(cluster, projected, dtype, product)
    if tail_classes is None:
        return own, own[..., :0]
    tails = at_least_fp32(product(projected, tail_classes[0], dtype, None)) + tail_classes[1]
    normalizer = torch.logaddexp(own.logsumexp(-1, keepdim=True), tails.logsumexp(-1, keepdim=True))
    return own - normalizer, tails - normalizer


HeadFunction = Callable[[Tensor, FrozenCluster, tuple[Matrix, Tensor] | None, torch.dtype], tuple[Tensor, Tensor]]
"""`compute_head`, or the same compiled."""


class FrozenSoftmax:
    """Scores of the next token, head and tails apart.

    Args:
        softmax: of the model.
        embedding: of the model; the softmax may borrow its vectors.
        precision: of the products.

    Attributes:
        borders: first id of each cluster, then V: (0, V) for a plain softmax.
        clusters: the weights of each cluster, head first.
        tail_classes: vectors and biases of the tails as classes in the head's softmax; None without tails.
    """

    def __init__(self, softmax: TokenSoftmax | AdaptiveSoftmax, embedding: Embedding, precision: InferencePrecision) -> None:
        parts, classes = softmax.clusters(embedding)
        self.clusters = [
            FrozenCluster(
                None if projection is None else freeze(projection.T.contiguous(), precision),
                freeze(vectors, precision),
                freeze_vector(bias),
            )
            for projection, vectors, bias in parts
        ]
        self.tail_classes = None if classes is None else (freeze(classes[0], precision), freeze_vector(classes[1]))
        self._is_normalized = softmax.is_normalized
        self.borders = tuple(accumulate((len(cluster.bias) for cluster in self.clusters), initial=0))
        self._dtype = activation_dtype(precision, self.clusters[0].vectors.weight.dtype)

    def head(self, h_XD: Tensor, *, compute: HeadFunction = compute_head) -> tuple[Tensor, Tensor]:
        """Return scores of the head's own tokens (X, size) and of each tail as a whole (X, tails), at least in fp32.

        They are log-probabilities with an adaptive softmax; a plain one has unnormalized scores and no tails. `compute` may be
        `compute_head` in a compiled form.
        """
        own, tails = compute(h_XD, self.clusters[0], self.tail_classes, self._dtype)
        return (own.log_softmax(-1) if self._is_normalized and not self.has_tails else own), tails

    def tail(self, i: int, h_XD: Tensor, of_tail_X: Tensor) -> Tensor:
        """Return the log-probabilities (X, size) of the tokens of tail `i`, given those of the tail as a whole (X,)."""
        cluster = self.clusters[i + 1]
        return _scores(cluster, _project(cluster, h_XD, self._dtype), self._dtype).log_softmax(-1) + of_tail_X.unsqueeze(-1)

    def logits(self, h_XD: Tensor) -> Tensor:
        """Return scores (X, V) of all tokens, at least in fp32; with an adaptive softmax they are log-probabilities."""
        own, tails = self.head(h_XD)
        return torch.cat([own, *(self.tail(i, h_XD, of_tail) for i, of_tail in enumerate(tails.unbind(-1)))], dim=-1)

    @property
    def has_tails(self) -> bool:
        """Whether it is adaptive."""
        return len(self.clusters) > 1

    def check(self, label_X: Tensor) -> None:
        """Refuse labels outside the vocabulary, other than -100, with a TokenizerError."""
        check_ids(label_X[label_X != NOT_SCORED], vocab_size=self.borders[-1])

    def nll(self, h_XD: Tensor, label_X: Tensor, *, checked: bool = False) -> Tensor:
        """Return nats (X,) of each token's label, in chunks of tokens; 0 where the label is -100.

        Args:
            h_XD: states.
            label_X: on any device; if they are on the CPU, nothing waits for the device of the states.
            checked: whether `check` has seen them. Without tails, nothing then looks at values, so a graph can hold it.
        """
        return self._in_chunks(self._nll, h_XD, label_X, checked, max(len(cluster.bias) for cluster in self.clusters))

    def nll_at(self, h_XD: Tensor, label_X: Tensor, temperatures: Sequence[float], *, checked: bool = False) -> Tensor:
        """Return nats (K, X) of each token's label at some temperatures, all above 0; 0 where the label is -100.

        At temperature t a token has probability p^(1/t) / Σ p^(1/t), summed over the whole vocabulary, as in `Sampling`. With
        an adaptive softmax this needs the scores of every tail for every token. `checked` is that of `nll`.
        """

        def nats(h_XD: Tensor, label_X: Tensor) -> Tensor:
            scores = self.logits(h_XD)
            score_X = _of_labels(scores, label_X)
            return torch.stack([(scores / t).logsumexp(-1) - score_X / t for t in temperatures])

        return self._in_chunks(nats, h_XD, label_X, checked, self.borders[-1])

    def nll_and_event(self, h_XD: Tensor, label_X: Tensor, event_E: Tensor) -> Tensor:
        """Return nats (2, X) of each token's label, and of an event: that any of the tokens `event_E` (E,) comes; 0 at -100.

        The nats of an event are -log Σ_w p(w) over its tokens. With an adaptive softmax this needs the scores of every tail.
        """

        def nats(h_XD: Tensor, label_X: Tensor) -> Tensor:
            log_p = self.logits(h_XD) if self._is_normalized else self.logits(h_XD).log_softmax(-1)
            of_event_X = log_p[:, event_E].logsumexp(-1).clamp(max=0.0)  # sums may round to more than 1
            return -torch.stack([_of_labels(log_p, label_X), of_event_X])

        return self._in_chunks(nats, h_XD, label_X, False, self.borders[-1])

    def _nll(self, h_XD: Tensor, label_X: Tensor) -> Tensor:
        own, tails = self.head(h_XD)
        label_there_X = sent(label_X, h_XD.device)
        log_p = own if self.has_tails else own.log_softmax(-1)
        nats = -_of_labels(log_p, label_there_X.clamp(max=self.borders[1] - 1))
        for i, (first, last) in enumerate(pairwise(self.borders[1:])):
            where = ((label_X >= first) & (label_X < last)).nonzero().squeeze(1)
            if len(where):
                where = sent(where, h_XD.device)
                nats[where] = -_of_labels(self.tail(i, h_XD[where], tails[where, i]), label_there_X[where] - first)
        return nats

    def _in_chunks(
        self, nats: Callable[[Tensor, Tensor], Tensor], h_XD: Tensor, label_X: Tensor, checked: bool, n_score: int
    ) -> Tensor:
        """Return nats (…, X) of so many tokens at a time that their scores, `n_score` each, can be held; 0 at -100."""
        if not checked:
            self.check(label_X)
        n_chunk = max(1, _CHUNK_ELEMENTS // n_score)
        chunks = zip(h_XD.split(n_chunk), label_X.split(n_chunk), strict=True)
        nats_X = torch.cat([nats(h, label) for h, label in chunks], dim=-1)
        return nats_X.masked_fill(sent(label_X, h_XD.device) == NOT_SCORED, 0.0)


def _of_labels(score_XV: Tensor, label_X: Tensor) -> Tensor:
    return score_XV.gather(-1, label_X.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def _project(cluster: FrozenCluster, h_XD: Tensor, dtype: torch.dtype, product: Product = product) -> Tensor:
    return h_XD if cluster.projection is None else product(h_XD, cluster.projection, dtype, None)


def _scores(cluster: FrozenCluster, projected_XE: Tensor, dtype: torch.dtype, product: Product = product) -> Tensor:
    return at_least_fp32(product(projected_XE, cluster.vectors, dtype, None)) + cluster.bias
