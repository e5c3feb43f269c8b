"""`relative_attention` by batched products, in one autograd node with a backward pass written out.

It saves memory traffic against the equation, the limit on a CPU. Heads come first, so every product is one batched matmul. The
shift is a view of the position scores rather than a copy, and the content product is added on top of it. Mask and softmax work
in place. Of the (T, S) sized tensors, only dropout masks and attention weights are kept for the backward pass; in fp32 it
computes the weights again. On a CPU, heads and rows are computed in groups so small that such a tensor is still in the cache
when the next product reads it.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head; NB: heads and batch in one axis, heads first.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.kernels.cpu_linear import products
from transformer_xl.kernels.equation import Positions, common_rows, hidden_keys, plus
from transformer_xl.kernels.seeds import apply_mask, keep_mask

_CACHED_BYTES = 4 << 20
"""Heads and rows are computed in groups whose (T, S) tensors take about so much, to stay in a CPU's cache; half in fp32."""


def matmul_attention(
    q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, positions: Positions, *, first_BT: Tensor, dropatt: float = 0.0
) -> Tensor:
    """Compute `relative_attention` by batched matmuls; the same arguments and result."""
    dtype, scale = q_BTNH.dtype, q_BTNH.shape[-1] ** -0.5
    # scaling queries costs T x H products where scaling scores would cost T x S
    content_query = plus(q_BTNH, positions.u) * scale
    position_query = None if positions.r is None else plus(q_BTNH, positions.v) * scale
    r_SNH = None if positions.r is None else positions.r[: k_BSNH.shape[1]].to(dtype)
    b_SN = None if positions.b is None else (positions.b * scale).to(dtype)
    return _MatmulAttention.apply(content_query, position_query, k_BSNH, v_BSNH, r_SNH, b_SN, first_BT, dropatt)


class _MatmulAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        qu_BTNH, qv_BTNH, k_BSNH, v_BSNH, r_SNH, b_SN, first_BT, dropatt = args
        (B, T, N, H), S = qu_BTNH.shape, k_BSNH.shape[1]
        qu, k, v = (_heads_first(x) for x in (qu_BTNH, k_BSNH, v_BSNH))
        qv = None if r_SNH is None else _heads_first(qv_BTNH)
        r_NSH = None if r_SNH is None else r_SNH.transpose(0, 1).contiguous()
        b_NS = None if b_SN is None else b_SN.T
        bias = _bias(first_BT, S, qu.dtype)
        out = qu.new_empty(N * B, T, H)
        # in fp32 the weights would be the largest tensors kept; computing 2 of 9 products twice saves a third of the memory
        keeps_weights = qu.dtype != torch.float32
        weights, keeps = [], []
        for heads, rows in _groups(qu, k, N):
            weight = _attention_weights(heads, rows, qu, qv, k, r_NSH, b_NS, bias)
            if keeps_weights:
                weights.append(weight)
            if dropatt:
                keep, ctx.factor = keep_mask(weight, dropatt)
                keeps.append(keep)
                weight = apply_mask(weight, keep, ctx.factor)
            products(weight, v[rows].transpose(1, 2), out=out[rows])
        ctx.kept = len(weights)
        ctx.save_for_backward(qu, qv, k, v, r_NSH, b_NS, bias, out, *weights, *keeps)
        return out.view(N, B, T, H).permute(1, 2, 0, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_BTNH,) = grad_outputs
        qu, qv, k, v, r_NSH, b_NS, bias, out, *rest = ctx.saved_tensors
        weights, keeps = rest[: ctx.kept], rest[ctx.kept :]
        B, _, N, H = grad_BTNH.shape
        grad = _heads_first(grad_BTNH)
        # softmax backward, weight * (grad_weight - sum(grad_weight * weight)); that sum over keys is also grad · out
        mean = (grad * out).sum(-1, keepdim=True)
        grad_qu, grad_k, grad_v = (torch.empty_like(x) for x in (qu, k, v))
        grad_qv, grad_r = (None if x is None else torch.zeros_like(x) for x in (qv, r_NSH))
        grad_b = torch.zeros_like(b_NS) if b_NS is not None and ctx.needs_input_grad[5] else None
        for i, (heads, rows) in enumerate(_groups(qu, k, N)):
            weight = weights[i] if weights else _attention_weights(heads, rows, qu, qv, k, r_NSH, b_NS, bias)
            dropped = apply_mask(weight, keeps[i], ctx.factor) if keeps else weight
            products(dropped.transpose(1, 2), grad[rows].transpose(1, 2), out=grad_v[rows])
            grad_weight = products(grad[rows], v[rows])
            grad_weight = apply_mask(grad_weight, keeps[i], ctx.factor) if keeps else grad_weight
            grad_score = grad_weight.sub_(mean[rows]).mul_(weight)
            products(grad_score, k[rows].transpose(1, 2), out=grad_qu[rows])
            products(grad_score.transpose(1, 2), qu[rows].transpose(1, 2), out=grad_k[rows])
            if qv is None and grad_b is None:
                continue
            grad_position = _by_head(_unshifted(grad_score), heads)
            if grad_b is not None:
                grad_b[heads] += grad_position.sum(1)
            if qv is not None and grad_qv is not None and grad_r is not None:
                products(grad_position, r_NSH[heads].transpose(1, 2), out=_by_head(grad_qv[rows], heads))
                query = _by_head(qv[rows], heads)
                grad_r[heads] += products(grad_position.transpose(1, 2), query.transpose(1, 2))
        back = (x if x is None else x.view(N, B, -1, H).permute(1, 2, 0, 3) for x in (grad_qu, grad_qv, grad_k, grad_v))
        of_distances = (x if x is None else x.transpose(0, 1) for x in (grad_r, grad_b))
        return *back, *of_distances, None, None


