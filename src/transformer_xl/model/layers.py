"""A layer: attention of some kind, then the position-wise feed-forward network.

Shapes: B batch, T tgt_len, M memory, k earlier tokens that a shift reads, D d_model.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transformer_xl.config.model import Activation, AttentionConfig, GateKind, TransformerXLConfig
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.dropout import DropConnectLinear, Dropout, relu_dropout
from transformer_xl.model.gates import block_output, make_gate
from transformer_xl.model.mask import Mask
from transformer_xl.model.memory import join
from transformer_xl.model.shift import Shift, make_shift, with_before


class FeedForward(nn.Module):
    """Two linear maps with a non-linearity between them, a residual connection and layer norm.

    Reference: `PositionwiseFF` of the authors' `pytorch/mem_transformer.py`.

    Args:
        d_model: D.
        d_inner: width between the maps.
        dropout: after each map.
        dropweight: on the weights of both maps.
        locked_dropout: dropout after each map is the same at all positions of a row.
        pre_lnorm: layer norm before the block instead of after it.
        activation: `relu` as in the paper, `gelu`, `gelu_tanh` (its approximation by tanh), or `relu2` (relu squared).
        layer_norm_epsilon: added to the variance.
        gate: how the result and the input are joined.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_inner: int,
        dropout: float = 0.0,
        dropweight: float = 0.0,
        locked_dropout: bool = False,
        pre_lnorm: bool = False,
        activation: Activation = "relu",
        layer_norm_epsilon: float = 1e-5,
        gate: GateKind = "sum",
    ) -> None:
        super().__init__()
        self.pre_lnorm = pre_lnorm
        self.activation: Activation = activation
        self.inner = DropConnectLinear(d_model, d_inner, dropweight=dropweight)
        self.outer = DropConnectLinear(d_inner, d_model, dropweight=dropweight)
        self.layer_norm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.drop = Dropout(dropout, locked=locked_dropout)
        self.gate = make_gate(gate, d_model, dropweight=dropweight)

    def forward(self, h_BTD: Tensor, *, read_BTD: Tensor | None = None) -> Tensor:
        """Add to each position a function of it, or of what it reads instead (`read_BTD`); shape (B, T, D) in and out."""
        read = h_BTD if read_BTD is None else read_BTD
        read = self.layer_norm(read) if self.pre_lnorm else read
        if self.activation == "relu":
            active = relu_dropout(read, self.inner, self.drop)
        else:
            active = self.drop(activate(self.inner(read), self.activation))
        norm = None if self.pre_lnorm else self.layer_norm
        return block_output(h_BTD, active, net=self.outer, drop=self.drop, gate=self.gate, norm=norm)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply the non-linearity of a feed-forward network."""
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "relu2":
        return _SquaredReLU.apply(x) if torch.is_grad_enabled() and not torch.compiler.is_compiling() else F.relu(x).square()
    return F.relu(x)


class _SquaredReLU(torch.autograd.Function):
    """relu(x)², whose gradient 2 relu(x) takes two passes over the widest tensor of a layer, where PyTorch's takes four."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        (x,) = args
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (positive,) = ctx.saved_tensors
        return (grad_outputs[0] * positive).mul_(2)


class DecoderLayer(nn.Module):
    """One layer: attention of some kind, then feed-forward."""

    def __init__(self, attention: AttentionKind, feed_forward: FeedForward) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward

    def forward(self, h_BTD: Tensor, **attention: Any) -> Tensor:
        """Run both blocks; keyword arguments go to the attention."""
        return self.feed_forward(self.attention(h_BTD, **attention))


class ShiftedLayer(DecoderLayer):
    """A layer whose blocks also read the tokens right before each token, see `shift`."""

    def __init__(self, attention: AttentionKind, feed_forward: FeedForward, shift: Shift) -> None:
        super().__init__(attention, feed_forward)
        self.shift = shift

    def forward(self, h_BTD: Tensor, *, mem_BMD: Tensor, mask: Mask, **attention: Any) -> Tensor:
        """Run both blocks on what the shift makes of their input.

        Args:
            h_BTD: the segment.
            mem_BMD: what the layer remembers; the first `n_before` positions of it are shifted only, and never attended to.
            mask: what each token sees and may look back to.
            **attention: the other arguments of the attention.

        Returns:
            The layer's output, (B, T, D).
        """
        T = h_BTD.shape[1]
        own_BTD = h_BTD
        if mask.n_pad is not None:
            joined_BLD = join(mem_BMD, h_BTD, mask.n_pad)
            mem_BMD, own_BTD = joined_BLD[:, :-T], joined_BLD[:, -T:]
            mask = replace(mask, n_pad=None)  # memory has moved up
        start_BM, start_BT = (None, None) if mask.start is None else (mask.start[:, :-T], mask.start[:, -T:])
        # apart, because no gradient is computed for the states of the memory
        read_BMD = self.read_memory(mem_BMD, mask.n_before, start_BM)
        start_BT = None if start_BT is None else start_BT - (mem_BMD.shape[1] - self.shift.reach)
        past = self.shift(with_before(own_BTD, mem_BMD, self.shift.reach), start_BT)
        read_BTD = self.shift.mix(own_BTD, past)
        h_BTD = self.attention(h_BTD, read_BTD=read_BTD, mem_BMD=read_BMD, mask=mask, **attention)
        return self.feed_forward(h_BTD, read_BTD=self.shift.mix(h_BTD, past))

    def read_memory(self, mem_BMD: Tensor, n_before: int, start_BM: Tensor | None) -> Tensor:
        """Return what keys and values of remembered states are projected from; the arguments are those of `forward`."""
        before_BND, own_BMD = mem_BMD.split([n_before, mem_BMD.shape[1] - n_before], dim=1)
        k = self.shift.reach
        n_missing = k - n_before
        start_BM = None if start_BM is None else start_BM[:, n_before:] + n_missing
        return self.shift.mix(own_BMD, self.shift(with_before(own_BMD, before_BND, k), start_BM))


def make_layer(kind: type[AttentionKind], config: AttentionConfig) -> DecoderLayer:
    """Return a layer with a kind of attention, as the settings describe it."""
    block: dict[str, Any] = {
        "dropout": config.dropout,
        "dropweight": config.dropweight,
        "locked_dropout": config.locked_dropout,
        "pre_lnorm": config.pre_lnorm,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "gate": config.gate if isinstance(config, TransformerXLConfig) else "sum",
    }
    heads: dict[str, Any] = {
        "n_head": config.n_head,
        "d_head": config.d_head,
        "dropatt": config.dropatt,
        "dropqkv": config.dropqkv,
    }
    attention = kind(config.d_model, **heads, **block)
    feed_forward = FeedForward(config.d_model, d_inner=config.d_inner, activation=config.activation, **block)
    shift = make_shift(config)
    return DecoderLayer(attention, feed_forward) if shift is None else ShiftedLayer(attention, feed_forward, shift)
