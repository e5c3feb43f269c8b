"""The numbers of a Transformer-XL layer that no longer change, and products with them.

Weights are multiplied in fp32, bf16, fp16, or int8 with a scale per output channel.

Shapes: B rows, T tokens, P distances with a key of their own, N heads, H d_head, D d_model, I inputs, O outputs.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.config.model import Activation
from transformer_xl.kernels.cpu_linear import linear
from transformer_xl.kernels.device import InferencePrecision, activation_dtype, at_least_fp32
from transformer_xl.kernels.equation import Positions
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.gates import Gate
from transformer_xl.model.layers import DecoderLayer, FeedForward, ShiftedLayer


class Matrix(NamedTuple):
    """A weight matrix (O, I), and for int8 the scale of each output channel, fp32 (O,)."""

    weight: Tensor
    scale: Tensor | None = None


Norm = tuple[Tensor, Tensor]
"""Weight and bias of a layer norm."""


class FrozenGate(NamedTuple):
    """The numbers of a `Gate`."""

    bias: Tensor
    x: Matrix
    y: Matrix
    candidate: Matrix


Product = Callable[[Tensor, Matrix, torch.dtype, Tensor | None], Tensor]
"""How vectors are multiplied by weights: `product` or `streamed_product`."""


class LayerWeights(NamedTuple):
    """All numbers of one layer; tensors alone, so that one compiled function serves every layer."""

    qkv: Matrix
    output: Matrix
    attention_norm: Norm
    inner: Matrix
    inner_bias: Tensor
    outer: Matrix
    outer_bias: Tensor
    feed_forward_norm: Norm
    content_bias: Tensor | None
    """u, (N, H): added to queries that are compared with keys."""
    position_bias: Tensor | None
    """v, (N, H): added to queries that are compared with position keys."""
    position_keys: Tensor | None
    """r of the distances P - 1, …, 0, (N, P, H). If all distances from P - 1 on have the same r, it is subtracted from every r.
    That adds one number to all scores of a query, which a softmax does not see, and farther keys need no r."""
    distance_bias: Tensor | None
    """b, what a distance adds to a score whatever the query, (N, P). Here nothing is subtracted. ALiBi's b is near 0 for near
    keys, to which most attention goes, and large for far ones. If that of P - 1 were subtracted, near keys would have large
    ones, and bf16 would round their scores."""
    shift: tuple[Tensor, Tensor] | None
    """Weights (D,) and (k, D) of what both blocks read of a token and of those before it; see `Shift.kernel`."""
    attention_gate: FrozenGate | None
    feed_forward_gate: FrozenGate | None

    @property
    def n_distance(self) -> int:
        """P, distances that scores are told apart by, whatever the content."""
        by_distance = self.distance_bias if self.position_keys is None else self.position_keys
        return 1 if by_distance is None else by_distance.shape[1]


class LayerOptions(NamedTuple):
    """What all layers of a model have in common."""

    n_head: int
    d_head: int
    pre_lnorm: bool
    layer_norm_epsilon: float
    activation: Activation


def freeze(weight: Tensor, precision: InferencePrecision) -> Matrix:
    """Return a weight matrix (O, I) as inference multiplies by it; in fp32 it is shared, not copied.

    int8 rounds each output channel to 255 steps between plus and minus its largest magnitude.

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


def freeze_vector(parameter: Tensor) -> Tensor:
    """Return a parameter that is added to hidden states or scales them: always in fp32 at least."""
    return at_least_fp32(parameter.detach())


def freeze_norm(norm: nn.LayerNorm) -> Norm:
    """Return weight and bias of a layer norm."""
    return freeze_vector(norm.weight), freeze_vector(norm.bias)


def freeze_layer(layer: DecoderLayer, positions: Positions, precision: InferencePrecision, *, n_slot: int) -> LayerWeights:
    """Return what one layer computes with, over rings of C slots."""
    attention, feed_forward = cast(AttentionKind, layer.attention), cast(FeedForward, layer.feed_forward)
    inner, outer = feed_forward.inner, feed_forward.outer
    dtype = attention.qkv_net.weight.dtype
    u, v, keys_PNH, bias_PN, *_ = attention.complete(positions)
    return LayerWeights(
        qkv=freeze(attention.qkv_net.weight, precision),
        output=freeze(attention.o_net.weight, precision),
        attention_norm=freeze_norm(attention.layer_norm),
        inner=freeze(inner.weight, precision),
        inner_bias=freeze_vector(inner.bias),
        outer=freeze(outer.weight, precision),
        outer_bias=freeze_vector(outer.bias),
        feed_forward_norm=freeze_norm(feed_forward.layer_norm),
        content_bias=None if u is None else freeze_vector(u),
        position_bias=None if v is None else freeze_vector(v),
        position_keys=None if keys_PNH is None else _freeze_position_keys(keys_PNH, activation_dtype(precision, dtype), n_slot),
        distance_bias=None if bias_PN is None else at_least_fp32(bias_PN.detach()).T.contiguous(),
        shift=_frozen_shift(layer),
        attention_gate=_frozen_gate(attention.gate, precision),
        feed_forward_gate=_frozen_gate(feed_forward.gate, precision),
    )


def _frozen_gate(gate: Gate | None, precision: InferencePrecision) -> FrozenGate | None:
    if gate is None:
        return None
    nets = (gate.x_net, gate.y_net, gate.candidate_net)
    return FrozenGate(freeze_vector(gate.bias), *(freeze(net.weight, precision) for net in nets))


def _frozen_shift(layer: DecoderLayer) -> tuple[Tensor, Tensor] | None:
    if not isinstance(layer, ShiftedLayer):
        return None
    norm = cast(FeedForward, layer.feed_forward).layer_norm
    own, taps = (freeze_vector(x.to(norm.weight)) for x in layer.shift.kernel(len(norm.weight)))
    return own, taps


def _freeze_position_keys(keys_PNH: Tensor, dtype: torch.dtype, n_slot: int) -> Tensor:
    """Return r with heads first, (N, P, H), less what farther keys share, which a softmax does not see."""
    keys_PNH = keys_PNH.detach()
    told_apart = keys_PNH - keys_PNH[:1] if len(keys_PNH) < n_slot else keys_PNH
    return told_apart.to(dtype).transpose(0, 1).contiguous()


# products


def product(x_XI: Tensor, matrix: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (…, O), as the library's matrix product in `dtype`."""
    if matrix.scale is None:
        return linear(x_XI.to(dtype), matrix.weight, None if bias is None else bias.to(dtype))
    y = F.linear(x_XI.to(dtype), matrix.weight.to(dtype)) * matrix.scale
    return y if bias is None else y + bias


def streamed_product(x_BI: Tensor, matrix: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (B, O), as multiplications and sums, for a compiler.

    A product with a single row takes as long as reading the weights. Compiled, these loops read them at the memory's speed and
    turn them to fp32 on the way; the libraries' matrix-vector products take two to four times as long. From two rows on, the
    libraries' products are faster.
    """
    if x_BI.shape[0] > 1:
        return product(x_BI, matrix, dtype, bias)
    y = (matrix.weight.to(x_BI.dtype) * x_BI).sum(-1).unsqueeze(0)
    y = y if matrix.scale is None else y * matrix.scale
    return y if bias is None else y + bias
