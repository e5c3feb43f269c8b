"""Floating-point operations of a pass: those of matrix products, a multiplication and an addition counted as two.

Counted is what is computed: keys of the memory and hidden ones too, though the fused kernels skip most of the latter. Sums,
norms and softmaxes are left out, as by `torch.utils.flop_counter`, with which tests compare.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from transformer_xl.model.softmax import _CHUNK_ELEMENTS
from transformer_xl.model_config import AttentionKind
from transformer_xl.planning.work import Cluster, Work, clusters


@dataclass(frozen=True)
class Flops:
    """Operations of a pass, or of a token of it.

    Attributes:
        forward: of the forward pass.
        backward: what the gradients need.
        repeated: what is computed again in the backward pass to save memory.
        attention: the part of forward and backward that compares with keys and averages values.
        memory: the part of forward and backward that there is for the memory: projecting it and attending to it.
    """

    forward: float
    backward: float
    repeated: float
    attention: float
    memory: float

    @property
    def needed(self) -> float:
        """Forward and backward, whatever is computed again."""
        return self.forward + self.backward

    def __truediv__(self, n: float) -> "Flops":
        return Flops(self.forward / n, self.backward / n, self.repeated / n, self.attention / n, self.memory / n)


@dataclass(frozen=True)
class _Product:
    """A matrix product of the forward pass, and what becomes of it in the backward pass.

    Attributes:
        flops: of the forward pass.
        n_gradient: how many gradients it has, of one factor or of both: each takes as long.
        n_repeat: how many products of its size the backward pass computes besides.
        attends: it is part of attention.
        of_memory: share that there is for the memory.
    """

    flops: float
    n_gradient: float = 2
    n_repeat: int = 0
    attends: bool = False
    of_memory: float = 0.0


def count_flops(work: Work) -> Flops:
    """Count the operations of a pass, of all its segments."""
    n_layer, again = work.model.config.n_layer, int(work.checkpointing)
    products = [(product, n_layer * work.segments, product.n_repeat + again) for product in _layer(work)]
    products += [(product, work.segments, product.n_repeat) for product in _vocabulary(work)]
    needed = [(n * product.flops * (1 + product.n_gradient), product) for product, n, _ in products]
    return Flops(
        forward=sum(n * product.flops for product, n, _ in products),
        backward=sum(n * product.flops * product.n_gradient for product, n, _ in products),
        repeated=sum(n * product.flops * n_repeat for product, n, n_repeat in products),
        attention=sum(flops for flops, product in needed if product.attends),
        memory=sum(flops * product.of_memory for flops, product in needed),
    )


def _layer(work: Work) -> Iterator[_Product]:
    config, width, X = work.model.config, work.attention_width, work.n_token
    D, M, S = config.d_model, work.model.mem_len, work.n_key
    # hidden states of the first memory have no gradient, unless learned numbers stand before the projection
    learned_memory = config.pre_lnorm or config.attention == AttentionKind.AL_RFOU
    n_gradient = 2 if learned_memory else 2 - 1 / work.segments
    yield _Product(2 * X * D * 3 * width)
    yield _Product(2 * work.rows * M * D * 2 * width, n_gradient=n_gradient, of_memory=1.0)
    if config.attention == AttentionKind.TRANSFORMER_XL:
        yield _Product(2 * S * D * width, n_gradient=1)  # of distances, once for all rows
    by_content, by_distance, of_values = _repeats(work)
    attention = {"flops": 2 * X * S * width, "attends": True, "of_memory": M / S}
    yield _Product(**attention, n_repeat=by_content)
    if work.by_distance:
        yield _Product(**attention, n_repeat=by_distance)
    yield _Product(**attention, n_repeat=of_values)
    yield _Product(2 * X * width * D)
    yield _Product(2 * 2 * X * D * config.d_inner)


def _repeats(work: Work) -> tuple[int, int, int]:
    """Return how many products the backward pass of attention repeats: scores by content, by distance, and with values.

    Only the paper's attention has backends that repeat any. The fused ones have three kernels, for queries, keys and distances.
    Each computes its scores and their gradients itself; the last two compute scores by distance in two halves, as well as the
    last one its gradient.
    """
    if work.model.config.attention != AttentionKind.TRANSFORMER_XL:
        return 0, 0, 0
    if work.backend == "triton":
        return 3, 1 + 2 + 2 + 1, 2
    again = int(work.backend == "matmul" and work.precision == "fp32")
    return again, again, 0


def _vocabulary(work: Work) -> Iterator[_Product]:
    D, X = work.model.config.d_model, work.n_token
    for name, table in work.model.embedding.named_parameters():
        if name.startswith("projection"):
            yield _Product(2 * X * table.numel())
    for cluster in clusters(work.model, work.shares):
        n = X * cluster.share
        if cluster.projected:
            yield _Product(2 * n * D * cluster.width)
        yield _Product(2 * n * cluster.width * cluster.n_class, n_repeat=1 if n > tokens_of_chunk(cluster) else 0)


def tokens_of_chunk(cluster: Cluster) -> int:
    """Return how many tokens are scored at once."""
    return max(1, math.floor(_CHUNK_ELEMENTS / cluster.n_class))
