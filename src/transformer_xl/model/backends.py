"""Faster ways to compute `attention.relative_attention`; each is tested against it, outputs and every gradient.

`matmul` does the same arithmetic as the equation, in one autograd node with a backward pass written out. What it saves is
traffic, the limit on a CPU: heads come first so that every product is one batched matmul, the shift is a view of the position
scores rather than a copy, the content product is added on top of it in place, the mask is written in place, and of the (T, S)
sized tensors only the attention weights are kept for the backward pass, in the precision of the queries.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head; NB: heads and batch in one axis, heads first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.errors import ConfigError, did_you_mean
from transformer_xl.model.attention import relative_attention
from transformer_xl.model.dropout import apply_mask, keep_mask

Attention = Callable[..., Tensor]


def choose_backend(name: str) -> Attention:
    """Return the attention function of a name.

    Args:
        name: `equation` (the paper's, in plain code), `matmul`, or `auto` for the fastest that works here.

    Returns:
        A function with the arguments of `relative_attention`.

    Raises:
        ConfigError: no backend of that name.
    """
    known = {"auto": matmul_attention, "equation": relative_attention, "matmul": matmul_attention}
    if name not in known:
        raise ConfigError(f"unknown attention backend '{name}'; {did_you_mean(name, known)}")
    return known[name]


def matmul_attention(
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
    """Compute `relative_attention` by batched matmuls; the same arguments and result."""
    scale = q_BTNH.shape[-1] ** -0.5
    dtype = q_BTNH.dtype
    # scaling queries costs T x H products where scaling scores would cost T x S
    content_query = (q_BTNH + r_w_bias.to(dtype)) * scale
    position_query = (q_BTNH + r_r_bias.to(dtype)) * scale
    return _MatmulAttention.apply(content_query, position_query, k_BSNH, v_BSNH, r_SNH.to(dtype), hidden_BTS, dropatt)


class _MatmulAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        qu_BTNH, qv_BTNH, k_BSNH, v_BSNH, r_SNH, hidden_BTS, dropatt = args
        (B, T, N, H), S = qu_BTNH.shape, k_BSNH.shape[1]
        qu, qv, k, v = (_heads_first(x) for x in (qu_BTNH, qv_BTNH, k_BSNH, v_BSNH))
        r_NSH = r_SNH.transpose(0, 1).contiguous()
        position = torch.bmm(qv.view(N, B * T, H), r_NSH.transpose(1, 2)).view(N * B, T, S)
        bias = qu.new_zeros(hidden_BTS.shape).masked_fill_(hidden_BTS, float("-inf"))
        weight = torch.baddbmm(_shifted(position), qu, k.transpose(1, 2))
        weight.view(N, B, T, S).add_(bias)
        weight = torch.softmax(weight, dim=-1)
        keep, ctx.factor = keep_mask(weight, dropatt) if dropatt else (None, 1.0)
        out = torch.bmm(weight if keep is None else apply_mask(weight, keep, ctx.factor), v)
        ctx.save_for_backward(qu, qv, k, v, r_NSH, weight, keep, out)
        return out.view(N, B, T, H).permute(1, 2, 0, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_BTNH,) = grad_outputs
        qu, qv, k, v, r_NSH, weight, keep, out = ctx.saved_tensors
        B, T, N, H = grad_BTNH.shape
        S = k.shape[1]
        grad = _heads_first(grad_BTNH)
        grad_v = torch.bmm((weight if keep is None else apply_mask(weight, keep, ctx.factor)).transpose(1, 2), grad)
        # softmax backward, weight * (grad_weight - sum(grad_weight * weight)); that sum over keys is also grad · out
        mean = (grad * out).sum(-1, keepdim=True)
        if keep is None:
            grad_score = torch.baddbmm(mean.expand(-1, -1, S), grad, v.transpose(1, 2), beta=-1).mul_(weight)
        else:
            grad_weight = apply_mask(torch.bmm(grad, v.transpose(1, 2)), keep, ctx.factor)
            grad_score = grad_weight.sub_(mean).mul_(weight)
        grad_qu = torch.bmm(grad_score, k)
        grad_k = torch.bmm(grad_score.transpose(1, 2), qu)
        grad_position = _unshifted(grad_score).view(N, B * T, S)
        grad_qv = torch.bmm(grad_position, r_NSH)
        grad_r = torch.bmm(grad_position.transpose(1, 2), qv.view(N, B * T, H))
        back = (x.view(N, B, -1, H).permute(1, 2, 0, 3) for x in (grad_qu, grad_qv, grad_k, grad_v))
        return *back, grad_r.transpose(0, 1), None, None


def _heads_first(x_BTNH: Tensor) -> Tensor:
    """Copy (B, T, N, H) to (N·B, T, H), ready for batched products over all rows and heads."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.permute(2, 0, 1, 3).reshape(N * B, T, H)


def _shifted(score: Tensor) -> Tensor:
    """View (X, T, S) scores of distances as scores of keys: row t begins T-1-t later, so rows lie S-1 apart in memory.

    The same entries as `rel_shift` wherever the causal mask leaves them visible, without its copy.
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
