"""`ranked_attention`, the attention of XLNet, by fused kernels, which keep no scores and no weights.

It is organized as `fused.py`, and shares its parts: the library multiplies scores of positions for a few rows and heads at a
time, and the kernels of `fused_ranked_kernels.py` read them. What XLNet adds:

- What queries and keys are (`Sight`) becomes two tables of numbers, once per segment for all layers. No mask is made of them.
- Queries of both streams are rows of the same products with all P distances. The scores of a query's keys begin where its place
  says, so the queries of g need no code of their own.
- A row is multiplied by the position keys of its own direction. Which one that is stays on the device, as the seed does.
- What a query adds to the scores of other texts is computed before, one number for each query and head.

Results are the same to the last bit every time. Needs Triton and a GPU; with TRITON_INTERPRET=1 it runs on any device, slowly.

Shapes: B batch, T content positions, K queries of g, Q = T + K, S keys, P = S + T - 1 distances, N heads, H d_head, X tables of
position keys, C columns of a score of positions, at least P; G groups of rows that share position keys: one, or each row alone.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.model.attention.two_streams import Sight
from transformer_xl.model.backends import fused_ranked_kernels as kernels
from transformer_xl.model.backends import run_untraced
from transformer_xl.model.backends.fused import Launch, Part, parts
from transformer_xl.model.dropout import drawn_seed


def fused_ranked_attention(
    q_BQNH: Tensor,
    k_BSNH: Tensor,
    v_BSNH: Tensor,
    r_XPNH: Tensor,
    *,
    r_w_bias: Tensor,
    r_r_bias: Tensor,
    r_s_bias: Tensor,
    seg_embed: Tensor,
    sight: Sight,
    dropatt: float = 0.0,
) -> Tensor:
    """Compute `ranked_attention`; the same arguments and result."""
    dtype, scale = q_BQNH.dtype, q_BQNH.shape[-1] ** -0.5
    content_query = (q_BQNH + r_w_bias.to(dtype)) * scale
    position_query = (q_BQNH + r_r_bias.to(dtype)) * scale
    more_BNQ = None
    if sight.query_segment is not None and sight.key_segment is not None:
        differs_NH = (seg_embed[1] - seg_embed[0]).to(dtype) * scale
        more_BNQ = torch.einsum("bqnh,nh->bnq", q_BQNH + r_s_bias.to(dtype), differs_NH).float()
    return run_untraced(_run, content_query, position_query, more_BNQ, k_BSNH, v_BSNH, r_XPNH.to(dtype), sight, dropatt)


def _run(*inputs: Any) -> Tensor:
    *tensors, sight, dropatt = inputs
    n_content = tensors[-1].shape[1] + 1 - tensors[-2].shape[1]
    tables = sight.once(fused_ranked_attention, lambda: _tables(sight, n_content))
    return _FusedRankedAttention.apply(*tensors, tables, dropatt)


class _Tables(NamedTuple):
    """What a `Sight` says, as kernels read it."""

    queries: Tensor
    """int32 (B, 4, Q): the column in which scores of positions begin, below which rank it sees keys, its own key, its text."""
    keys: Tensor
    """int32 (B, 2, S): rank, and text."""
    first: Tensor
    """int32 (B,): nobody sees the keys before this one."""
    direction: Tensor | None
    """int64 (B,): which position keys a row has; None: there are only those for reading forward."""


def _tables(sight: Sight, n_content: int) -> _Tables:
    (B, Q), S, device = sight.sees.shape, sight.rank.shape[1], sight.rank.device
    key_S, key_Q = torch.arange(S, device=device), torch.arange(S - n_content, S - n_content + Q, device=device)
    own_Q = key_Q.where(key_Q < S, -1)  # queries of g have none
    column_BQ = n_content - 1 - sight.place
    text_BQ, text_BS = sight.query_segment, sight.key_segment
    if text_BQ is None or text_BS is None:
        text_BQ, text_BS = own_Q * 0, key_S * 0
    of_queries = [column_BQ, _narrow(sight.sees), own_Q, text_BQ]
    is_seen_BS = sight.rank < sight.sees.amax(1, keepdim=True)
    return _Tables(
        queries=torch.stack([x.expand(B, Q) for x in of_queries], dim=1).int(),
        keys=torch.stack([_narrow(sight.rank), text_BS.expand(B, S)], dim=1).int(),
        first=key_S.where(is_seen_BS, S).amin(1).clamp(max=S - n_content).int(),
        direction=None if sight.is_backward is None else sight.is_backward.long(),
    )


def _narrow(rank: Tensor) -> Tensor:
    """Bring ranks that stand for "never" to what 32 bits hold."""
    limits = torch.iinfo(torch.int32)
    return rank.clamp(limits.min, limits.max)


class _FusedRankedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        qu, qv, more, k, v, r, tables, dropatt = args
        B, Q, N, _ = qu.shape
        qu, qv = qu.contiguous(), qv.contiguous()
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        more = None if more is None else more.contiguous()
        seed = drawn_seed(qu.device) if dropatt else None
        out, log_sum = torch.empty_like(qu), torch.empty(B, N, Q, dtype=torch.float32, device=qu.device)
        ctx.launch = Launch.of(qu, k, dropatt, n_distance=r.shape[1])
        for part in parts(qu, ctx.launch.n_column):
            qu_, qv_, k_, v_, out_ = (x[part.rows, :, part.heads] for x in (qu, qv, k, v, out))
            r_NGCH = _position_keys(r, tables.direction, part, ctx.launch.n_column)
            position = _grouped(qv_, r_NGCH) @ r_NGCH.transpose(2, 3)
            tensors = (qu_, k_, v_, position, _of_part(more, part), *_seen(tables, part), out_, _of_part(log_sum, part))
            ctx.launch(kernels.ranked_forward_kernel, "forward", part, (*tensors, seed), (qu, k, v, log_sum))
        ctx.tables = tables
        ctx.save_for_backward(qu, qv, more, k, v, r, out, log_sum, seed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        qu, qv, more, k, v, r, out, log_sum, seed = ctx.saved_tensors
        grad, launch, tables = grad_outputs[0].contiguous(), ctx.launch, ctx.tables
        # softmax backward, weight * (grad_weight - sum(grad_weight * weight)); that sum over keys is also grad · out
        mean = (grad.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
        grad_qu, grad_qv = torch.empty_like(qu), torch.empty_like(qv)
        grad_more = None if more is None else torch.empty_like(more)
        grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        grad_r = torch.zeros(r.shape, dtype=torch.float32, device=r.device)
        for part in parts(qu, launch.n_column):
            of_rows = (qu, qv, k, v, grad, grad_qu, grad_qv, grad_k, grad_v)
            qu_, qv_, k_, v_, grad_, grad_qu_, grad_qv_, grad_k_, grad_v_ = (x[part.rows, :, part.heads] for x in of_rows)
            more_, log_sum_, mean_, grad_more_ = (_of_part(x, part) for x in (more, log_sum, mean, grad_more))
            seen = _seen(tables, part)
            r_NGCH = _position_keys(r, tables.direction, part, launch.n_column)
            qv_NGYH = _grouped(qv_, r_NGCH)
            position = qv_NGYH @ r_NGCH.transpose(2, 3)
            grad_position = torch.zeros_like(position)  # kernels write what is seen
            tensors = (qu_, k_, v_, position, more_, *seen, grad_, log_sum_, mean_, grad_k_, grad_v_, grad_position)
            strided = (qu, k, v, log_sum, grad_k)
            launch(kernels.ranked_key_gradient_kernel, "ranked_keys", part, (*tensors, seed), strided)
            tensors = (k_, grad_position, *seen, grad_qu_, grad_more_)
            launch(kernels.ranked_query_gradient_kernel, "queries", part, (*tensors, seed), (qu, k, log_sum))
            grad_qv_.copy_((grad_position @ r_NGCH).view(part.n_head, part.n_row, *grad_qv_.shape[1::2]).permute(1, 2, 0, 3))
            grad_r_NGCH = grad_position.transpose(2, 3) @ qv_NGYH
            grad_r[:, :, part.heads] += _by_direction(grad_r_NGCH[:, :, : r.shape[1]], tables.direction, part, len(r))
        return grad_qu, grad_qv, grad_more, grad_k, grad_v, grad_r.to(r.dtype), None, None


def _of_part(x_BNQ: Tensor | None, part: Part) -> Tensor | None:
    return None if x_BNQ is None else x_BNQ[part.rows, part.heads]


def _seen(tables: _Tables, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    return tables.queries[part.rows], tables.keys[part.rows], tables.first[part.rows]


def _position_keys(r_XPNH: Tensor, direction_B: Tensor | None, part: Part, n_column: int) -> Tensor:
    """Copy the position keys of a part's rows to (N, G, C, H), with zeros at the end."""
    r_GPNH = r_XPNH[:, :, part.heads]
    if direction_B is not None:
        r_GPNH = r_GPNH[direction_B[part.rows]]
    return F.pad(r_GPNH.permute(2, 0, 1, 3), (0, 0, 0, n_column - r_XPNH.shape[1]))


def _grouped(q_BQNH: Tensor, r_NGCH: Tensor) -> Tensor:
    """Return queries as (N, G, B·Q / G, H): those that are multiplied by the same position keys in one axis."""
    return q_BQNH.permute(2, 0, 1, 3).reshape(*r_NGCH.shape[:2], -1, q_BQNH.shape[-1])


def _by_direction(grad_r_NGPH: Tensor, direction_B: Tensor | None, part: Part, n_table: int) -> Tensor:
    """Sum the gradients of position keys over the rows of each direction, (X, P, N, H); without atomics, in a fixed order."""
    if direction_B is None:
        return grad_r_NGPH.permute(1, 2, 0, 3)
    is_of_GX = direction_B[part.rows].unsqueeze(1) == torch.arange(n_table, device=direction_B.device)
    return torch.einsum("gx,ngph->xpnh", is_of_GX.float(), grad_r_NGPH.float())
