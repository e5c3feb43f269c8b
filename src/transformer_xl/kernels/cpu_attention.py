"""`relative_attention` and `content_attention` by batched products, in one autograd node with a backward pass written out.

It saves memory traffic against the equation, the limit on a CPU. Heads come first, so every product is one batched matmul. The
shift is a view of the position scores rather than a copy, and the content product is added on top of it. Mask and softmax work
in place. Of the (T, S) sized tensors, only dropout masks and attention weights are kept for the backward pass; in fp32 it
computes the weights again. On a CPU, heads are computed in groups so small that such a tensor is still in the cache when the
next product reads it.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head; NB: heads and batch in one axis, heads first.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.kernels.equation import common_rows, hidden_keys
from transformer_xl.kernels.seeds import apply_mask, keep_mask

_CACHED_BYTES = 4 << 20
"""Heads are computed in groups whose (T, S) sized tensors take about so much, to stay in a CPU's cache between products."""


def matmul_attention(
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
    """Compute `relative_attention` by batched matmuls; the same arguments and result."""
    scale = q_BTNH.shape[-1] ** -0.5
    dtype = q_BTNH.dtype
    # scaling queries costs T x H products where scaling scores would cost T x S
    content_query = (q_BTNH + r_w_bias.to(dtype)) * scale
    position_query = (q_BTNH + r_r_bias.to(dtype)) * scale
    return _MatmulAttention.apply(content_query, position_query, k_BSNH, v_BSNH, r_SNH.to(dtype), first_BT, dropatt, None)


def content_attention(
    q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *, first_BT: Tensor, bias_NTS: Tensor | None = None, dropatt: float = 0.0
) -> Tensor:
    """Attend from a segment to memory and segment: softmax(q_i·k_j / √H + bias) over the keys that a query sees.

    That is what rotary positions and ALiBi leave to compute.
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


def matmul_content_attention(
    q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *, first_BT: Tensor, bias_NTS: Tensor | None, dropatt: float = 0.0
) -> Tensor:
    """Compute `content_attention` by batched matmuls; the same arguments and result."""
    query = q_BTNH * q_BTNH.shape[-1] ** -0.5
    return _MatmulAttention.apply(query, None, k_BSNH, v_BSNH, None, first_BT, dropatt, bias_NTS)


class _MatmulAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        qu_BTNH, qv_BTNH, k_BSNH, v_BSNH, r_SNH, first_BT, dropatt, by_head = args
        (B, T, N, H), S = qu_BTNH.shape, k_BSNH.shape[1]
        qu, k, v = (_heads_first(x) for x in (qu_BTNH, k_BSNH, v_BSNH))
        qv = None if r_SNH is None else _heads_first(qv_BTNH)
        r_NSH = None if r_SNH is None else r_SNH.transpose(0, 1).contiguous()
        bias = _bias(first_BT, S, qu.dtype)
        out = qu.new_empty(N * B, T, H)
        # in fp32 the weights would be the largest tensors kept; computing 2 of 9 products twice saves a third of the memory
        keeps_weights = qu.dtype != torch.float32
        weights, keeps = [], []
        for heads, rows in _groups(qu, k, N):
            weight = _attention_weights(heads, rows, qu, qv, k, r_NSH, bias, by_head)
            if keeps_weights:
                weights.append(weight)
            if dropatt:
                keep, ctx.factor = keep_mask(weight, dropatt)
                keeps.append(keep)
                weight = apply_mask(weight, keep, ctx.factor)
            torch.bmm(weight, v[rows], out=out[rows])
        ctx.kept = len(weights)
        ctx.save_for_backward(qu, qv, k, v, r_NSH, bias, by_head, out, *weights, *keeps)
        return out.view(N, B, T, H).permute(1, 2, 0, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_BTNH,) = grad_outputs
        qu, qv, k, v, r_NSH, bias, by_head, out, *rest = ctx.saved_tensors
        weights, keeps = rest[: ctx.kept], rest[ctx.kept :]
        B, T, N, H = grad_BTNH.shape
        S = k.shape[1]
        grad = _heads_first(grad_BTNH)
        # softmax backward, weight * (grad_weight - sum(grad_weight * weight)); that sum over keys is also grad · out
        mean = (grad * out).sum(-1, keepdim=True)
        grad_qu, grad_k, grad_v = (torch.empty_like(x) for x in (qu, k, v))
        grad_qv, grad_r = (None if x is None else torch.empty_like(x) for x in (qv, r_NSH))
        for i, (heads, rows) in enumerate(_groups(qu, k, N)):
            weight = weights[i] if weights else _attention_weights(heads, rows, qu, qv, k, r_NSH, bias, by_head)
            dropped = apply_mask(weight, keeps[i], ctx.factor) if keeps else weight
            torch.bmm(dropped.transpose(1, 2), grad[rows], out=grad_v[rows])
            if keeps:
                grad_weight = apply_mask(torch.bmm(grad[rows], v[rows].transpose(1, 2)), keeps[i], ctx.factor)
                grad_score = grad_weight.sub_(mean[rows]).mul_(weight)
            else:
                minus_mean = mean[rows].expand(-1, -1, S)
                grad_score = torch.baddbmm(minus_mean, grad[rows], v[rows].transpose(1, 2), beta=-1).mul_(weight)
            torch.bmm(grad_score, k[rows], out=grad_qu[rows])
            torch.bmm(grad_score.transpose(1, 2), qu[rows], out=grad_k[rows])
            if qv is None or grad_qv is None or grad_r is None:
                continue
            grad_position = _unshifted(grad_score).view(-1, B * T, S)
            torch.bmm(grad_position, r_NSH[heads], out=grad_qv[rows].view(-1, B * T, H))
            torch.bmm(grad_position.transpose(1, 2), qv[rows].view(-1, B * T, H), out=grad_r[heads])
        back = (x if x is None else x.view(N, B, -1, H).permute(1, 2, 0, 3) for x in (grad_qu, grad_qv, grad_k, grad_v))
        return *back, grad_r if grad_r is None else grad_r.transpose(0, 1), None, None, None


def _bias(first_BT: Tensor, n_key: int, dtype: torch.dtype) -> Tensor:
    """Return -inf where keys are hidden, else 0, (B or 1, T, ≤ S) for the last keys."""
    T = first_BT.shape[1]
    if first_BT.device.type == "cpu":
        first_BT = common_rows(first_BT)
        if first_BT.max() == 0:  # with a full memory and one document, only keys of the segment can be hidden
            n_key, first_BT = T, torch.zeros_like(first_BT)
    hidden = hidden_keys(first_BT, n_key)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _attention_weights(
    heads: slice,
    rows: slice,
    qu: Tensor,
    qv: Tensor | None,
    k: Tensor,
    r_NSH: Tensor | None,
    bias: Tensor,
    by_head: Tensor | None,
) -> Tensor:
    """Return softmax(content + position + bias), (X·B, T, S), of X heads.

    `bias` (B or 1, T, ≤ S) is for the last keys, `by_head` (N, T, S) for all rows. Without qv and r there is no position.
    """
    (_, T, H), S, X = qu.shape, k.shape[1], heads.stop - heads.start
    if qv is None or r_NSH is None:
        weight = torch.bmm(qu[rows], k[rows].transpose(1, 2))
    else:
        position = torch.bmm(qv[rows].view(X, -1, H), r_NSH[heads].transpose(1, 2)).view(-1, T, S)
        weight = torch.baddbmm(_shifted(position), qu[rows], k[rows].transpose(1, 2))
    if by_head is not None:
        weight.view(X, -1, T, S).add_(by_head[heads].unsqueeze(1))
    weight.view(X, -1, T, S)[..., S - bias.shape[-1] :].add_(bias)
    return torch.softmax(weight, dim=-1, out=weight)


def _groups(qu: Tensor, k: Tensor, n_head: int) -> Iterator[tuple[slice, slice]]:
    """Yield groups of heads, and their rows in (N·B, …) tensors, so small that (T, S) sized tensors stay in the cache."""
    n_row = qu.shape[0] // n_head
    n_bytes = n_row * qu.shape[1] * k.shape[1] * qu.element_size()
    size = max(1, _CACHED_BYTES // max(1, n_bytes)) if qu.device.type == "cpu" else n_head
    for first in range(0, n_head, size):
        heads = slice(first, min(first + size, n_head))
        yield heads, slice(heads.start * n_row, heads.stop * n_row)


def _heads_first(x_BTNH: Tensor) -> Tensor:
    """Copy (B, T, N, H) to (N·B, T, H), ready for batched products over all rows and heads."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.permute(2, 0, 1, 3).reshape(N * B, T, H)


def _shifted(score: Tensor) -> Tensor:
    """View (X, T, S) scores of distances as scores of keys: row t begins T-1-t later, so rows lie S-1 apart in memory.

    It has the entries of `rel_shift` wherever the causal mask leaves them visible, without its copy.
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
