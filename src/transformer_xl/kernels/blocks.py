"""What stands between the products of a layer, as GPU kernels: bias, ReLU, dropout, residual sum and layer norm.

PyTorch takes a kernel for each of them, and each reads and writes all states; its gradient of a norm's weights alone takes as
long as a product. Here one kernel does what a block ends with, `norm(x + dropout(y + bias))`, and one what stands between the
maps of a feed-forward network, `dropout(relu(y + bias))`. A pass over the same rows computes all gradients, those of biases and
norms as partial sums in a fixed order, so results are the same to the last bit every time.

No mask is kept: forward and backward draw it from the same seed. The numbers of a row are a part of one sequence of 2^32, which
begins anywhere; parts of different rows overlap now and then, elsewhere in each row.

Needs Triton and a GPU; with TRITON_INTERPRET=1 it runs on any device, slowly.

Shapes: X rows, which are positions of a batch, T positions of each row of the batch, D width.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transformer_xl.kernels.flash_kernels import factor_of, words_of
from transformer_xl.kernels.fused import launch
from transformer_xl.kernels.seeds import drawn_seeds

_MOST_PROGRAMS = 512
"""Programs that sum over rows; a fixed number, because sums in another order have other bits."""
_TILE = 2048
"""Elements that a program holds of each tensor, unless a row has more."""
_FEW_ROWS = 4096
"""Up to so many rows, a program takes one at a time, which its threads sum without waiting for each other."""

jit = triton.jit(do_not_specialize=["n_row", "T", "n_sum", "n_other", "T_other"])


@triton.jit
def _factors(seed_at, row, column, T, p, LOCKED: tl.constexpr):
    """Return the factor of each element, 0 where dropped; if locked, positions of a row of the batch share it."""
    words = words_of(tl.load(seed_at), row // T if LOCKED else row, 0)
    return factor_of(words[:, None], column[None, :], p)


@triton.jit
def _summed(x, y, bias, factors, at, column, inside, D: tl.constexpr, DROPS: tl.constexpr):
    """Return x + dropout(y + bias)."""
    found = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        found += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if DROPS:
        found *= factors
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + found


@triton.jit
def _standardized(total, inside, eps, D: tl.constexpr):
    """Return rows with mean 0 and variance 1, and what they were divided by, inverted."""
    centered = tl.where(inside, total - (tl.sum(total, 1) / D)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 1) / D + eps)
    return centered * scale[:, None], scale


@jit
def added_kernel(
    x, y, bias, weight, shift, seed_at, out, n_row, T, p, eps,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, DROPS: tl.constexpr, LOCKED: tl.constexpr,
):  # fmt: skip
    """Compute norm(x + dropout(y + bias)) of R rows, or without a norm if it has no weight."""
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, W)
    inside = (row < n_row)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    factors = _factors(seed_at, row, column, T, p, LOCKED) if DROPS else 1.0
    total = _summed(x, y, bias, factors, at, column, inside, D, DROPS)
    if weight is not None:
        standard, _ = _standardized(total, inside, eps, D)
        w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        total = standard * w[None, :] + tl.load(shift + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@jit
def added_gradient_kernel(
    grad, x, y, bias, weight, seed_at, grad_x, grad_y, sums, n_row, T, p, eps,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, DROPS: tl.constexpr, LOCKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of some rows, and sum those of the norm's weight and shift and of the bias over them."""
    n_program, column = tl.num_programs(0), tl.arange(0, W)
    of_weight, of_shift, of_bias = tl.zeros([R, W], tl.float32), tl.zeros([R, W], tl.float32), tl.zeros([R, W], tl.float32)
    w = tl.full([W], 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    for r0 in range(tl.program_id(0) * R, n_row, n_program * R):
        row = r0 + tl.arange(0, R)
        inside = (row < n_row)[:, None] & (column < D)[None, :]
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        factors = _factors(seed_at, row, column, T, p, LOCKED) if DROPS else 1.0
        gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            standard, scale = _standardized(_summed(x, y, bias, factors, at, column, inside, D, DROPS), inside, eps, D)
            of_weight += gradient * standard
            of_shift += gradient
            gradient *= w[None, :]
            along, mean = tl.sum(gradient * standard, 1) / D, tl.sum(gradient, 1) / D
            gradient = (gradient - mean[:, None] - standard * along[:, None]) * scale[:, None]
        if grad_x is not None:
            tl.store(grad_x + at, gradient.to(grad_x.dtype.element_ty), mask=inside)
        if DROPS:
            gradient *= factors
        tl.store(grad_y + at, gradient.to(grad_y.dtype.element_ty), mask=inside)
        of_bias += tl.where(inside, gradient, 0.0)
    if sums is not None:
        own = sums + tl.program_id(0) * (3 * D) + column
        tl.store(own, tl.sum(of_weight, 0), mask=column < D)
        tl.store(own + D, tl.sum(of_shift, 0), mask=column < D)
        tl.store(own + 2 * D, tl.sum(of_bias, 0), mask=column < D)


@triton.jit
def _activate(
    tile, y, bias, seed_at, out, n_row, T, p,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RELU: tl.constexpr, DROPS: tl.constexpr, LOCKED: tl.constexpr,
):  # fmt: skip
    """Compute dropout(relu(y + bias)) of a tile, or dropout alone."""
    n_tile = tl.cdiv(D, W)
    row, column = tile // n_tile * R + tl.arange(0, R), tile % n_tile * W + tl.arange(0, W)
    inside = (row < n_row)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    found = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        found += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if RELU:
        found = tl.where(found < 0, 0.0, found)  # NaN stays NaN
    if DROPS:
        found *= _factors(seed_at, row, column, T, p, LOCKED)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)


