"""What stands between the products of a layer, as GPU kernels: bias, ReLU, dropout, residual sum and layer norm.

PyTorch takes a kernel for each of them, and each reads and writes all states; its gradient of a norm's weights alone takes as
long as a product. Here one kernel does what a block ends with, `norm(x + dropout(y + bias))`, and one what stands between the
maps of a feed-forward network, `dropout(relu(y + bias))`. A pass over the same rows computes all gradients, those of biases and
norms as partial sums in a fixed order, so results are the same to the last bit every time.

No mask is kept: forward and backward draw it from the same seed. The numbers of a row are a part of one sequence of 2^32, which
begins anywhere; parts of different rows overlap now and then, elsewhere in each row. Needs Triton and a GPU; with
TRITON_INTERPRET=1 it runs on any device, slowly.

Shapes: X rows, which are positions of a batch, T positions of each row of the batch, D width.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transformer_xl.model.backends import MOST_FUSED, on_device
from transformer_xl.model.backends.fused_kernels import LN_2, factor_of, words_of
from transformer_xl.model.dropout import Dropout, drawn_seed, in_whole_pass

_MOST_PROGRAMS = 512
"""Programs that sum over rows; a fixed number, because sums in another order have other bits."""
_TILE = 2048
"""Elements that a program holds of each tensor, unless a row has more."""
_MOST_LATE_SUMS = 1 << 20
"""A kernel with at most so many partial sums, 4 MB, leaves them for later (`LateSums` in `training/narrow.py`). Larger ones of
all layers would take much memory, and adding them up takes much longer than a launch."""
_FEW_ROWS = 4096
"""Up to so many rows, a program takes one at a time, which its threads sum without waiting for each other."""

jit = triton.jit(do_not_specialize=["n_row", "T", "M", "n_sum", "n_other", "T_other"])


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
    x, y, bias, weight, shift, seed_at, out, narrow, n_row, T, p, eps,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, DROPS: tl.constexpr, LOCKED: tl.constexpr,
):  # fmt: skip
    """Compute norm(x + dropout(y + bias)) of R rows, or without a norm if it has no weight; also in a narrower type."""
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
    if narrow is not None:
        tl.store(narrow + at, total.to(narrow.dtype.element_ty), mask=inside)


@jit
def added_gradient_kernel(
    grad, grad_narrow, x, y, bias, weight, seed_at, grad_x, grad_y, sums, n_row, T, p, eps,
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
        gradient = tl.zeros([R, W], tl.float32)
        if grad is not None:
            gradient += tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if grad_narrow is not None:
            gradient += tl.load(grad_narrow + at, mask=inside, other=0.0).to(tl.float32)
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
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RELU: tl.constexpr, DROPS: tl.constexpr, LOCKED: tl.constexpr,
):  # fmt: skip
    """Compute dropout(relu(y + bias)), or dropout alone."""
    _activate(tl.program_id(0), y, bias, seed_at, out, n_row, T, p, D, W, R, RELU, DROPS, LOCKED)


@jit
def pair_kernel(
    y, seed_at, out, other, other_seed_at, other_out, n_row, T, n_other, T_other, p,
    D: tl.constexpr, D_other: tl.constexpr, W: tl.constexpr, R: tl.constexpr, DROPS: tl.constexpr, LOCKED: tl.constexpr,
):  # fmt: skip
    """Compute dropout of two tensors: the first programs take tiles of the one, the others tiles of the other."""
    tile, n_tile = tl.program_id(0), tl.cdiv(n_row, R) * tl.cdiv(D, W)
    if tile < n_tile:
        _activate(tile, y, None, seed_at, out, n_row, T, p, D, W, R, False, DROPS, LOCKED)
    else:
        tile -= n_tile
        _activate(tile, other, None, other_seed_at, other_out, n_other, T_other, p, D_other, W, R, False, DROPS, LOCKED)


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


def added(x: Tensor, y: Tensor, bias: Tensor | None, *, drop: Dropout, norm: nn.LayerNorm | None) -> Tensor:
    """Return norm(x + dropout(y + bias)), (…, T, D).

    Under autocast a norm's result is fp32, as PyTorch's is. In a training step it has a copy in the type of autocast, which
    `products.linear` reads; nothing else may change the result, or ask for its gradient (`dropout.whole_pass`).
    """
    assert x.shape == y.shape, (x.shape, y.shape)
    kind, narrow_dtype = x.device.type, None
    if norm is not None and torch.is_autocast_enabled(kind):
        x, narrow_dtype = x.float(), torch.get_autocast_dtype(kind) if in_whole_pass() else None
    weight, shift, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    states, narrow = _Added.apply(x, y, bias, weight, shift, eps, *_drawn(drop, x), narrow_dtype)
    if narrow is not None:
        states.autocast_copy = narrow, states._version
    return states


def active_inner(y: Tensor, bias: Tensor, *, drop: Dropout) -> Tensor:
    """Return dropout(relu(y + bias)), (…, T, D)."""
    return _ActiveInner.apply(y, bias, *_drawn(drop, y))


def _drawn(drop: Dropout, x: Tensor) -> tuple[float, bool, Tensor | None]:
    """Return the probability of dropout now, whether it is locked, and a seed."""
    p = drop.p if drop.training else 0.0
    return p, drop.locked, drawn_seed(x.device) if p else None


@jit
def sum_kernel(
    sums, first, second, third, n_sum,
    N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of programs, (n_sum, N, D), for some columns of one vector.

    Each of the N vectors has a result of its own. If the sums of several kernels are stacked, (L, n_sum, N, D), all results go
    to the first tensor, (L, N, D).
    """
    n_tile = tl.cdiv(D, W)
    row, column = tl.program_id(0) // n_tile, tl.program_id(0) % n_tile * W + tl.arange(0, W)
    vector = row % N
    sums += (row // N).to(tl.int64) * n_sum * (N * D)
    total = tl.zeros([R, W], tl.float32)
    for p0 in range(0, n_sum, R):
        program = p0 + tl.arange(0, R)
        inside = (program < n_sum)[:, None] & (column < D)[None, :]
        total += tl.load(sums + ((program * N + vector) * D)[:, None] + column[None, :], mask=inside, other=0.0)
    found = tl.sum(total, 0)
    if STACKED:
        tl.store(first + row * D + column, found, mask=column < D)
        return
    if first is not None:  # noqa: SIM102 (the compiler drops the outer one)
        if vector == 0:
            tl.store(first + column, found.to(first.dtype.element_ty), mask=column < D)
    if second is not None:  # noqa: SIM102 (the compiler drops the outer one)
        if vector == 1:
            tl.store(second + column, found.to(second.dtype.element_ty), mask=column < D)
    if third is not None:  # noqa: SIM102 (the compiler drops the outer one)
        if vector == 2:
            tl.store(third + column, found.to(third.dtype.element_ty), mask=column < D)


@jit
def join_kernel(
    mem, h, out, mem_row, mem_at, n_row, T, M, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Put a segment after its memory, in the type of the result."""
    n_tile, S = tl.cdiv(D, W), M + T
    row, column = tl.program_id(0) // n_tile * R + tl.arange(0, R), tl.program_id(0) % n_tile * W + tl.arange(0, W)
    batch, s = (row // S).to(tl.int64), row % S
    inside = (row < n_row)[:, None] & (column < D)[None, :]
    is_old = (s < M)[:, None]
    old = tl.load(mem + (batch * mem_row + s * mem_at)[:, None] + column[None, :], mask=inside & is_old, other=0.0)
    new = tl.load(h + ((batch * T + s - M) * D)[:, None] + column[None, :], mask=inside & ~is_old, other=0.0)
    found = tl.where(is_old, old.to(out.dtype.element_ty), new.to(out.dtype.element_ty))
    tl.store(out + row.to(tl.int64)[:, None] * D + column[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["S", "n_row", "C"])
def phase_kernel(by_phase, out, S, n_row, C, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """Add up the gradients of R position keys of one head from all eight phases, (8, N, C, H), in units of log 2.

    Phase w begins w rows later. Rows from S on become zeros.
    """
    n_tile = tl.cdiv(n_row, R)
    s, head, h = tl.program_id(0) % n_tile * R + tl.arange(0, R), tl.program_id(0) // n_tile, tl.arange(0, W)
    N = tl.num_programs(0) // n_tile
    total = tl.zeros([R, W], tl.float32)
    for phase in tl.static_range(8):
        at = ((phase * N + head) * C + s - phase).to(tl.int64)[:, None] * H + h[None, :]
        inside = ((s >= phase) & (s < S))[:, None] & (h < H)[None, :]
        total += tl.load(by_phase + at, mask=inside, other=0.0).to(tl.float32)
    at = (s * N + head).to(tl.int64)[:, None] * H + h[None, :]
    tl.store(out + at, (total * LN_2).to(out.dtype.element_ty), mask=(s < n_row)[:, None] & (h < H)[None, :])


class _Added(torch.autograd.Function):
    """norm(x + dropout(y + bias)), and the same in a narrower type if one is given.

    The arguments of `apply` are x and y (…, T, D), bias, weight and shift (D,) or None, the epsilon of the norm, probability of
    dropout, whether it is locked, the seed int64 (1,) if it drops, and the narrower type or None.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        """Compute the states, and their narrow copy or None."""
        x, y, bias, weight, shift, eps, p, locked, seed, narrow_dtype = args
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        narrow = None if narrow_dtype is None else torch.empty_like(x, dtype=narrow_dtype)
        ctx.sizes = sizes = _sizes(x, p, locked)
        n_program = triton.cdiv(sizes["n_row"], sizes["R"])
        _launch(added_kernel, n_program, x, y, bias, weight, shift, seed, out, narrow, eps=eps, **sizes)
        needed = (None, None) if weight is None else (x, y)
        ctx.save_for_backward(*needed, bias, weight, seed)
        ctx.vectors, ctx.eps, ctx.x_dtype, ctx.y_dtype = (weight, shift, bias), eps, x.dtype, y.dtype
        ctx.set_materialize_grads(False)
        return out, narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute all gradients in one pass, from either or both of the results."""
        x, y, bias, weight, seed = ctx.saved_tensors
        grad, narrow = (None if g is None else g.contiguous() for g in grad_outputs)
        n_program = min(triton.cdiv(ctx.sizes["n_row"], ctx.sizes["R"]), _MOST_PROGRAMS)
        whole = grad if narrow is None else narrow
        assert whole is not None
        grad_y = torch.empty_like(whole, dtype=ctx.y_dtype)
        grad_x = None if weight is None else torch.empty_like(whole, dtype=ctx.x_dtype)
        sums, is_late = None, False
        if any(ctx.needs_input_grad[2:5]):
            sums, is_late = _place_of_sums(ctx.vectors, n_program, whole)
        arguments = (grad, narrow, x, y, bias, weight, seed, grad_x, grad_y, sums)
        _launch(added_gradient_kernel, n_program, *arguments, eps=ctx.eps, **ctx.sizes)
        is_done = sums is None or is_late
        of_weight, of_shift, of_bias = [None] * 3 if is_done else totals(sums, [weight, weight, bias])
        return grad if grad_x is None else grad_x, grad_y, of_bias, of_weight, of_shift, *[None] * 5


class _ActiveInner(torch.autograd.Function):
    """dropout(relu(y + bias)); the arguments are y (…, T, D), bias (D,), probability, whether it is locked, and the seed."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        """Compute the result, which is all that the backward pass needs."""
        y, bias, p, locked, seed = args
        y = y.contiguous()
        out = torch.empty_like(y)
        ctx.sizes = sizes = _sizes(y, p, locked, widest=512)
        n_program = triton.cdiv(sizes["n_row"], sizes["R"]) * triton.cdiv(sizes["D"], sizes["W"])
        _launch(active_kernel, n_program, y, bias, seed, out, RELU=True, **sizes)
        ctx.save_for_backward(out)
        ctx.vectors = (bias,)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute both gradients in one pass."""
        (out,) = ctx.saved_tensors
        sizes = {name: size for name, size in ctx.sizes.items() if name not in ("DROPS", "LOCKED")}
        n_program = min(triton.cdiv(sizes["n_row"], sizes["R"]), _MOST_PROGRAMS)
        grad_y = torch.empty_like(out)
        sums, is_late = _place_of_sums(ctx.vectors, n_program, out)
        n_tile = triton.cdiv(sizes["D"], sizes["W"])
        _launch(active_gradient_kernel, n_program * n_tile, grad_outputs[0].contiguous(), out, grad_y, sums, **sizes)
        of_bias = None if is_late else totals(sums, [*ctx.vectors])[0]
        return grad_y, of_bias, None, None, None


class Dropped(torch.autograd.Function):
    """dropout(x); the arguments are x (…, T, D), probability, whether it is locked, and the seed."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        """Drop elements."""
        x, ctx.p, ctx.locked, seed = args
        ctx.save_for_backward(seed)
        x = x.contiguous()
        out, sizes = torch.empty_like(x), _sizes(x, ctx.p, ctx.locked, widest=512)
        n_program = triton.cdiv(sizes["n_row"], sizes["R"]) * triton.cdiv(sizes["D"], sizes["W"])
        _launch(active_kernel, n_program, x, None, seed, out, RELU=False, **sizes)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Drop the same elements of the gradient."""
        (seed,) = ctx.saved_tensors
        return Dropped.apply(grad_outputs[0], ctx.p, ctx.locked, seed), None, None, None


class DroppedPair(torch.autograd.Function):
    """dropout(x) and dropout(y) in one kernel, each as `Dropped` computes it.

    The arguments of `apply` are x (…, T, D) and y, whose sizes may be others, probability, whether it is locked, and two seeds.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        """Drop elements of both."""
        x, y, ctx.p, ctx.locked, *seeds = args
        ctx.save_for_backward(*seeds)
        x, y = x.contiguous(), y.contiguous()
        x_out, y_out = torch.empty_like(x), torch.empty_like(y)
        sizes, own = (_sizes(states, ctx.p, ctx.locked, widest=512) for states in (x, y))
        n_program = sum(triton.cdiv(s["n_row"], sizes["R"]) * triton.cdiv(s["D"], sizes["W"]) for s in (sizes, own))
        sizes |= {"n_other": own["n_row"], "T_other": own["T"], "D_other": own["D"]}  # y has tiles of the same size
        _launch(pair_kernel, n_program, x, seeds[0], x_out, y, seeds[1], y_out, **sizes)
        return x_out, y_out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Drop the same elements of both gradients."""
        return *DroppedPair.apply(*grad_outputs, ctx.p, ctx.locked, *ctx.saved_tensors), None, None, None, None


def _place_of_sums(vectors: Sequence[Tensor | None], n_program: int, like: Tensor) -> tuple[Tensor, bool]:
    """Return where programs write their partial sums for N vectors, (n_program, N, D), and whether they stay there."""
    shape = torch.Size((n_program, len(vectors), like.shape[-1]))
    keepers = {getattr(vector, "late_sums", None) for vector in vectors if vector is not None and vector.requires_grad}
    late = keepers.pop() if len(keepers) == 1 and shape.numel() <= _MOST_LATE_SUMS else None
    if late is not None:
        return late.slot(vectors, shape, like.device), True
    return torch.empty(shape, dtype=torch.float32, device=like.device), False


def totals(sums: Tensor, like: list[Tensor | None]) -> list[Tensor | None]:
    """Return what programs summed, (n_program, N, D), in the types and shapes of N tensors; None for those that are None."""
    n_program, N, D = sums.shape
    found = [None if vector is None else torch.empty_like(vector) for vector in like]
    sizes = {"n_sum": n_program, "N": N, "D": D, "W": 8, "R": 512}  # most are loaded at once
    _launch(sum_kernel, N * triton.cdiv(D, 8), sums, *found, *[None] * (3 - N), STACKED=False, **sizes)
    return found


def stacked_totals(sums_LPND: Tensor) -> Tensor:
    """Return the totals of L kernels' partial sums for N vectors, fp32 (L, N, D)."""
    L, n_program, N, D = sums_LPND.shape
    found = torch.empty(L, N, D, dtype=torch.float32, device=sums_LPND.device)
    sizes = {"n_sum": n_program, "N": N, "D": D, "W": 32, "R": 64}
    _launch(sum_kernel, L * N * triton.cdiv(D, 32), sums_LPND, found, None, None, STACKED=True, **sizes)
    return found


def sum_of_phases(by_phase_XCH: Tensor, n_key: int, n_row: int, dtype: torch.dtype) -> Tensor:
    """Return the gradients of position keys, (n_row, N, H), from those of eight phases, (8·N, C, H), in units of log 2.

    Rows after those of the keys are zeros.
    """
    n_all, C, H = by_phase_XCH.shape
    out = torch.empty(n_row, n_all // 8, H, dtype=dtype, device=by_phase_XCH.device)
    sizes = {"H": H, "W": triton.next_power_of_2(H), "R": 16}
    _launch(phase_kernel, triton.cdiv(n_row, 16) * (n_all // 8), by_phase_XCH, out, n_key, n_row, C, **sizes)
    return out


def joined_states(mem_BMD: Tensor, h_BTD: Tensor) -> Tensor:
    """Return [mem ; h], (B, M + T, D), in the type of h; without a gradient."""
    (B, M, D), T = mem_BMD.shape, h_BTD.shape[1]
    mem_BMD = mem_BMD if mem_BMD.stride(2) == 1 else mem_BMD.contiguous()
    out = torch.empty(B, M + T, D, dtype=h_BTD.dtype, device=h_BTD.device)
    sizes = {"n_row": B * (M + T), "T": T, "M": M, "D": D, "W": min(triton.next_power_of_2(D), 512), "R": 4}
    n_program = triton.cdiv(sizes["n_row"], 4) * triton.cdiv(D, sizes["W"])
    strides = mem_BMD.stride()[:2]
    _launch(join_kernel, n_program, mem_BMD, h_BTD.contiguous(), out, *strides, **sizes)
    return out


def _sizes(x: Tensor, p: float, locked: bool, *, widest: int = MOST_FUSED) -> dict[str, Any]:
    """Return the arguments that all kernels have in common, for states (…, T, D) and tiles of R rows and W columns."""
    D = x.shape[-1]
    n_row, n_position = x.numel() // max(D, 1), x.shape[-2] if x.ndim > 1 else 1
    width = min(triton.next_power_of_2(D), widest)
    rows = 1 if n_row <= _FEW_ROWS and width > 256 else min(max(1, _TILE // width), 16)
    sizes = {"n_row": n_row, "T": n_position, "p": p, "D": D, "W": width, "R": rows}
    return sizes | {"DROPS": p > 0, "LOCKED": locked}


def _launch(kernel: Any, n_program: int, *tensors: Any, **named: Any) -> None:
    """Launch a kernel on the device of its tensors."""
    device = next(tensor.device for tensor in tensors if isinstance(tensor, Tensor))
    num_warps = min(max(named["R"] * named["W"] // 512, 1), 16)
    if n_program:
        with on_device(device):
            kernel[(n_program,)](*tensors, **named, num_warps=num_warps)
