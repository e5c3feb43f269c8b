"""`ranked_attention`, the attention of XLNet, by batched matrix products in one autograd node, and by PyTorch's own function.

The node does what that of `kernels/cpu_attention.py` does. Keys on both sides, two streams and texts add to it:

- Content queries stand at the places 0 … T-1, so their shift is a view. They are taken in blocks, because a short block needs
  few more distances than it has keys. The queries of g, which are few, copy their windows.
- A row is multiplied by the position keys of its own direction. They are not copied for each row.
- The segment term adds q·e to keys of other texts. A softmax does not see what all keys get alike, so this is -q·e on keys of
  the own text: a column per text in queries and keys, and no pass over scores.
- What a query sees is looked up once per segment for all layers, and added while scores are copied to their keys.

Shapes: B batch, T content positions, K queries of g, Q = T + K, S keys, P = S + T - 1 distances, N heads, H d_head, X tables of
position keys, C columns of texts; R: rows and heads in one axis, rows first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.errors import ConfigError, did_you_mean
from transformer_xl.kernels.choose import Attention
from transformer_xl.kernels.seeds import keep_mask
from transformer_xl.model.attention.two_streams import Sight, at_keys, ranked_attention

_CACHED_BYTES = 4 << 20
"""Rows and heads are computed in tiles whose (Q, S) sized tensors take about so much, to stay in a CPU's cache."""

_BLOCK = 128
"""Content queries that are multiplied by the same position keys."""


def choose_ranked_backend(name: str, device: torch.device, *, in_compiled: bool = False) -> Attention:
    """Return the attention function of a name; its arguments are those of `ranked_attention`.

    The names mean what they mean in `choose_backend`. `auto` takes `matmul` on a CPU and `sdpa` elsewhere: `matmul` takes a
    batch row by row, in several products each, and looks at values of `Sight`, for which a GPU would have to wait.

    Args:
        name: of the backend.
        device: where the model is.
        in_compiled: compiled layers call it. `matmul`, a long list of library calls, then runs as it is between compiled parts.
    """
    functions = {"equation": ranked_attention, "matmul": matmul_ranked_attention, "sdpa": sdpa_ranked_attention}
    known = ("auto", *functions)
    if name not in known:
        raise ConfigError(f"an xlnet has no attention backend '{name}'; {did_you_mean(name, known)}")
    chosen = ("matmul" if device.type == "cpu" else "sdpa") if name == "auto" else name
    return _uncompiled(functions[chosen]) if in_compiled and chosen == "matmul" else functions[chosen]


@cache
def _uncompiled(attend: Attention) -> Attention:
    """Keep the compiler out of a function; always the same one is returned, or each call would be compiled anew."""
    return cast("Attention", torch.compiler.disable(attend, reason="it consists of library calls"))


