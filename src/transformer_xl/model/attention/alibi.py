"""Attention with linear biases (ALiBi; Press et al. 2021, arXiv 2108.12409, sec. 3): the farther a key, the lower its score.

    A_ij = q_i·k_j / √H - m_n (i - j)

Each head n has a slope m_n, which is no parameter. Distances beyond `clamp_len` count as `clamp_len`.

Shapes: S keys, N heads, H d_head.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.kernels.equation import Positions
from transformer_xl.model.attention.block import AttentionKind, Distances


class AlibiAttention(AttentionKind):
    """Multi-head attention over memory and segment by content, less a head's slope times the distance."""

    name = "alibi"

    @classmethod
    def positions(cls, config: TransformerXLConfig, learned: Mapping[str, Tensor], distances: Distances) -> list[Positions]:
        """Return b = -m (i - j) √H, at least in fp32, which all layers share; scores are divided by √H."""
        dtype = torch.promote_types(distances.dtype, torch.float32)
        slope_N = torch.tensor(slopes(config.n_head), dtype=dtype, device=distances.device) * math.sqrt(config.d_head)
        return [Positions(b=-torch.outer(distances.limited.to(dtype), slope_N))] * config.n_layer


def slopes(n_head: int) -> list[float]:
    """Return m of each head.

    For N a power of two they are 2^(-8/N), 2^(-16/N), …, 2^-8. Otherwise, as in the authors' code, those of the next lower
    power of two, then every other one of the next higher power, from its first on.

    Example:
        >>> slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> slopes(3)
        [0.0625, 0.00390625, 0.25]
    """
    power = 1 << n_head.bit_length() - 1
    lower = [2.0 ** (-8 * n / power) for n in range(1, power + 1)]
    return lower + [2.0 ** (-4 * n / power) for n in range(1, 2 * (n_head - power), 2)]
