"""Attention with a learned vector and bias per distance, after Shaw et al. 2018 (arXiv 1803.02155), as the authors compare it.

    A_ij = q_i·k_j + q_i·r_{i-j} + u·k_j + b_{i-j}

Distances beyond the table share its farthest entry.

Reference: `RelLearnableMultiHeadAttn` (`attn_type` 1) of the authors' `pytorch/mem_transformer.py`.

Shapes: S keys, L layers, N heads, H d_head.
"""

from collections.abc import Mapping

from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.equation import Positions
from transformer_xl.model.attention.block import AttentionKind, Distances


class ShawAttention(AttentionKind):
    """Multi-head attention over memory and segment by content and learned distances; the tables belong to the model."""

    name = "shaw"
    learns_positions = True

    @classmethod
    def shapes(cls, config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        heads, table = (config.n_head, config.d_head), (config.n_layer, table_size(config))
        return {"r_emb": (*table, *heads), "r_bias": (*table, config.n_head), "r_w_bias": (config.n_layer, *heads)}

    @staticmethod
    def init_own(name: str, parameter: Tensor) -> bool:
        if name == "r_bias":
            parameter.zero_()
        return name == "r_bias"

    @classmethod
    def positions(cls, config: TransformerXLConfig, learned: Mapping[str, Tensor], distances: Distances) -> list[Positions]:
        r_emb, r_bias, u = (learned[name] for name in ("r_emb", "r_bias", "r_w_bias"))
        rows = table_rows(distances.tokens, n_row=r_emb.shape[1], clamp_len=distances.clamp_len)
        r_LSNH, b_LSN = r_emb[:, rows], r_bias[:, rows]
        return [Positions(u=u[i], r=r_LSNH[i], b=b_LSN[i]) for i in range(len(u))]


def table_rows(distance_S: Tensor, *, n_row: int, clamp_len: int | None) -> Tensor:
    """Return the rows of a position table for distances (in tokens); the last row is distance 0, the first the farthest.

    With `clamp_len`, only that many of the last rows are used.

    Example:
        >>> import torch
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