def matmul_ranked_attention(
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
    """Compute `ranked_attention` by batched matmuls; the same arguments and result."""
    dtype, scale = q_BQNH.dtype, q_BQNH.shape[-1] ** -0.5
    n_content = r_XPNH.shape[1] + 1 - k_BSNH.shape[1]
    facts = sight.once((matmul_ranked_attention, dtype), lambda: _facts(sight, n_content, dtype))
    # scaling queries costs Q x H products where scaling scores would cost Q x S
    content_query = (q_BQNH + r_w_bias.to(dtype)) * scale
    position_query = (q_BQNH + r_r_bias.to(dtype)) * scale
    more_BQN = None
    if facts.query_text is not None:
        differs_NH = (seg_embed[0] - seg_embed[1]).to(dtype) * scale
        more_BQN = torch.einsum("bqnh,nh->bqn", q_BQNH + r_s_bias.to(dtype), differs_NH)
    inputs = (content_query, position_query, more_BQN, k_BSNH, v_BSNH, r_XPNH.to(dtype))
    has_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _RankedAttention.apply(*inputs, facts, dropatt, has_gradient)


def sdpa_ranked_attention(
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
    """Compute `ranked_attention` by `scaled_dot_product_attention`, with all but the content as a bias."""
    dtype, scale, n_key = q_BQNH.dtype, q_BQNH.shape[-1] ** -0.5, k_BSNH.shape[1]
    n_content = r_XPNH.shape[1] + 1 - n_key
    position_query = (q_BQNH + r_r_bias.to(dtype)) * scale
    by_distance = torch.einsum("bqnh,bpnh->bnqp", position_query, sight.by_row(r_XPNH.to(dtype)))
    bias_BNQS = at_keys(by_distance, sight.place, n_key)
    differs_BQS = sight.differs()
    if differs_BQS is not None:
        differs_NH = (seg_embed[1] - seg_embed[0]).to(dtype) * scale
        more_BNQ = torch.einsum("bqnh,nh->bnq", q_BQNH + r_s_bias.to(dtype), differs_NH)
        bias_BNQS = bias_BNQS + more_BNQ.unsqueeze(-1) * differs_BQS.unsqueeze(1)
    hidden_BQS = sight.hidden(n_content)
    bias_BNQS = bias_BNQS.masked_fill(hidden_BQS.unsqueeze(1), _least(dtype))
    q, k, v = (x.transpose(1, 2) for x in (q_BQNH + r_w_bias.to(dtype), k_BSNH, v_BSNH))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_BNQS, dropout_p=dropatt, scale=scale)
    return attended.transpose(1, 2).masked_fill(hidden_BQS.all(-1)[..., None, None], 0.0)


def _least(dtype: torch.dtype) -> float:
    """Return what hides a key: finite, so that a query that sees nothing gets numbers, which are zeroed later."""
    return torch.finfo(dtype).min / 2


@dataclass(frozen=True)
class _Facts:
    """What a `Sight` says, in the form in which it is computed with; the same for all layers."""

    n_content: int
    table: list[int]  # of each row, which position keys
    window: Tensor  # int64 (B, K), where the distances of a query of g begin
    hidden: Tensor | None  # bool (B, Q, S); None: every query sees every key
    sees_any: Tensor | None  # (B, Q, 1, 1), 0 for queries that see nothing, else 1; None: all see something
    query_text: Tensor | None  # (B, Q, 1, C), 1 in the column of the query's text; None: there is only one
    key_text: Tensor | None  # (B, S, 1, C)


def _facts(sight: Sight, n_content: int, dtype: torch.dtype) -> _Facts:
    hidden = sight.hidden(n_content)
    sees_any = (~hidden.all(-1))[..., None, None].to(dtype)
    texts = None
    if sight.query_segment is not None and sight.key_segment is not None:
        both = torch.cat([sight.query_segment, sight.key_segment], dim=1)
        names = both.unique()
        n_column = len(names) + len(names) % 2  # an even number is multiplied faster
        columns = F.one_hot(torch.searchsorted(names, both), n_column).to(dtype).unsqueeze(2)
        texts = columns.split([hidden.shape[1], hidden.shape[2]], dim=1)
    return _Facts(
        n_content=n_content,
        table=[0] * len(hidden) if sight.is_backward is None else sight.is_backward.long().tolist(),
        window=n_content - 1 - sight.place[:, n_content:].expand(len(hidden), -1),
        hidden=hidden if hidden.any() else None,
        sees_any=None if sees_any.all() else sees_any,
        query_text=None if texts is None else texts[0],
        key_text=None if texts is None else texts[1],
    )


class _Tile(NamedTuple):
    """Rows and heads that are computed together: all heads of some rows, or some heads of a row."""

    rows: range
    heads: slice
    slice: slice  # of the axis R


class _RankedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        qu_BQNH, qv_BQNH, more_BQN, k_BSNH, v_BSNH, r_XPNH, facts, dropatt, has_gradient = args
        B, Q, N, H = qv_BQNH.shape
        if more_BQN is not None:
            qu_BQNH = torch.cat([qu_BQNH, more_BQN.unsqueeze(-1) * facts.query_text], dim=-1)
            k_BSNH = torch.cat([k_BSNH, facts.key_text.expand(-1, -1, N, -1)], dim=-1)
        qu, qv, k, v = (_heads_first(x) for x in (qu_BQNH, qv_BQNH, k_BSNH, v_BSNH))
        r = r_XPNH.transpose(1, 2).contiguous()
        out = qv.new_empty(B * N, Q, H)
        # in fp32 the weights would be the largest tensors kept; computing 2 of 11 products twice saves a third of the memory
        keeps_weights = has_gradient and qu.dtype != torch.float32
        weights, keeps = [], []
        ctx.factor = 1.0
        for tile in _tiles(qu, k, B):
            weight = _attention_weights(tile, qu, qv, k, r, facts)
            if keeps_weights:
                weights.append(weight)
            if dropatt:
                keep, ctx.factor = keep_mask(weight, dropatt)
                if has_gradient:
                    keeps.append(keep)
                weight = keep.to(weight.dtype).mul_(weight)
            torch.bmm(weight, v[tile.slice], out=out[tile.slice])
        if dropatt:
            out.mul_(ctx.factor)
        if facts.sees_any is not None:
            out.view(B, N, Q, H).mul_(facts.sees_any.transpose(1, 2))
        ctx.facts, ctx.n_kept, ctx.has_more = facts, len(weights), more_BQN is not None
        ctx.save_for_backward(qu, qv, k, v, r, out, *weights, *keeps)
        return out.view(B, N, Q, H).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_BQNH,) = grad_outputs
        qu, qv, k, v, r, out, *rest = ctx.saved_tensors
        weights, keeps, facts = rest[: ctx.n_kept], rest[ctx.n_kept :], ctx.facts
        B, H, S = grad_BQNH.shape[0], grad_BQNH.shape[-1], k.shape[1]
        if facts.sees_any is not None:
            grad_BQNH = grad_BQNH * facts.sees_any
        grad = _heads_first(grad_BQNH)
        # softmax backward, weight * (grad_weight - sum(grad_weight * weight)); that sum over keys is also grad · out
        mean = (grad * out).sum(-1, keepdim=True)
        if keeps:
            grad = grad * ctx.factor
        grad_qu, grad_qv, grad_v = (torch.empty_like(x) for x in (qu, qv, v))
        grad_k = torch.empty_like(v)
        grad_r = torch.zeros_like(r, dtype=torch.promote_types(r.dtype, torch.float32))
        for i, tile in enumerate(_tiles(qu, k, B)):
            at = tile.slice
            weight = weights[i] if weights else _attention_weights(tile, qu, qv, k, r, facts)
            if keeps:
                dropped = keeps[i].to(weight.dtype).mul_(weight)
                grad_score = torch.bmm(grad[at], v[at].transpose(1, 2)).mul_(dropped)
                torch.bmm(dropped.transpose(1, 2), grad[at], out=grad_v[at])
                grad_score.addcmul_(weight, mean[at], value=-1)
            else:
                torch.bmm(weight.transpose(1, 2), grad[at], out=grad_v[at])
                minus_mean = mean[at].expand(-1, -1, S)
                grad_score = torch.baddbmm(minus_mean, grad[at], v[at].transpose(1, 2), beta=-1).mul_(weight)
            torch.bmm(grad_score, k[at], out=grad_qu[at])
            torch.bmm(grad_score.transpose(1, 2), qu[at][..., :H], out=grad_k[at])
            _position_gradients(tile, grad_score, qv, r, facts, grad_qv, grad_r)
        grad_more = None
        back_qu = _heads_inside(grad_qu, B)
        if ctx.has_more:
            back_qu, by_text = back_qu.split([H, grad_qu.shape[-1] - H], dim=-1)
            grad_more = (by_text * facts.query_text).sum(-1)
        back_qv, back_k, back_v = (_heads_inside(x, B) for x in (grad_qv, grad_k, grad_v))
        return back_qu, back_qv, grad_more, back_k, back_v, grad_r.to(r.dtype).transpose(1, 2), None, None, None


