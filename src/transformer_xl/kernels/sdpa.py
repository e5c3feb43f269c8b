"""`relative_attention` by PyTorch's own function, which takes the scores of positions as a bias.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.kernels.equation import hidden_keys, rel_shift


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