@jit
def active_kernel(
    y, bias, seed_at, out, n_row, T, p,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, DROPS: tl.constexpr, LOCKED: tl.constexpr,
):  # fmt: skip
    """Compute dropout(relu(y + bias))."""
    _activate(tl.program_id(0), y, bias, seed_at, out, n_row, T, p, D, W, R, True, DROPS, LOCKED)


@jit
def pair_kernel(
    y, seed_at, out, other, other_out, n_row, T, n_other, T_other, p,
    D: tl.constexpr, D_other: tl.constexpr, W: tl.constexpr, R: tl.constexpr, DROPS: tl.constexpr, LOCKED: tl.constexpr,
):  # fmt: skip
    """Compute dropout of two tensors by a seed each: first come programs for tiles of the one, then those of the other."""
    tile, n_tile = tl.program_id(0), tl.cdiv(n_row, R) * tl.cdiv(D, W)
    if tile < n_tile:
        _activate(tile, y, None, seed_at, out, n_row, T, p, D, W, R, False, DROPS, LOCKED)
    else:
        tile -= n_tile
        _activate(tile, other, None, seed_at + 1, other_out, n_other, T_other, p, D_other, W, R, False, DROPS, LOCKED)


@jit
def active_gradient_kernel(grad, out, grad_y, sums, n_row, T, p, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """Compute the gradient of dropout(relu(y + bias)), 0 where the result is, and sum some rows for that of the bias."""
    n_tile = tl.cdiv(D, W)
    program, n_program = tl.program_id(0) // n_tile, tl.num_programs(0) // n_tile
    column = tl.program_id(0) % n_tile * W + tl.arange(0, W)
    of_bias = tl.zeros([R, W], tl.float32)
    for r0 in range(program * R, n_row, n_program * R):
        row = r0 + tl.arange(0, R)
        inside = (row < n_row)[:, None] & (column < D)[None, :]
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        passed = tl.load(out + at, mask=inside, other=0.0) > 0
        gradient = tl.where(passed, tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) / (1 - p), 0.0)
        tl.store(grad_y + at, gradient.to(grad_y.dtype.element_ty), mask=inside)
        of_bias += gradient
    tl.store(sums + program * D + column, tl.sum(of_bias, 0), mask=column < D)


def added(x: Tensor, y: Tensor, bias: Tensor | None, *, p: float, locked: bool, norm: nn.LayerNorm | None) -> Tensor:
    """Return norm(x + dropout(y + bias)), (…, T, D); under autocast a norm's result is fp32, as PyTorch's is."""
    assert x.shape == y.shape, (x.shape, y.shape)
    if norm is not None and torch.is_autocast_enabled(x.device.type):
        x = x.float()
    weight, shift, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    return _Added.apply(x, y, bias, weight, shift, eps, p, locked, drawn_seeds(1, x.device) if p else None)


def active_inner(y: Tensor, bias: Tensor, *, p: float, locked: bool) -> Tensor:
    """Return dropout(relu(y + bias)), (…, T, D)."""
    return _ActiveInner.apply(y, bias, p, locked, drawn_seeds(1, y.device) if p else None)


def dropped(*xs: Tensor, p: float, locked: bool) -> tuple[Tensor, ...]:
    """Return dropout(x), (…, T, D), of one or two tensors, whose sizes may differ, by one kernel."""
    return _Dropped.apply(p, locked, drawn_seeds(len(xs), xs[0].device), *xs)


