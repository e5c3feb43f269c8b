"""The weights of a layer as inference multiplies by them: fp32, bf16, or int8 with a scale per output channel.

Shapes: O outputs, I inputs, N heads, H d_head, D d_model, P distances told apart.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.model.attention.block import AttentionBlock, FrozenPositions
from transformer_xl.model.layers import DecoderLayer, FeedForward
from transformer_xl.model.precision import InferencePrecision

Product = Callable[[Tensor, "Matrix", torch.dtype, Tensor | None], Tensor]
"""How vectors are multiplied by weights: see `product` and `streamed_product`."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.bfloat16}


class Matrix(NamedTuple):
    """A weight matrix (O, I), and for int8 the scale of each output channel, fp32 (O,)."""

    weight: Tensor
    scale: Tensor | None = None


class LayerWeights(NamedTuple):
    """All numbers of one layer; tensors alone, so that one compiled function serves every layer."""

    qkv: Matrix
    output: Matrix
    attention_norm: tuple[Tensor, Tensor]
    inner: Matrix
    inner_bias: Tensor
    outer: Matrix
    outer_bias: Tensor
    feed_forward_norm: tuple[Tensor, Tensor]
    content_bias: Tensor
    """u, (N, H): added to queries that are compared with keys."""
    position_bias: Tensor
    """v, (N, H): added to queries that are compared with position keys."""
    position_keys: Tensor
    """r of the distances P - 1, …, 0; (N, P, H). Farther ones have the key of P - 1."""
    distance_bias: Tensor | None
    """What a distance adds to a score whatever the query, (N, P)."""


def activation_dtype(precision: InferencePrecision, weights: torch.dtype) -> torch.dtype:
    """Return the type of what is multiplied, and of keys and values; "fp32" is the type of the model's own weights."""
    return _DTYPES.get(precision, weights)


def wide(x: Tensor) -> Tensor:
    """Return a parameter that is added to hidden states or normalizes them, detached and in fp32 at least."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def freeze(weight: Tensor, precision: InferencePrecision) -> Matrix:
    """Return a weight matrix as inference multiplies by it.

    Args:
        weight: (O, I); in "fp32" it is shared, not copied.
        precision: int8 rounds each output channel to 255 steps between plus and minus its largest magnitude.

    Example:
        >>> matrix = freeze(torch.tensor([[1.27, -0.5]]), "int8")
        >>> matrix.weight.tolist(), round(matrix.scale.item(), 4)
        ([[127, -50]], 0.01)
    """
    weight = weight.detach()
    if precision == "int8":
        scale = weight.abs().amax(dim=1).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
        return Matrix((weight / scale.unsqueeze(1)).round_().to(torch.int8), scale)
    return Matrix(weight.to(activation_dtype(precision, weight.dtype)))


def freeze_layer(layer: DecoderLayer, positions: FrozenPositions, precision: InferencePrecision) -> LayerWeights:
    """Return what one layer computes with."""
    attention, feed_forward = cast(AttentionBlock, layer.attention), cast(FeedForward, layer.feed_forward)
    inner, outer = feed_forward.inner, feed_forward.outer
    keys_NPH, bias_PN = positions.position_keys.transpose(0, 1), positions.distance_bias
    return LayerWeights(
        qkv=freeze(attention.qkv_net.weight, precision),
        output=freeze(attention.o_net.weight, precision),
        attention_norm=freeze_norm(attention.layer_norm),
        inner=freeze(inner.weight, precision),
        inner_bias=wide(inner.bias),
        outer=freeze(outer.weight, precision),
        outer_bias=wide(outer.bias),
        feed_forward_norm=freeze_norm(feed_forward.layer_norm),
        content_bias=wide(positions.content_bias),
        position_bias=wide(positions.position_bias),
        position_keys=keys_NPH.detach().to(activation_dtype(precision, keys_NPH.dtype)).contiguous(),
        distance_bias=None if bias_PN is None else wide(bias_PN.T).contiguous(),
    )


def freeze_norm(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a layer norm."""
    return wide(norm.weight), wide(norm.bias)


def product(x_XI: Tensor, matrix: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (…, O), as the library's matrix product in `dtype`."""
    if matrix.scale is None:
        return F.linear(x_XI.to(dtype), matrix.weight, None if bias is None else bias.to(dtype))
    y = F.linear(x_XI.to(dtype), matrix.weight.to(dtype)) * matrix.scale
    return y if bias is None else y + bias


def streamed_product(x_BI: Tensor, matrix: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (B, O), as multiplications and sums, for a compiler.

    Of a single row, a product is as fast as the weights can be read. Compiled, these loops read them at the memory's speed and
    turn them to fp32 on the way; the libraries' matrix-vector products take two to four times as long. Of two rows and more,
    the libraries' products are the faster ones.
    """
    if x_BI.shape[0] > 1:
        return product(x_BI, matrix, dtype, bias)
    y = (matrix.weight.to(x_BI.dtype) * x_BI).sum(-1).unsqueeze(0)
    y = y if matrix.scale is None else y * matrix.scale
    return y if bias is None else y + bias