def _attention_weights(tile: _Tile, qu: Tensor, qv: Tensor, k: Tensor, r: Tensor, facts: _Facts) -> Tensor:
    """Return softmax(content + position + hidden) of a tile, (R, Q, S)."""
    at, (_, Q, H), S, T = tile.slice, qv.shape, k.shape[1], facts.n_content
    score = qu.new_empty(at.stop - at.start, Q, S)
    by_row = score.view(len(tile.rows), -1, Q, S)
    qv_tile = qv[at].view(len(tile.rows), -1, Q, H)
    for i, row in enumerate(tile.rows):
        r_head = r[facts.table[row], tile.heads].transpose(1, 2)
        bias = None if facts.hidden is None else facts.hidden[row].to(score.dtype).mul_(_least(score.dtype))
        for block in _blocks(T):
            by_distance = torch.bmm(qv_tile[i, :, block], r_head[..., _distances(block, T, S)])
            _put(by_row[i, :, block], _shifted(by_distance, S), None if bias is None else bias[block])
        if Q > T:
            by_distance = torch.bmm(qv_tile[i, :, T:], r_head)
            _put(by_row[i, :, T:], _windows(by_distance, facts.window[row], S), None if bias is None else bias[T:])
    score.baddbmm_(qu[at], k[at].transpose(1, 2))
    return torch.softmax(score, dim=-1, out=score)


