"""Relative attention with memory: the paper's equation (Dai et al. 2019, sec. 3.3), R and the relative shift, in plain code.

Tests compare everything faster in this folder with `relative_attention`, outputs and every gradient.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Positions(NamedTuple):
    """What one layer's scores are made of besides queries and keys; what is None is left out.

    A kind of attention is a choice of these: the paper's has u, v and r, Shaw's u, r and b, ALiBi b, rotary positions turns,
    and absolute positions states.
    """

    u: Tensor | None = None
    """(N, H), added to queries that are compared with keys."""
    v: Tensor | None = None
    """(N, H), added to queries that are compared with position keys."""
    r: Tensor | None = None
    """Position keys of the distances S-1, …, 0; (S, N, H). The paper's are R (S, D) until a block completes them. Rows of
    zeros may follow, which fused kernels read."""
    b: Tensor | None = None
    """What the distances S-1, …, 0 add to a score whatever the query, (S, N)."""
    turns: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the angles by which the keys of all S positions are turned, (S, 1, H / 2); `AttentionKind.turns`."""
    states: Tensor | None = None
    """Added to the S states of memory and segment when they enter the layer, (S, D); the kind `counts_from_end`."""


def relative_attention(
    q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, positions: Positions, *, first_BT: Tensor, dropatt: float = 0.0
) -> Tensor:
    """Attend from a segment to memory and segment by content and by distance.

    The four terms of the paper, grouped as two products: how a content fits a content (a), how it looks for a distance (b),
    and how much a content (c) or a distance (d) is worth a look, whoever asks. So u and v stand where the position of the query
    stood, which must not matter.

        A_ij = q_i·k_j + q_i·W_kR R_{i-j} + u·k_j + v·W_kR R_{i-j} = (q_i + u)·k_j + (q_i + v)·r_{i-j}
                (a)         (b)             (c)          (d)           (a) + (c)     (b) + (d)

    Args:
        q_BTNH: queries of the segment.
        k_BSNH: keys of memory and segment.
        v_BSNH: values of memory and segment.
        positions: u, v, r, and for other kinds of attention b_{i-j}, which is added to A_ij.
        first_BT: int64 (B or 1, T), the first key that each query sees, at most its own; it sees all from there to its own.
        dropatt: probability of dropping an attention weight.

    Returns:
        Attended values, shape (B, T, N, H).
    """
    weight_BNTS = relative_weights(q_BTNH, k_BSNH, positions, first_BT=first_BT)
    weight_BNTS = F.dropout(weight_BNTS, dropatt, training=dropatt > 0)
    return torch.einsum("bnts,bsnh->btnh", weight_BNTS.to(v_BSNH.dtype), v_BSNH)


def relative_weights(q_BTNH: Tensor, k_BSNH: Tensor, positions: Positions, *, first_BT: Tensor) -> Tensor:
    """Return how much each query attends to each key, (B, N, T, S); the arguments are those of `relative_attention`."""
    dtype, T, S, scale = q_BTNH.dtype, q_BTNH.shape[1], k_BSNH.shape[1], q_BTNH.shape[-1] ** -0.5
    score_BNTS = torch.einsum("btnh,bsnh->bnts", plus(q_BTNH, positions.u), k_BSNH)  # (a) + (c)
    if positions.r is not None:
        position_score = torch.einsum("btnh,snh->bnts", plus(q_BTNH, positions.v), positions.r[:S].to(dtype))  # (b) + (d)
        score_BNTS = score_BNTS + rel_shift(position_score)
    if positions.b is not None:
        score_BNTS = score_BNTS + rel_shift(positions.b.T.unsqueeze(1).expand(-1, T, -1))
    return masked_softmax(score_BNTS * scale, first_BT)


def plus(q: Tensor, bias: Tensor | None) -> Tensor:
    """Return queries with u or v, if there is one, in the type of the queries."""
    return q if bias is None else q + bias.to(q.dtype)