def _bias(first_BT: Tensor, n_key: int, dtype: torch.dtype) -> Tensor:
    """Return -inf where keys are hidden, else 0, (B or 1, T, ≤ S) for the last keys."""
    T = first_BT.shape[1]
    if first_BT.device.type == "cpu":
        first_BT = common_rows(first_BT)
        if first_BT.max() == 0:  # with a full memory and one document, only keys of the segment can be hidden
            n_key, first_BT = T, torch.zeros_like(first_BT)
    hidden = hidden_keys(first_BT, n_key)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _by_head(x: Tensor, heads: slice) -> Tensor:
    """View what all rows of some heads have as a matrix for each head, (X, rows·T, …)."""
    return x.view(heads.stop - heads.start, -1, x.shape[-1])


def _attention_weights(
    heads: slice,
    rows: slice,
    qu: Tensor,
    qv: Tensor | None,
    k: Tensor,
    r_NSH: Tensor | None,
    b_NS: Tensor | None,
    bias: Tensor,
) -> Tensor:
    """Return softmax(content + position + bias), (X·B, T, S), of X heads; `bias` (B or 1, T, ≤ S) is for the last keys."""
    T, S, X = qu.shape[1], k.shape[1], heads.stop - heads.start
    by_distance = None if b_NS is None else b_NS[heads].unsqueeze(1)
    if qv is not None and r_NSH is not None:
        position = products(_by_head(qv[rows], heads), r_NSH[heads])
        if by_distance is not None:
            position += by_distance
        weight = products(qu[rows], k[rows], plus=_shifted(position.view(-1, T, S)))
    else:
        weight = products(qu[rows], k[rows])
        if by_distance is not None:  # the same for all rows
            weight.view(X, -1, T, S).add_(_shifted(by_distance.repeat(1, T, 1)).unsqueeze(1))
    last = weight.view(X, -1, T, S)[..., S - bias.shape[-1] :]
    last.add_(bias if len(bias) == 1 else bias[rows.start % len(bias) :][: last.shape[1]])
    return torch.softmax(weight, dim=-1, out=weight)


def _groups(qu: Tensor, k: Tensor, n_head: int) -> Iterator[tuple[slice, slice]]:
    """Yield groups of heads, and their rows in (N·B, …) tensors, so small that (T, S) sized tensors stay in the cache.

    A group is some heads of all B rows, or one head of some.
    """
    B = qu.shape[0] // n_head
    n_bytes = qu.shape[1] * k.shape[1] * qu.element_size() * (2 if qu.dtype == torch.float32 else 1)
    size = max(1, _CACHED_BYTES // max(1, n_bytes)) if qu.device.type == "cpu" else qu.shape[0]
    n_heads, n_rows = max(1, size // max(1, B)), max(1, min(size, B))
    for head, row in itertools.product(range(0, n_head, n_heads), range(0, B, n_rows)):
        heads = slice(head, min(head + n_heads, n_head))
        yield heads, slice(head * B + row, (heads.stop - 1) * B + min(row + n_rows, B))


def _heads_first(x_BTNH: Tensor) -> Tensor:
    """Copy (B, T, N, H) to (N·B, T, H), ready for batched products over all rows and heads."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.permute(2, 0, 1, 3).reshape(N * B, T, H)


def _shifted(score: Tensor) -> Tensor:
    """View (X, T, S) scores of distances as scores of keys: row t begins T-1-t later, so rows lie S-1 apart in memory.

    It has the entries of `rel_shift` wherever the causal mask leaves them visible, without its copy. The scores must not be a
    part of other memory, whose beginning would be taken for theirs.
    """
    X, T, S = score.shape
    return score.as_strided((X, T, S), (T * S, S - 1, 1), T - 1)


def _unshifted(grad: Tensor) -> Tensor:
    """Undo `_shifted` for a gradient that is zero wherever the causal mask hides.

    Rows overlap in memory by one element: the last key of a row and the first of the next. Only the last row sees the last
    key, so all other columns are one block, and that one element is written by itself.
    """
    X, T, S = grad.shape
    flat = grad.new_empty(X, T * S)
    flat[:, : T - 1] = 0
    flat[:, T - 1 : -1].view(X, T, S - 1).copy_(grad[:, :, :-1])
    flat[:, -1] = grad[:, -1, -1]
    return flat.view(X, T, S)