@jit
def sum_kernel(sums, out, n_sum, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """Add up the partial sums of programs, (n_sum, D), for some columns."""
    column = tl.program_id(0) * W + tl.arange(0, W)
    total = tl.zeros([R, W], tl.float32)
    for p0 in range(0, n_sum, R):
        program = p0 + tl.arange(0, R)
        inside = (program < n_sum)[:, None] & (column < D)[None, :]
        total += tl.load(sums + (program * D)[:, None] + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < D)


class _Added(torch.autograd.Function):
    """norm(x + dropout(y + bias)).

    The arguments of `apply` are x and y (…, T, D), bias, weight and shift (D,) or None, the epsilon of the norm, probability of
    dropout, whether it is locked, and the seed int64 (1,) if it drops.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        x, y, bias, weight, shift, eps, p, locked, seed = args
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.sizes = sizes = _sizes(x, p) | {"eps": eps, "DROPS": p > 0, "LOCKED": locked}
        n_program = triton.cdiv(sizes["n_row"], sizes["R"])
        launch(added_kernel, (n_program,), x.contiguous(), y.contiguous(), bias, weight, shift, seed, out, **sizes)
        needed = (None, None) if weight is None else (x, y)
        ctx.save_for_backward(*needed, bias, weight, seed)
        ctx.dtypes = (x.dtype, y.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y, bias, weight, seed = ctx.saved_tensors
        x, y = (None if states is None else states.contiguous() for states in (x, y))
        grad, (x_dtype, y_dtype) = grad_outputs[0].contiguous(), ctx.dtypes
        n_program = min(triton.cdiv(ctx.sizes["n_row"], ctx.sizes["R"]), _MOST_PROGRAMS)
        grad_x = None if weight is None else torch.empty_like(grad, dtype=x_dtype)
        grad_y = torch.empty_like(grad, dtype=y_dtype)
        sums = None
        if any(ctx.needs_input_grad[2:5]):
            sums = grad.new_empty(n_program, 3 * grad.shape[-1], dtype=torch.float32)
        arguments = (grad, x, y, bias, weight, seed, grad_x, grad_y, sums)
        launch(added_gradient_kernel, (n_program,), *arguments, **ctx.sizes)
        of_weight = of_shift = of_bias = None
        if sums is not None:
            dtype = (bias if weight is None else weight).dtype
            of_weight, of_shift, of_bias = column_sums(sums, dtype).unflatten(0, (3, -1))
        if weight is None:
            return grad, grad_y, of_bias, *[None] * 6
        return grad_x, grad_y, None if bias is None else of_bias, of_weight, of_shift, *[None] * 4


class _ActiveInner(torch.autograd.Function):
    """dropout(relu(y + bias)); the arguments are y (…, T, D), bias (D,), probability, whether it is locked, and the seed."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        y, bias, p, locked, seed = args
        y = y.contiguous()
        out = torch.empty_like(y)
        ctx.sizes = sizes = _sizes(y, p, widest=512)
        launch(active_kernel, (_n_tile(sizes),), y, bias, seed, out, DROPS=p > 0, LOCKED=locked, **sizes)
        ctx.save_for_backward(out, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (out, bias), sizes = ctx.saved_tensors, ctx.sizes
        n_program = min(triton.cdiv(sizes["n_row"], sizes["R"]), _MOST_PROGRAMS)
        grad_y = torch.empty_like(out)
        sums = torch.empty(n_program, sizes["D"], dtype=torch.float32, device=out.device)
        n_tile = triton.cdiv(sizes["D"], sizes["W"])
        arguments = (grad_outputs[0].contiguous(), out, grad_y, sums)
        launch(active_gradient_kernel, (n_program * n_tile,), *arguments, **sizes)
        return grad_y, column_sums(sums, bias.dtype), None, None, None


class _Dropped(torch.autograd.Function):
    """dropout of one or two tensors; the arguments are probability, whether it is locked, seeds int64 (1 or 2,), and these."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        ctx.p, ctx.locked, seeds, *xs = args
        ctx.save_for_backward(seeds)
        xs = [x.contiguous() for x in xs]
        outs = tuple(torch.empty_like(x) for x in xs)
        sizes = _sizes(xs[0], ctx.p, widest=512)
        other = _sizes(xs[-1], ctx.p) | {"W": sizes["W"], "R": sizes["R"]}  # tiles of the same size
        of_other = {"n_other": other["n_row"], "T_other": other["T"], "D_other": other["D"]}
        n_program = _n_tile(sizes) + (_n_tile(other) if len(xs) > 1 else 0)
        tensors = (xs[0], seeds, outs[0], xs[-1], outs[-1])
        launch(pair_kernel, (n_program,), *tensors, **of_other, DROPS=True, LOCKED=ctx.locked, **sizes)
        return outs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return None, None, None, *_Dropped.apply(ctx.p, ctx.locked, *ctx.saved_tensors, *grad_outputs)


def column_sums(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what programs summed, (n_program, D), added up in a fixed order, (D,)."""
    n_program, D = sums.shape
    out = torch.empty(D, dtype=dtype, device=sums.device)
    launch(sum_kernel, (triton.cdiv(D, 8),), sums, out, n_program, D=D, W=8, R=512, num_warps=8)  # most are loaded at once
    return out


def _sizes(x: Tensor, p: float, *, widest: int | None = None) -> dict[str, Any]:
    """Return the arguments that all kernels have in common, for states (…, T, D) and tiles of R rows and W columns."""
    D = x.shape[-1]
    n_row, n_position = x.numel() // max(D, 1), x.shape[-2] if x.ndim > 1 else 1
    width = triton.next_power_of_2(D)
    width = width if widest is None else min(width, widest)
    rows = 1 if n_row <= _FEW_ROWS and width > 256 else min(max(1, _TILE // width), 16)
    warps = min(max(rows * width // 512, 1), 16)
    return {"n_row": n_row, "T": n_position, "p": p, "D": D, "W": width, "R": rows, "num_warps": warps}


def _n_tile(sizes: dict[str, Any]) -> int:
    """Return how many tiles states have."""
    return triton.cdiv(sizes["n_row"], sizes["R"]) * triton.cdiv(sizes["D"], sizes["W"])
