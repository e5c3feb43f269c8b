"""Relative attention with memory: the paper's equation (Dai et al. 2019, sec. 3.3), in plain code.

Everything faster (`backends.py`) is compared with this function, outputs and every gradient.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.model.positions import rel_shift


def relative_attention(
    q_BTNH: Tensor,
    k_BSNH: Tensor,
    v_BSNH: Tensor,
    r_SNH: Tensor,
    *,
    r_w_bias: Tensor,
    r_r_bias: Tensor,
    hidden_BTS: Tensor,
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
        hidden_BTS: bool, True where query t must not see key s; shape (B or 1, T, S). Every query sees at least one key.
        dropatt: probability of dropping an attention weight.

    Returns:
        Attended values, shape (B, T, N, H).
    """
    scale = q_BTNH.shape[-1] ** -0.5
    content_score = torch.einsum("btnh,bsnh->bnts", q_BTNH + r_w_bias.to(q_BTNH.dtype), k_BSNH)
    position_score = rel_shift(torch.einsum("btnh,snh->bnts", q_BTNH + r_r_bias.to(q_BTNH.dtype), r_SNH))
    score_BNTS = (content_score + position_score) * scale
    score_BNTS = score_BNTS.masked_fill(hidden_BTS.unsqueeze(1), float("-inf"))
    weight_BNTS = F.dropout(score_BNTS.softmax(dim=-1), dropatt, training=dropatt > 0)
    return torch.einsum("bnts,bsnh->btnh", weight_BNTS, v_BSNH)


def hidden_keys(
    document_starts: Tensor | None,
    n_valid: Tensor,
    n_pad: Tensor | None,
    *,
    tgt_len: int,
    memory_length: int,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Decide which keys each query must not see, and how much memory each row has afterwards.

    A query sees itself, and every earlier key of its own document that is real: not padding, not an unused place of a memory
    that is still filling up, and, with `window`, among the last `window` ones.

    Args:
        document_starts: bool (B, T), True where a token begins a new document; None: nowhere.
        n_valid: int64 (B,), how many of the last memory positions are real.
        n_pad: int64 (B,), padding tokens at the left of each row; None: none. The row's memory is taken to end where its
            padding ends.
        tgt_len: T.
        memory_length: M.
        window: how many keys a query may see, itself included (`same_length`); None: all.

    Returns:
        bool (B or 1, T, S), True where hidden; one row stands for all where they agree. And int64 (B,): how many of the last
        keys belong to the document that each row is in after the segment.
    """
    T, M = tgt_len, memory_length
    device = n_valid.device
    query_T1 = torch.arange(M, M + T, device=device).unsqueeze(1)
    key_S = torch.arange(M + T, device=device)
    hidden_TS = key_S > query_T1
    if window is not None:
        hidden_TS = hidden_TS | (key_S <= query_T1 - window)

    first_B1 = (M - n_valid if n_pad is None else M + n_pad - n_valid).unsqueeze(1)
    if document_starts is None:
        first_BT = first_B1
        if n_pad is None and bool((n_valid == M).all()):
            return hidden_TS.unsqueeze(0), torch.full_like(n_valid, M + T)
    else:
        begins = torch.where(document_starts, query_T1.squeeze(1), first_B1)
        first_BT = begins.cummax(dim=1).values
    foreign_BTS = key_S < first_BT.unsqueeze(-1)
    itself_TS = key_S == query_T1  # a padding query has no other key to see; nobody reads what it computes
    return (hidden_TS | foreign_BTS) & ~itself_TS, M + T - first_BT[:, -1]
