"""What a kind of attention is made of: one class that says what its positions are and how its blocks attend.

A kind of your own is a subclass of `AttentionBlock`, and a line in the table of kinds (`transformer_xl.kinds`) that says where
it is. It has to say how a block attends (`forward`). The rest has a default: what is learned of positions (`shapes`), what a
layer is told of them (`positions`), how they are added to the states (`enter`), the weights by themselves (`weights`), and the
form in which inference computes with kept keys (`frozen`).

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model, P distances told apart.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.model.attention.equation import hidden_keys
from transformer_xl.model.dropout import DropConnectLinear, Dropout
from transformer_xl.model.memory import join
from transformer_xl.model_config import TransformerXLConfig


class Attending(Protocol):
    """What a kind of attention sees of its model.

    Attributes:
        config: its settings.
        layers: its layers, each with a block of the kind as `attention`.
        clamp_len: largest distance told apart; None: no limit.
        drop_input: dropout on what enters the first layer.
        training: whether dropout is on.
    """

    config: TransformerXLConfig
    layers: nn.ModuleList
    clamp_len: int | None
    drop_input: Dropout
    training: bool

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the memory."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def learned_positions(self) -> Mapping[str, Tensor]:
        """The parameters that `AttentionBlock.shapes` asked for, by name."""
        ...


class FrozenPositions(NamedTuple):
    """What one layer's scores are made of besides queries and keys, when weights no longer change.

    A_ij = (q_i + content_bias)·k_j + (q_i + position_bias)·r_{i-j} + b_{i-j}
    """

    content_bias: Tensor
    """u, (N, H)."""
    position_bias: Tensor
    """v, (N, H)."""
    position_keys: Tensor
    """r of the distances P - 1, …, 0; (P, N, H). Farther ones have the key of P - 1."""
    distance_bias: Tensor | None
    """b, what a distance adds to a score whatever the query, (P, N); None: nothing."""


class AttentionBlock(nn.Module, ABC):
    """What attention of every kind has in common: projections, residual connection and layer norm.

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

    @staticmethod
    def shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the parameters that say where keys stand and belong to the whole model.

        Raises:
            ConfigError: settings that only a run knows are missing.
        """
        return {}

    @staticmethod
    def positions(model: Attending, n_key: int, *, backend: str) -> list[dict[str, Any]]:
        """Return what each layer's block is told about positions, as arguments of its `forward`.

        Args:
            model: whose layers they are.
            n_key: S.
            backend: name of the attention backend, for kinds that have a choice.

        Returns:
            The arguments of one layer after another.
        """
        return [{} for _ in model.layers]

    @staticmethod
    def enter(model: Attending, layer: int, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return memory and segment as they enter a layer: before the first, dropout; some kinds add positions here.

        Args:
            model: whose layer it is.
            layer: its number, from 0.
            mem_BMD: what the layer remembers.
            h_BTD: the segment; before the first layer, its embedding.
            n_pad: int64 (B,), padding tokens at the left of each row; None: none.

        Returns:
            Memory and segment.
        """
        return mem_BMD, model.drop_input(h_BTD) if layer == 0 else h_BTD

    @staticmethod
    def frozen(model: Attending, n_slot: int) -> list[FrozenPositions]:
        """Return what a `Reader` computes with, layer by layer; only for kinds whose keys can be kept.

        Args:
            model: whose layers they are.
            n_slot: distances that can occur.
        """
        raise NotImplementedError("the table of kinds says of this one that keys cannot be kept")

    @abstractmethod
    def forward(self, h_BTD: Tensor, *_: Any, **told: Any) -> Tensor:
        """Attend from the segment to memory and segment.

        Args:
            h_BTD: the segment as it enters.
            **told: `mem_BMD`, what the layer remembers; `first_BT`, int64 (B, T), the first key that each query sees, see
                `first_keys`; `n_pad`, int64 (B,), padding tokens at the left of each row, or None; and what `positions`
                returned for the layer.

        Returns:
            (B, T, D): what enters, what the heads found added to it.
        """

    def weights(self, h_BTD: Tensor, *_: Any, **told: Any) -> tuple[Tensor, Tensor]:
        """Return how much each query attends to each key, here by content alone.

        Args:
            h_BTD: the segment as it enters.
            **told: the same as for `forward`.

        Returns:
            Weights (B, N, T, S) without dropout, and bool (B or 1, T, S), True where a query must not see a key.
        """
        q, k = self.project(h_BTD, told["mem_BMD"], told.get("n_pad"))[:2]
        return content_weights(q, k, told["first_BT"])

    def position_weights(self) -> list[Tensor]:
        """Return the matrices of this block that multiply distances instead of tokens."""
        return []

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


def content_weights(q_BTNH: Tensor, k_BSNH: Tensor, first_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return scaled dot-product weights (B, N, T, S), and which keys are hidden, bool (B or 1, T, S)."""
    hidden_BTS = hidden_keys(first_BT, k_BSNH.shape[1])
    score_BNTS = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * q_BTNH.shape[-1] ** -0.5
    return score_BNTS.masked_fill(hidden_BTS.unsqueeze(1), float("-inf")).softmax(dim=-1), hidden_BTS
