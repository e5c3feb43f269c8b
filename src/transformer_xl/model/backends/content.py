"""Attention by content and a bias for each head: what rotary positions and ALiBi leave to compute.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.model.attention.equation import common_rows, hidden_keys
from transformer_xl.model.backends.matmul import matmul_content_attention


def content_attention(
    q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *, first_BT: Tensor, bias_NTS: Tensor | None = None, dropatt: float = 0.0
) -> Tensor:
    """Attend from a segment to memory and segment: softmax(q_i·k_j / √H + bias) over the keys that a query sees.

    PyTorch's `scaled_dot_product_attention` computes it, but on a CPU with gradients batched products do: there PyTorch's own
    takes twice as long in bf16.

    Args:
        q_BTNH: queries of the segment.
        k_BSNH: keys of memory and segment.
        v_BSNH: values of memory and segment.
        first_BT: int64 (B or 1, T), the first key that each query sees; it sees all from there to its own.
        bias_NTS: what is added to each head's scores, without gradient; None: nothing.
        dropatt: probability of dropping an attention weight.

    Returns:
        Attended values, shape (B, T, N, H).
    """
    is_traced = torch.compiler.is_compiling()  # which cannot follow what depends on values
    if q_BTNH.device.type == "cpu" and q_BTNH.requires_grad and not is_traced:
        return matmul_content_attention(q_BTNH, k_BSNH, v_BSNH, first_BT=first_BT, bias_NTS=bias_NTS, dropatt=dropatt)
    hidden_B1TS = hidden_keys(first_BT if is_traced else common_rows(first_BT), k_BSNH.shape[1]).unsqueeze(1)
    mask = ~hidden_B1TS if bias_NTS is None else bias_NTS.masked_fill(hidden_B1TS, float("-inf"))
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BSNH, v_BSNH))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropatt).transpose(1, 2)
