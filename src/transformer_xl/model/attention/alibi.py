"""Attention with linear biases (ALiBi; Press et al. 2021, arXiv 2108.12409, sec. 3): the farther a key, the lower its score.

    A_ij = q_i·k_j / √H - m_n (i - j)

Each head n has a slope m_n, which is no parameter. Distances beyond `clamp_len` count as `clamp_len`.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_xl.kernels.cpu_attention import content_attention
from transformer_xl.kernels.equation import key_distances, masked_softmax, rel_shift
from transformer_xl.model.attention.block import AttentionKind, FrozenPositions

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL


class AlibiAttention(AttentionKind):
    """Multi-head attention over memory and segment by content, less a head's slope times the distance."""

    name = "alibi"

    @staticmethod
    def positions(model: "TransformerXL", n_key: int, *, backend: str) -> list[dict[str, Any]]:
        """Return what the distances S-1, …, 0 add to scores, which all layers share."""
        return [{"bias_NS": _biases(model, n_key)}] * len(model.layers)

    @staticmethod
    def frozen(model: "TransformerXL", n_slot: int) -> list[FrozenPositions]:
        """Return the biases of all distances up to `clamp_len`, which a `Reader` divides by √H."""
        n_distance = n_slot if model.clamp_len is None else min(n_slot, model.clamp_len + 1)
        bias_PN = _biases(model, n_distance).T * math.sqrt(model.config.d_head)
        return [FrozenPositions(distance_bias=bias_PN)] * len(model.layers)

    def attend(self, q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *, first_BT: Tensor, bias_NS: Tensor) -> Tensor:
        """Return what each query gathers from the values."""
        bias_NTS = _by_key(bias_NS, q_BTNH.shape[1]).to(q_BTNH.dtype).contiguous()
        dropatt = self.dropatt if self.training else 0.0
        return content_attention(q_BTNH, k_BSNH, v_BSNH, first_BT=first_BT, bias_NTS=bias_NTS, dropatt=dropatt)

    def attention_weights(self, q_BTNH: Tensor, k_BSNH: Tensor, *, first_BT: Tensor, bias_NS: Tensor) -> Tensor:
        """Return how much each query attends to each key."""
        content_score = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * self.d_head**-0.5
        return masked_softmax(content_score + _by_key(bias_NS, q_BTNH.shape[1]), first_BT)


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


def _biases(model: "TransformerXL", n_key: int) -> Tensor:
    """Return what the distances S-1, …, 0 add to the scores of each head, (N, S), at least in fp32."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    distance_S = key_distances(n_key, clamp_len=model.clamp_len, device=model.device).to(dtype)
    slope_N = torch.tensor(slopes(model.config.n_head), dtype=dtype, device=model.device)
    return -torch.outer(slope_N, distance_S)


def _by_key(bias_NS: Tensor, tgt_len: int) -> Tensor:
    """Return what is added to the score of each key, (N, T, S); what it says of keys after a query means nothing."""
    return rel_shift(bias_NS.unsqueeze(1).expand(-1, tgt_len, -1))
