"""Attention with a learned vector and bias per distance, after Shaw et al. 2018 (arXiv 1803.02155), as the authors compare it.

    A_ij = q_i·k_j + q_i·r_{i-j} + u·k_j + b_{i-j}

Distances beyond the table share its farthest entry.

Reference: `RelLearnableMultiHeadAttn` (`attn_type` 1) of the authors' `pytorch/mem_transformer.py`.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, L layers, N heads, H d_head, D d_model.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.equation import key_distances, masked_softmax, rel_shift
from transformer_xl.model.attention.block import AttentionKind, FrozenPositions

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL


class ShawAttention(AttentionKind):
    """Multi-head attention over memory and segment by content and learned distances; the tables belong to the model."""

    name = "shaw"
    learns_positions = True

    @staticmethod
    def shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes of each layer's vectors and biases of distances, and of its u."""
        heads, table = (config.n_head, config.d_head), (config.n_layer, table_size(config))
        return {"r_emb": (*table, *heads), "r_bias": (*table, config.n_head), "r_w_bias": (config.n_layer, *heads)}

    @staticmethod
    def init_own(name: str, parameter: Tensor) -> bool:
        """Start the biases at 0."""
        if name == "r_bias":
            parameter.zero_()
        return name == "r_bias"

    @staticmethod
    def positions(model: "TransformerXL", n_key: int, *, backend: str) -> list[dict[str, Any]]:
        """Return each layer's vectors and biases of the distances S-1, …, 0, and its u."""
        r_emb, r_bias, u = (model.learned_positions[name] for name in ("r_emb", "r_bias", "r_w_bias"))
        distances = key_distances(n_key, clamp_len=None, device=model.device)
        rows = table_rows(distances, n_row=r_emb.shape[1], clamp_len=model.clamp_len)
        r_LSNH, r_bias_LSN = r_emb[:, rows], r_bias[:, rows]
        return [{"r_SNH": r_LSNH[i], "r_bias_SN": r_bias_LSN[i], "r_w_bias": u[i]} for i in range(len(u))]

    @staticmethod
    def frozen(model: "TransformerXL", n_slot: int) -> list[FrozenPositions]:
        """Return u, a v of zeros, and the rows of the tables that are used."""
        r_emb, r_bias, u = (model.learned_positions[name] for name in ("r_emb", "r_bias", "r_w_bias"))
        n_row = r_emb.shape[1]
        distances = key_distances(min(n_slot, n_row, model.clamp_len or n_row), clamp_len=None)
        rows = table_rows(distances, n_row=n_row, clamp_len=model.clamp_len)
        return [FrozenPositions(u[i], torch.zeros_like(u[i]), r_emb[i, rows], r_bias[i, rows]) for i in range(len(u))]

    def attend(self, q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *, first_BT: Tensor, **positions: Tensor) -> Tensor:
        """Return what each query gathers from the values; `positions` are those of `attention_weights`."""
        weight_BNTS = self.attention_weights(q_BTNH, k_BSNH, first_BT=first_BT, **positions)
        weight_BNTS = F.dropout(weight_BNTS, self.dropatt, training=self.training)
        return torch.einsum("bnts,bsnh->btnh", weight_BNTS.to(v_BSNH.dtype), v_BSNH)

    def attention_weights(
        self, q_BTNH: Tensor, k_BSNH: Tensor, *, first_BT: Tensor, r_SNH: Tensor, r_bias_SN: Tensor, r_w_bias: Tensor
    ) -> Tensor:
        """Return how much each query attends to each key; r and its bias are those of the distances S-1, …, 0."""
        content_score = torch.einsum("btnh,bsnh->bnts", q_BTNH + r_w_bias.to(q_BTNH.dtype), k_BSNH)
        by_distance = torch.einsum("btnh,snh->bnts", q_BTNH, r_SNH.to(q_BTNH.dtype))
        distance_score = by_distance + r_bias_SN.T.unsqueeze(1).to(q_BTNH.dtype)
        return masked_softmax((content_score + rel_shift(distance_score)) * self.d_head**-0.5, first_BT)


def table_rows(distance_S: Tensor, *, n_row: int, clamp_len: int | None) -> Tensor:
    """Return the rows of a position table for distances (in tokens); the last row is distance 0, the first the farthest.

    With `clamp_len`, only that many of the last rows are used.

    Example:
        >>> table_rows(torch.tensor([4, 3, 2, 1, 0]), n_row=4, clamp_len=3).tolist()
        [1, 1, 1, 2, 3]
    """
    farthest = (n_row if clamp_len is None else min(n_row, clamp_len)) - 1
    return n_row - 1 - distance_S.clamp(max=farthest)


def table_size(config: TransformerXLConfig) -> int:
    """Return how many rows a table of positions has.

    Raises:
        ConfigError: `max_klen` is None.
    """
    if config.max_klen is None:
        raise ConfigError(
            f"attention '{config.attention}' learns positions: max_klen (None) must say how many, such as tgt_len + mem_len"
        )
    return config.max_klen
