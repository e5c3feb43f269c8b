"""`relative_attention` by PyTorch's `flex_attention`, which looks scores of positions up in one tensor (B, N, T, S).

Blocks of keys that no query of a block sees are skipped. On a GPU it is compiled; elsewhere it runs uncompiled, for comparison.
The gradient of the looked-up scores is added by atomics, in no fixed order: runs are not the same to the last bit.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex


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
    """Compute `relative_attention`; the same arguments and result, without dropout."""
    assert dropatt == 0.0, "flex_attention has no dropout"
    dtype, scale = q_BTNH.dtype, q_BTNH.shape[-1] ** -0.5
    (B, T, _, _), S = q_BTNH.shape, k_BSNH.shape[1]
    position_BNTS = torch.einsum("btnh,snh->bnts", (q_BTNH + r_r_bias.to(dtype)) * scale, r_SNH.to(dtype))
    is_shared = first_BT.shape[0] == 1

    def add_position(score: Tensor, b: Tensor, n: Tensor, t: Tensor, s: Tensor) -> Tensor:
        column = torch.clamp(s + (T - 1) - t, max=S - 1)  # beyond lie keys that the mask hides
        return score + position_BNTS[b, n, t, column]

    def is_visible(b: Tensor, _: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s >= first_BT[0 if is_shared else b, t]) & (s <= t + (S - T))

    device = q_BTNH.device
    block_mask = flex.create_block_mask(is_visible, None if is_shared else B, None, T, S, device=device)
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH + r_w_bias.to(dtype), k_BSNH, v_BSNH))
    attend = _compiled() if device.type == "cuda" else flex.flex_attention
    return attend(q, k, v, score_mod=add_position, block_mask=block_mask, scale=scale).transpose(1, 2)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex.flex_attention, dynamic=False)
