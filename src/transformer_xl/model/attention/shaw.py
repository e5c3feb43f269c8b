"""Attention with a learned vector and bias per distance, after Shaw et al. 2018 (arXiv 1803.02155), as the authors compare it.

    A_ij = q_i·k_j + q_i·r_{i-j} + u·k_j + b_{i-j}

Distances beyond the table share its farthest entry.

Reference: `RelLearnableMultiHeadAttn` (`attn_type` 1) of the authors' `pytorch/mem_transformer.py`.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, L rows of the tables, N heads, H d_head, D d_model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.errors import ConfigError
from transformer_xl.model.attention.block import Attending, AttentionBlock, FrozenPositions
from transformer_xl.model.attention.equation import hidden_keys
from transformer_xl.model.attention.positions import key_distances, rel_shift
from transformer_xl.model_config import TransformerXLConfig


class ShawAttention(AttentionBlock):
    """Multi-head attention over memory and segment by content and learned distances; the tables belong to the model."""

    @staticmethod
    def shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        """Return those of each layer's vectors and biases of distances, and of its u."""
        heads, table = (config.n_head, config.d_head), (config.n_layer, table_size(config))
        return {"r_emb": (*table, *heads), "r_bias": (*table, config.n_head), "r_w_bias": (config.n_layer, *heads)}

    @staticmethod
    def positions(model: Attending, n_key: int, *, backend: str) -> list[dict[str, Any]]:
        """Return each layer's vectors and biases of the distances S-1, …, 0, and its u."""
        r_emb, r_bias, u = (model.learned_positions[name] for name in ("r_emb", "r_bias", "r_w_bias"))
        distances = key_distances(n_key, clamp_len=None, device=model.device)
        rows = table_rows(distances, n_row=r_emb.shape[1], clamp_len=model.clamp_len)
        r_LSNH, r_bias_LSN = r_emb[:, rows], r_bias[:, rows]
        return [{"r_SNH": r_LSNH[i], "r_bias_SN": r_bias_LSN[i], "r_w_bias": u[i]} for i in range(len(u))]

    @staticmethod
    def frozen(model: Attending, n_slot: int) -> list[FrozenPositions]:
        """Return u, no v, and the rows of the tables that are told apart."""
        r_emb, r_bias, u = (model.learned_positions[name] for name in ("r_emb", "r_bias", "r_w_bias"))
        n_row = r_emb.shape[1]
        distances = key_distances(min(n_slot, n_row, model.clamp_len or n_row), clamp_len=None)
        rows = table_rows(distances, n_row=n_row, clamp_len=model.clamp_len)
        return [FrozenPositions(u[i], torch.zeros_like(u[i]), r_emb[i, rows], r_bias[i, rows]) for i in range(len(u))]

    def forward(
        self,
        h_BTD: Tensor,
        *,
        mem_BMD: Tensor,
        first_BT: Tensor,
        n_pad: Tensor | None = None,
        r_SNH: Tensor,
        r_bias_SN: Tensor,
        r_w_bias: Tensor,
    ) -> Tensor:
        """Attend from the segment to memory and segment; r and its bias are those of the distances S-1, …, 0."""
        q, k, v = self.project(h_BTD, mem_BMD, n_pad)
        weight_BNTS = shaw_weights(q, k, r_SNH, r_bias_SN=r_bias_SN, r_w_bias=r_w_bias, first_BT=first_BT)
        weight_BNTS = F.dropout(weight_BNTS, self.dropatt, training=self.training)
        return self.add(h_BTD, torch.einsum("bnts,bsnh->btnh", weight_BNTS.to(v.dtype), v))

    def weights(
        self,
        h_BTD: Tensor,
        *,
        mem_BMD: Tensor,
        first_BT: Tensor,
        n_pad: Tensor | None = None,
        r_SNH: Tensor,
        r_bias_SN: Tensor,
        r_w_bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return how much each query attends to each key."""
        q, k, _ = self.project(h_BTD, mem_BMD, n_pad)
        weight_BNTS = shaw_weights(q, k, r_SNH, r_bias_SN=r_bias_SN, r_w_bias=r_w_bias, first_BT=first_BT)
        return weight_BNTS, hidden_keys(first_BT, k.shape[1])


def shaw_weights(
    q_BTNH: Tensor, k_BSNH: Tensor, r_SNH: Tensor, *, r_bias_SN: Tensor, r_w_bias: Tensor, first_BT: Tensor
) -> Tensor:
    """Return how much each query attends to each key, (B, N, T, S); the arguments are those of `ShawAttention.forward`."""
    content_score = torch.einsum("btnh,bsnh->bnts", q_BTNH + r_w_bias.to(q_BTNH.dtype), k_BSNH)
    by_distance = torch.einsum("btnh,snh->bnts", q_BTNH, r_SNH.to(q_BTNH.dtype))
    distance_score = by_distance + r_bias_SN.T.unsqueeze(1).to(q_BTNH.dtype)
    score_BNTS = (content_score + rel_shift(distance_score)) * q_BTNH.shape[-1] ** -0.5
    hidden_BTS = hidden_keys(first_BT, k_BSNH.shape[1])
    return score_BNTS.masked_fill(hidden_BTS.unsqueeze(1), float("-inf")).softmax(dim=-1)


def table_rows(distance_S: Tensor, *, n_row: int, clamp_len: int | None) -> Tensor:
    """Return the rows of a position table that belong to distances; the last row is distance 0, the first the farthest.

    Args:
        distance_S: int64 (S,), in tokens.
        n_row: L.
        clamp_len: use the last `clamp_len` rows only; None: all.

    Example:
        >>> table_rows(torch.tensor([4, 3, 2, 1, 0]), n_row=4, clamp_len=3).tolist()
        [1, 1, 1, 2, 3]
    """
    farthest = (n_row if clamp_len is None else min(n_row, clamp_len)) - 1
    return n_row - 1 - distance_S.clamp(max=farthest)


def table_size(config: TransformerXLConfig) -> int:
    """Return how many rows a table of positions has.

    Raises:
        ConfigError: settings do not say so.
    """
    if config.max_klen is None:
        raise ConfigError(
            f"attention '{config.attention}' learns positions: max_klen (None) must say how many, such as tgt_len + mem_len"
        )
    return config.max_klen