def masked_softmax(score_BNTS: Tensor, first_BT: Tensor) -> Tensor:
    """Return a softmax of scores over the keys that each query sees."""
    hidden_BTS = hidden_keys(first_BT, score_BNTS.shape[-1])
    return score_BNTS.masked_fill(hidden_BTS.unsqueeze(1), float("-inf")).softmax(dim=-1)


def sinusoids(distances: Tensor, d_model: int, dtype: torch.dtype | None = None) -> Tensor:
    """Encode distances (S,) in tokens by sinusoids (S, D), the paper's R (Vaswani et al. 2017, sec. 3.5).

    D / 2 sines come first, then D / 2 cosines: the order of the authors' code (`PositionalEmbedding` in
    `pytorch/mem_transformer.py`), not the interleaved one. They are computed in `dtype` (None: the default), but at least fp32.

    Example:
        >>> sinusoids(torch.tensor([0, 1]), 4).tolist()[0]
        [0.0, 0.0, 1.0, 1.0]
    """
    dtype = dtype or torch.get_default_dtype()
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, d_model, 2, device=distances.device, dtype=exact) / d_model
    angles = torch.outer(distances.to(exact), 1.0 / 10000.0**exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def key_distances(n_key: int, *, clamp_len: int | None, device: torch.device | None = None) -> Tensor:
    """Return the distances S-1, …, 1, 0 of the position keys, at most `clamp_len`: farther ones share its encoding.

    Example:
        >>> key_distances(5, clamp_len=2).tolist()
        [2, 2, 2, 1, 0]
    """
    distances = torch.arange(n_key - 1, -1, -1, device=device)
    return distances if clamp_len is None else distances.clamp(max=clamp_len)


def rel_shift(score_BNTS: Tensor) -> Tensor:
    """Re-index position scores (…, T, S), terms (b) + (d) of A^rel, from distance to key (Dai et al. 2019, appendix B).

    Every pair of query and key has its distance, but there are only S distances. So queries are scored against these, and then
    numbers are moved. Column j of the input scores a query against distance S-1-j; column s of the output scores it against key
    s, which lies M + t - s before query t. So `out[t, s] = in[t, s + T - 1 - t]`: row t moves left by T - 1 - t.

    One column of padding makes each row one element longer, so reading the same numbers in rows of the old length moves every
    row by one more. Entries with s > M + t come from the next row and mean nothing; the causal mask must cover them.

    Raises:
        ValueError: S < T, so no shift keeps every query's own key.

    Example:
        >>> x = torch.arange(6.0).view(1, 1, 2, 3)        # T=2, M=1
        >>> rel_shift(x)[0, 0].tril(1).tolist()
        [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    """
    T, S = score_BNTS.shape[-2:]
    if S < T:
        raise ValueError(f"keys ({S}) must include the segment's own positions ({T})")
    padded = F.pad(score_BNTS, (1, 0)).flatten(-2)
    return padded[..., T:].unflatten(-1, (T, S))


def common_rows(first_BT: Tensor) -> Tensor:
    """Return one row for all, (1, T), if they are alike and on a CPU; elsewhere, looking at values would mean waiting.

    A compiler cannot follow what depends on values.
    """
    looks = first_BT.device.type == "cpu" and not torch.compiler.is_compiling() and len(first_BT) > 1
    return first_BT[:1] if looks and (first_BT == first_BT[0]).all() else first_BT


def hidden_keys(first_BT: Tensor, n_key: int) -> Tensor:
    """Return a mask (B, T, S), True where a query must not see a key; `model/mask.py` computes its first one.

    Example:
        >>> hidden_keys(torch.tensor([[0, 2]]), 3).int().tolist()
        [[[0, 0, 1], [1, 1, 0]]]
    """
    T = first_BT.shape[1]
    key_S = torch.arange(n_key, device=first_BT.device)
    own_T1 = torch.arange(n_key - T, n_key, device=first_BT.device).unsqueeze(1)
    return (key_S < first_BT.unsqueeze(-1)) | (key_S > own_T1)
