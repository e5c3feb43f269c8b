"""`relative_attention` by PyTorch's own function, which takes the scores of positions as a bias.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.kernels.equation import Positions, common_rows, hidden_keys, plus, rel_shift


def sdpa_attention(
    q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, positions: Positions, *, first_BT: Tensor, dropatt: float = 0.0
) -> Tensor:
    """Compute `relative_attention` by `scaled_dot_product_attention`; the same arguments and result.

    Fast without gradients. Where the bias needs one, PyTorch falls back to plain products on a CPU, and `matmul` is faster.
    """
    dtype, T, S, scale = q_BTNH.dtype, q_BTNH.shape[1], k_BSNH.shape[1], q_BTNH.shape[-1] ** -0.5
    bias = torch.zeros((), dtype=dtype, device=q_BTNH.device)
    if positions.r is not None:
        position_query = plus(q_BTNH, positions.v) * scale
        bias = rel_shift(torch.einsum("btnh,snh->bnts", position_query, positions.r[:S].to(dtype)))
    if positions.b is not None:
        b_NTS = (positions.b * scale).T.unsqueeze(1).expand(-1, T, -1)
        bias = bias + rel_shift(b_NTS.to(dtype))
    hidden_B1TS = hidden_keys(common_rows(first_BT), S).unsqueeze(1)
    mask = bias.masked_fill(hidden_B1TS, float("-inf")) if bias.dim() else ~hidden_B1TS
    q, k, v = (x.transpose(1, 2) for x in (plus(q_BTNH, positions.u), k_BSNH, v_BSNH))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropatt, scale=scale).transpose(1, 2)