def _position_gradients(
    tile: _Tile, grad_score: Tensor, qv: Tensor, r: Tensor, facts: _Facts, grad_qv: Tensor, grad_r: Tensor
) -> None:
    """Write the gradients of a tile's position queries, and add to those of position keys."""
    at, (_, Q, H), S, T = tile.slice, qv.shape, grad_score.shape[-1], facts.n_content
    by_row = grad_score.view(len(tile.rows), -1, Q, S)
    qv_tile, grad_qv_tile = (x[at].view(len(tile.rows), -1, Q, H) for x in (qv, grad_qv))
    scratch: dict[int, Tensor] = {}
    for i, row in enumerate(tile.rows):
        table = facts.table[row]
        for block in _blocks(T):
            n = block.stop - block.start
            # between windows lie zeros, which stay
            grad_distance = scratch[n] if n in scratch else grad_score.new_zeros(by_row.shape[1], n, S + n - 1)
            scratch[n] = grad_distance
            _shifted(grad_distance, S).copy_(by_row[i, :, block])
            columns = _distances(block, T, S)
            torch.bmm(grad_distance, r[table, tile.heads, columns], out=grad_qv_tile[i, :, block])
            grad_r[table, tile.heads, columns] += torch.bmm(grad_distance.transpose(1, 2), qv_tile[i, :, block])
        if Q > T:
            grad_distance = grad_score.new_zeros(by_row.shape[1], Q - T, r.shape[2])
            index = torch.arange(Q - T, device=r.device)
            grad_distance.unfold(-1, S, 1)[:, index, facts.window[row]] = by_row[i, :, T:]
            torch.bmm(grad_distance, r[table, tile.heads], out=grad_qv_tile[i, :, T:])
            grad_r[table, tile.heads] += torch.bmm(grad_distance.transpose(1, 2), qv_tile[i, :, T:])


def _tiles(qu: Tensor, k: Tensor, n_row: int) -> Iterator[_Tile]:
    """Yield all rows and heads in tiles so small that (Q, S) sized tensors stay in the cache."""
    n_head = qu.shape[0] // n_row
    n_bytes = qu.shape[1] * k.shape[1] * qu.element_size()
    size = max(1, _CACHED_BYTES // n_bytes) if qu.device.type == "cpu" else n_head * n_row
    if size >= n_head:
        step = size // n_head
        for first in range(0, n_row, step):
            rows = range(first, min(first + step, n_row))
            yield _Tile(rows, slice(0, n_head), slice(rows.start * n_head, rows.stop * n_head))
        return
    for row in range(n_row):
        for first in range(0, n_head, size):
            heads = slice(first, min(first + size, n_head))
            yield _Tile(range(row, row + 1), heads, slice(row * n_head + heads.start, row * n_head + heads.stop))


def _blocks(n_content: int) -> Iterator[slice]:
    for first in range(0, n_content, _BLOCK):
        yield slice(first, min(first + _BLOCK, n_content))


def _distances(block: slice, n_content: int, n_key: int) -> slice:
    """Return which of the distances S-1, …, -(T-1) a block of content queries needs: S of its last, and one more for each."""
    return slice(n_content - block.stop, n_content - block.start + n_key - 1)


def _shifted(by_distance: Tensor, n_key: int) -> Tensor:
    """View (heads, queries, distances) of a block as (heads, queries, keys): each row begins one distance before the last."""
    n_head, n_query, n_distance = by_distance.shape
    return by_distance.as_strided((n_head, n_query, n_key), (n_query * n_distance, n_distance - 1, 1), n_query - 1)


def _windows(by_distance: Tensor, window_K: Tensor, n_key: int) -> Tensor:
    """Copy from (heads, K, P) the distances of each query's keys, (heads, K, S)."""
    index = torch.arange(len(window_K), device=window_K.device)
    return by_distance.unfold(-1, n_key, 1)[:, index, window_K]


def _put(score: Tensor, position: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        score.copy_(position)
    else:
        torch.add(position, bias, out=score)


def _heads_first(x_BQNH: Tensor) -> Tensor:
    """Copy (B, Q, N, H) to (B·N, Q, H), ready for batched products."""
    return x_BQNH.transpose(1, 2).flatten(0, 1).contiguous()


def _heads_inside(x_RQH: Tensor, n_row: int) -> Tensor:
    """View (B·N, Q, H) as (B, Q, N, H)."""
    return x_RQH.unflatten(0, (n_row, -1)).transpose(1, 2)
