"""The blocks of a layer: attention, of which the relative one is here, and the position-wise feed-forward network.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model.
"""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.model.backends import Attention
from transformer_xl.model.dropout import DropConnectLinear, Dropout, relu_dropout
from transformer_xl.model.memory import join
from transformer_xl.model_config import AttentionConfig

Activation = Literal["relu", "gelu", "relu2"]


class AttentionBlock(nn.Module):
    """What attention of every kind has in common: projections, residual connection and layer norm.

    A kind adds a `forward(h_BTD, *, mem_BMD, first_BT, n_pad, …)` that projects, attends, and adds.

    Args:
        d_model: D.
        n_head: N.
        d_head: H.
        dropout: on the output.
        dropatt: on attention weights.
        dropqkv: on queries, keys and values.
        dropweight: on the weights of the projections.
        locked_dropout: dropout of the output and of queries, keys and values is the same at all positions of a row.
        pre_lnorm: layer norm before the block instead of after it.
        layer_norm_epsilon: added to the variance.
    """

    normalizes_queries = True
    """With `pre_lnorm`: whether queries, too, are projected from normalized states."""

    def __init__(
        self,
        d_model: int,
        *,
        n_head: int,
        d_head: int,
        dropout: float = 0.0,
        dropatt: float = 0.0,
        dropqkv: float = 0.0,
        dropweight: float = 0.0,
        locked_dropout: bool = False,
        pre_lnorm: bool = False,
        layer_norm_epsilon: float = 1e-5,
    ) -> None:
        super().__init__()
        self.n_head, self.d_head = n_head, d_head
        self.dropatt, self.pre_lnorm = dropatt, pre_lnorm
        self.qkv_net = DropConnectLinear(d_model, 3 * n_head * d_head, bias=False, dropweight=dropweight)
        self.o_net = DropConnectLinear(n_head * d_head, d_model, bias=False, dropweight=dropweight)
        self.layer_norm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.drop = Dropout(dropout, locked=locked_dropout)
        self.drop_qkv = Dropout(dropqkv, locked=locked_dropout)

    def project(self, h_BTD: Tensor, mem_BMD: Tensor, n_pad: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, N, H) of the segment, and keys and values (B, S, N, H) of memory and segment."""
        h, mem = (self.layer_norm(h_BTD), self.layer_norm(mem_BMD)) if self.pre_lnorm else (h_BTD, mem_BMD)
        heads = (self.n_head, self.d_head)
        w_q, w_kv = self.qkv_net.drawn_weight().tensor_split([self.n_head * self.d_head])
        # memory and segment are projected apart: no gradient is computed for the hidden states of the memory
        kv = self.drop_qkv(join(F.linear(mem, w_kv), F.linear(h, w_kv), n_pad)).unflatten(-1, (2, *heads))
        q = self.drop_qkv(F.linear(h if self.normalizes_queries else h_BTD, w_q)).unflatten(-1, heads)
        return q, kv[:, :, 0], kv[:, :, 1]

    def add(self, h_BTD: Tensor, attended_BTNH: Tensor) -> Tensor:
        """Project what the heads found and add it to the segment's states."""
        output = h_BTD + self.drop(self.o_net(attended_BTNH.flatten(-2)))
        return output if self.pre_lnorm else self.layer_norm(output)


class RelativeAttention(AttentionBlock):
    """Multi-head attention over memory and segment by content and sinusoids of distances (Dai et al. 2019, sec. 3.3).

    Reference: `RelPartialLearnableMultiHeadAttn` of the authors' `pytorch/mem_transformer.py`. Deviation: queries are
    projected for the segment alone; the original projects them for the memory too and throws them away.

    Args:
        d_model: D.
        dropweight: on the weights of the projections.
        block: the other arguments of `AttentionBlock`.
    """

    def __init__(self, d_model: int, *, dropweight: float = 0.0, **block: Any) -> None:
        super().__init__(d_model, dropweight=dropweight, **block)
        self.r_net = DropConnectLinear(d_model, self.n_head * self.d_head, bias=False, dropweight=dropweight)

    def forward(
        self,
        h_BTD: Tensor,
        *,
        mem_BMD: Tensor,
        r_SD: Tensor,
        r_w_bias: Tensor,
        r_r_bias: Tensor,
        first_BT: Tensor,
        attend: Attention,
        n_pad: Tensor | None = None,
    ) -> Tensor:
        """Attend from the segment to memory and segment by `attend`; see `relative_attention` for the other arguments."""
        q, k, v = self.project(h_BTD, mem_BMD, n_pad)
        attended = attend(
            q,
            k,
            v,
            self.r_net(r_SD).unflatten(-1, (self.n_head, self.d_head)),
            r_w_bias=r_w_bias,
            r_r_bias=r_r_bias,
            first_BT=first_BT,
            dropatt=self.dropatt if self.training else 0.0,
        )
        return self.add(h_BTD, attended)


class FeedForward(nn.Module):
    """Two linear maps with a non-linearity between, with residual connection and layer norm.

    Reference: `PositionwiseFF` of the authors' `pytorch/mem_transformer.py`.

    Args:
        d_model: D.
        d_inner: width between the maps.
        dropout: after each map.
        dropweight: on the weights of both maps.
        locked_dropout: dropout after each map is the same at all positions of a row.
        pre_lnorm: layer norm before the block instead of after it.
        activation: `relu` as in the paper, `gelu`, or `relu2` (relu squared).
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
        """Transform every position by itself; shape (B, T, D) in and out."""
        inner = self.inner(self.layer_norm(h_BTD) if self.pre_lnorm else h_BTD)
        if self.activation == "relu" and self.training and self.drop.p and not self.drop.locked:
            active = relu_dropout(inner, self.drop.p)
        else:
            active = self.drop(activate(inner, self.activation))
        output = h_BTD + self.drop(self.outer(active))
        return output if self.pre_lnorm else self.layer_norm(output)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply the non-linearity of a feed-forward network."""
    if activation == "gelu":
        return F.gelu(x)
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
    """Return a layer whose attention is of a kind, as the settings describe it."""
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
