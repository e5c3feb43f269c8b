"""A layer: attention of some kind, then the position-wise feed-forward network.

Shapes: B batch, T tgt_len, D d_model.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.model.attention.block import AttentionBlock
from transformer_xl.model.dropout import DropConnectLinear, Dropout, relu_dropout
from transformer_xl.model_config import Activation, AttentionConfig


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
    ) -> None:
        super().__init__()
        self.pre_lnorm = pre_lnorm
        self.activation: Activation = activation
        self.inner = DropConnectLinear(d_model, d_inner, dropweight=dropweight)
        self.outer = DropConnectLinear(d_inner, d_model, dropweight=dropweight)
        self.layer_norm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.drop = Dropout(dropout, locked=locked_dropout)

    def forward(self, h_BTD: Tensor) -> Tensor:
        """Transform each position separately; shape (B, T, D) in and out."""
        inner = self.inner(self.layer_norm(h_BTD) if self.pre_lnorm else h_BTD)
        if self.activation == "relu" and self.training and self.drop.p and not self.drop.locked:
            active = relu_dropout(inner, self.drop.p)
        else:
            active = self.drop(activate(inner, self.activation))
        output = h_BTD + self.drop(self.outer(active))
        return output if self.pre_lnorm else self.layer_norm(output)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply the non-linearity of a feed-forward network."""
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.relu(x).square() if activation == "relu2" else F.relu(x)


class DecoderLayer(nn.Module):
    """One layer: attention of some kind, then feed-forward."""

    def __init__(self, attention: AttentionBlock, feed_forward: FeedForward) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward

    def forward(self, h_BTD: Tensor, **attention: Any) -> Tensor:
        """Run both blocks; keyword arguments go to the attention."""
        return self.feed_forward(self.attention(h_BTD, **attention))


def make_layer(kind: type[AttentionBlock], config: AttentionConfig) -> DecoderLayer:
    """Return a layer with a kind of attention, as the settings describe it."""
    block: dict[str, Any] = {
        "dropout": config.dropout,
        "dropweight": config.dropweight,
        "locked_dropout": config.locked_dropout,
        "pre_lnorm": config.pre_lnorm,
        "layer_norm_epsilon": config.layer_norm_epsilon,
    }
    heads: dict[str, Any] = {
        "n_head": config.n_head,
        "d_head": config.d_head,
        "dropatt": config.dropatt,
        "dropqkv": config.dropqkv,
    }
    return DecoderLayer(
        kind(config.d_model, **heads, **block),
        FeedForward(config.d_model, d_inner=config.d_inner, activation=config.activation, **block),
    )
