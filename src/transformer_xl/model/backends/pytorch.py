"""`relative_attention` by PyTorch's own functions, which take the scores of positions as a bias.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from transformer_xl.model.attention.equation import hidden_keys, rel_shift


def sdpa_attention(
    q_BTNH: Tensor,
    k_BSNH: Tensor,
    v_BSNH: Tensor,
    r_SNH: Tensor,
    *,
    r_w_bias: Tensor,
    r_r_bias: Tensor,
    first_BT: Tensor,
    dropatt: float = 0.0,
) -> Tensor:
    """Compute `relative_attention` by `scaled_dot_product_attention`; the same arguments and result.

    Fast without gradients. Where the bias needs one, PyTorch falls back to plain products on a CPU, and `matmul` is faster.
    """
    dtype, scale = q_BTNH.dtype, q_BTNH.shape[-1] ** -0.5
    position_query = (q_BTNH + r_r_bias.to(dtype)) * scale
    bias_BNTS = rel_shift(torch.einsum("btnh,snh->bnts", position_query, r_SNH.to(dtype)))
    bias_BNTS = bias_BNTS.masked_fill(hidden_keys(first_BT, k_BSNH.shape[1]).unsqueeze(1), float("-inf"))
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH + r_w_bias.to(dtype), k_BSNH, v_BSNH))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_BNTS, dropout_p=dropatt, scale=scale)
    return attended.transpose(1, 2)


def flex_attention(
    q_BTNH: Tensor,
    k_BSNH: Tensor,
    v_BSNH: Tensor,
    r_SNH: Tensor,
    *,
    r_w_bias: Tensor,
    r_r_bias: Tensor,
    first_BT: Tensor,
    dropatt: float = 0.0,
) -> Tensor:
    """Compute `relative_attention` by `flex_attention`; the same arguments and result, without dropout.

    Scores of positions are looked up in one tensor (B, N, T, S). Blocks of keys that no query of a block sees are skipped. On a
    GPU it is compiled; elsewhere it runs uncompiled, for comparison. The gradient of the looked-up scores is added by atomics,
    in no fixed order, so two runs may differ in the last bits.
    """
    assert dropatt == 0.0, "flex_attention has no dropout"
    dtype, scale = q_BTNH.dtype, q_BTNH.shape[-1] ** -0.5
    (B, T, _, _), S = q_BTNH.shape, k_BSNH.shape[1]
    position_BNTS = torch.einsum("btnh,snh->bnts", (q_BTNH + r_r_bias.to(dtype)) * scale, r_SNH.to(dtype))
    is_shared = first_BT.shape[0] == 1

    def add_position(score: Tensor, b: Tensor, n: Tensor, t: Tensor, s: Tensor) -> Tensor:
        column = torch.clamp(s + (T - 1) - t, max=S - 1)  # beyond lie keys that the mask hides
        return score + position_BNTS[b, n, t, column]

    def is_visible(b: Tensor, _: Tensor, t: Tensor, s: Tensor) -> Tensor:
        # torch 2.10 takes only tensors for an index
        return (s >= first_BT[b * 0 if is_shared else b, t]) & (s <= t + (S - T))

    device = q_BTNH.device
    block_mask = flex.create_block_mask(is_visible, None if is_shared else B, None, T, S, device=device)
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH + r_w_bias.to(dtype), k_BSNH, v_BSNH))
    attend = _compiled_flex() if device.type == "cuda" else flex.flex_attention
    return attend(q, k, v, score_mod=add_position, block_mask=block_mask, scale=scale).transpose(1, 2)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex.flex_attention, dynamic=False)
