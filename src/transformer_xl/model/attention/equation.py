"""Relative attention with memory: the paper's equation (Dai et al. 2019, sec. 3.3), in plain code.

Everything faster (`backends/`) is compared with this function, outputs and every gradient.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.model.attention.positions import rel_shift


def relative_attention(
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
    """Attend from a segment to memory and segment by content and by distance.

    The four terms of the paper, grouped as two products:

        A_ij = q_i·k_j + q_i·W_kR R_{i-j} + u·k_j + v·W_kR R_{i-j} = (q_i + u)·k_j + (q_i + v)·r_{i-j}
                (a)         (b)             (c)          (d)           (a) + (c)     (b) + (d)

    Args:
        q_BTNH: queries of the segment.
        k_BSNH: keys of memory and segment.
        v_BSNH: values of memory and segment.
        r_SNH: position keys W_kR R of the distances S-1, …, 0.
        r_w_bias: u, shape (N, H).
        r_r_bias: v, shape (N, H).
        first_BT: int64 (B or 1, T), the first key that each query sees, at most its own; it sees all from there to its own.
        dropatt: probability of dropping an attention weight.

    Returns:
        Attended values, shape (B, T, N, H).
    """
    weight_BNTS = relative_weights(q_BTNH, k_BSNH, r_SNH, r_w_bias=r_w_bias, r_r_bias=r_r_bias, first_BT=first_BT)
    weight_BNTS = F.dropout(weight_BNTS, dropatt, training=dropatt > 0)
    return torch.einsum("bnts,bsnh->btnh", weight_BNTS, v_BSNH)


def relative_weights(
    q_BTNH: Tensor, k_BSNH: Tensor, r_SNH: Tensor, *, r_w_bias: Tensor, r_r_bias: Tensor, first_BT: Tensor
) -> Tensor:
    """Return how much each query attends to each key, (B, N, T, S); the arguments are those of `relative_attention`."""
    scale = q_BTNH.shape[-1] ** -0.5
    content_score = torch.einsum("btnh,bsnh->bnts", q_BTNH + r_w_bias.to(q_BTNH.dtype), k_BSNH)
    position_score = rel_shift(torch.einsum("btnh,snh->bnts", q_BTNH + r_r_bias.to(q_BTNH.dtype), r_SNH))
    score_BNTS = (content_score + position_score) * scale
    hidden_BTS = hidden_keys(first_BT, k_BSNH.shape[1])
    return score_BNTS.masked_fill(hidden_BTS.unsqueeze(1), float("-inf")).softmax(dim=-1)


def first_keys(
    document_starts: Tensor | None,
    n_valid: Tensor,
    n_pad: Tensor | None,
    *,
    tgt_len: int,
    memory_length: int,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Decide which keys each query sees, and how much memory each row has afterwards.

    A query sees itself, and every earlier key of its own document that is real: not padding, not an unused place of a memory
    that is still filling up, and, with `window`, among the last `window` ones. So it sees all keys from a first one to its own,
    and the first says everything.

    Args:
        document_starts: bool (B, T), True where a token begins a new document; None: nowhere.
        n_valid: int64 (B,), how many of the last memory positions are real.
        n_pad: int64 (B,), padding tokens at the left of each row; None: none. The row's memory is taken to end where its
            padding ends.
        tgt_len: T.
        memory_length: M.
        window: how many keys a query may see, itself included (`same_length`); None: all.

    Returns:
        int64 (B, T), the first key that each query sees. And int64 (B,): how many of the last keys belong to the document that
        each row is in after the segment.
    """
    T, M = tgt_len, memory_length
    own_T = torch.arange(M, M + T, device=n_valid.device)
    first_BT = (M - n_valid if n_pad is None else M + n_pad - n_valid).unsqueeze(1).expand(-1, T)
    if document_starts is not None:
        first_BT = torch.where(document_starts, own_T, first_BT).cummax(dim=1).values
    n_own = M + T - first_BT[:, -1]
    if window is not None:
        first_BT = torch.maximum(first_BT, own_T - window + 1)
    return torch.minimum(first_BT, own_T), n_own  # a padding query sees itself alone; nobody reads what it computes


def hidden_keys(first_BT: Tensor, n_key: int) -> Tensor:
    """Return which keys queries must not see, as a mask.

    Args:
        first_BT: int64 (B, T), the first key that each query sees, of `first_keys`.
        n_key: S.

    Returns:
        bool (B, T, S), True where hidden.

    Example:
        >>> hidden_keys(torch.tensor([[0, 2]]), 3).int().tolist()
        [[[0, 0, 1], [1, 1, 0]]]
    """
    T = first_BT.shape[1]
    key_S = torch.arange(n_key, device=first_BT.device)
    own_T1 = torch.arange(n_key - T, n_key, device=first_BT.device).unsqueeze(1)
    return (key_S < first_BT.unsqueeze(-1)) | (key_S > own_T1)
