"""The one count of floating-point operations: those of matrix products, a multiplication and an addition counted as two.

`products` counts a forward pass of any model by its own weights. Two functions say what such a pass contains:

    count_flops       what training computes: hidden keys too, the memory projected anew, gradients, and what the backward pass
                      repeats
    flops_per_token   what scoring a text needs at least: each token projected once and compared with the keys that it may see

Sums, norms and softmaxes are left out, as in `torch.utils.flop_counter`, with which tests compare.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from transformer_xl.config.model import AttentionConfig
from transformer_xl.cost.work import COMPARE_DISTANCES, Work, clusters
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.transformer_xl import TransformerXL

Part = Literal["tokens", "memory", "distances", "content", "distance", "values", "embedding", "softmax"]
"""The purpose of a product: projecting tokens, remembered states or distances; scores by content and by distance, averages of
values; embedding tokens and scoring them."""

_ATTENTION: frozenset[Part] = frozenset({"content", "distance", "values"})
_VOCABULARY: frozenset[Part] = frozenset({"embedding", "softmax"})


@dataclass(frozen=True)
class Flops:
    """Operations of a training pass, or of a token of it."""

    forward: float  # of the forward pass
    backward: float  # for the gradients
    repeated: float  # in the backward pass, to save memory
    attention: float  # part of forward and backward: comparing with keys and averaging values
    memory: float  # part of forward and backward: projecting the memory and attending to it

    @property
    def needed(self) -> float:
        """Forward and backward, without what is repeated."""
        return self.forward + self.backward

    def __truediv__(self, n: float) -> "Flops":
        return Flops(self.forward / n, self.backward / n, self.repeated / n, self.attention / n, self.memory / n)


@dataclass(frozen=True)
class Pass:
    """The numbers that the operations of a forward pass depend on."""

    n_read: float  # tokens that the layers read
    n_scored: float  # tokens that are scored
    n_pair: float  # pairs of a query and a key in a layer
    n_apart: float  # those pairs that are compared by distance
    shares: Sequence[float]  # of the tokens in each cluster of the softmax, head first
    n_remembered: float = 0  # states of the memory that each layer projects again; 0 if keys and values are kept
    n_distance: float = 0  # distances whose keys each layer projects again; 0 if they are kept
    everywhere: bool = False  # every token is looked up in every cluster of the embedding, not only in its own
    on_cpu: bool = True


@dataclass(frozen=True)
class Product:
    """Matrix products of a forward pass."""

    part: Part
    flops: float
    in_chunks: bool = False  # training computes them again in the backward pass, because they are too large to keep


def products(model: LanguageModel, done: Pass) -> Iterator[Product]:
    """Yield the matrix products of a forward pass of a model, which may be on the meta device."""
    weights = sum(weight.numel() for weight in model.layers.parameters() if weight.dim() == 2)
    of_positions = sum(weight.numel() for block in model.attention_blocks() for weight in block.position_weights())
    yield Product("tokens", 2 * done.n_read * (weights - of_positions))
    yield Product("distances", 2 * done.n_distance * of_positions)
    if isinstance(model.config, AttentionConfig):
        config = cast(AttentionConfig, model.config)
        width = config.n_layer * config.n_head * config.d_head
        yield Product("memory", 2 * done.n_remembered * config.d_model * 2 * width)
        yield Product("content", 2 * done.n_pair * width)
        yield Product("distance", 2 * done.n_apart * width)
        yield Product("values", 2 * done.n_pair * width)
    embedding = model.embedding
    projections = [embedding.projection_of(i) for i in range(len(done.shares))]  # one may serve several clusters
    for projection in {id(x): x for x in projections if x is not None}.values():
        share = sum(share for own, share in zip(projections, done.shares, strict=True) if own is projection)
        yield Product("embedding", 2 * done.n_read * (1.0 if done.everywhere else share) * projection.numel())
    for cluster in clusters(model, done.shares):
        n = done.n_scored * cluster.share
        if cluster.projected:
            yield Product("softmax", 2 * n * model.config.d_model * cluster.width)
        yield Product(
            "softmax", 2 * n * cluster.width * cluster.n_class, in_chunks=n > cluster.tokens_at_once(on_cpu=done.on_cpu)
        )


def count_flops(work: Work) -> Flops:
    """Count the operations of a training pass over all its segments."""
    M, S, K = work.model.mem_len, work.n_key, work.segments
    n_pair = work.n_token * S
    done = Pass(
        n_read=work.n_token,
        n_scored=work.n_token,
        n_pair=n_pair,
        n_apart=n_pair if work.compares_distances else 0,
        shares=work.shares,
        n_remembered=work.rows * M,
        n_distance=S,  # shared by all rows
        everywhere=True,
        on_cpu=work.on_cpu,
    )
    # the first segment's memory needs no gradient unless weights change it first; sinusoids never need one
    n_gradient: dict[Part, float] = {"memory": 2 if work.changes_memory else 2 - 1 / K, "distances": 1}
    of_memory: dict[Part, float] = {"memory": 1.0, **dict.fromkeys(_ATTENTION, M / S)}
    again = _repeats(work)
    forward = backward = repeated = attention = memory = 0.0
    for product in products(work.model, done):
        flops, part = K * product.flops, product.part
        gradients = flops * n_gradient.get(part, 2)
        forward += flops
        backward += gradients
        repeated += flops * (again.get(part, 0) + product.in_chunks + (work.checkpointing and part not in _VOCABULARY))
        attention += (flops + gradients) * (part in _ATTENTION)
        memory += (flops + gradients) * of_memory.get(part, 0.0)
    return Flops(forward, backward, repeated, attention, memory)


def _repeats(work: Work) -> dict[Part, int]:
    """Return how often the backward pass of attention repeats each product.

    Backends that do not keep the weights compute scores once more. Fused kernels keep small scores of positions.
    """
    if not work.by_keys and not work.on_cpu:
        return {}
    is_fused = work.backend == "triton" and work.by_keys
    again = int(is_fused or (work.precision == "fp32" and (work.backend == "matmul" or not work.by_keys)))
    return {"content": again, "distance": 0 if work.kept_position_bytes else again}


def flops_per_token(model: LanguageModel, ids: np.ndarray, *, tgt_len: int) -> float:
    """Count what scoring the text `ids` (N,) needs per token on average, however a program does it.

    Every token is projected once, compared with the keys that it may see, and scored. A tail of an adaptive softmax counts only
    for the tokens that belong to it.
    """
    length = tgt_len + model.ext_len
    n_read = length / tgt_len
    seen = [model.window or model.mem_len + place for place in range(1, length + 1)]
    apart = (
        [min(n, (model.clamp_len or n) + 1) for n in seen]
        if isinstance(model, TransformerXL) and issubclass(model.attention_kind, COMPARE_DISTANCES)
        else []
    )
    borders = np.cumsum([len(bias) for _, _, bias in model.softmax.clusters(model.embedding)[0]])
    shares = np.bincount(np.searchsorted(borders, ids, side="right"), minlength=len(borders)) / len(ids)
    done = Pass(
        n_read=n_read,
        n_scored=1,
        n_pair=n_read * sum(seen) / length,
        n_apart=n_read * sum(apart) / length,
        shares=shares.tolist(),
    )
    return float(sum(product.flops for product in products(model, done)))
