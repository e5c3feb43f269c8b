"""Products with weights, by the faster of PyTorch's two libraries.

PyTorch multiplies fp32 by MKL, which is slow on processors of AMD with AVX-512. There oneDNN, which PyTorch takes for bf16, is
twice as fast. Both sum in fp32, in another order.

A weight may have a list for the factors of its gradient (`keep_factors`). Small products then leave their factors there instead
of multiplying them, and whoever made the lists multiplies those of equal shapes together after the backward pass.

Shapes: X any number of rows, K width of the input, O of the output.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transformer_xl.model.backends import is_fused
from transformer_xl.model.precision import processor

_LEAST_WORK = 1 << 22
"""Products of fewer multiplications than this take less time than the choice saves."""
_MOST_LATE_ROWS, _MOST_LATE_WEIGHTS = 2048, 1 << 20
"""A gradient is computed late if its product sums at most so many rows, and its weight has at most so many elements. Larger
products fill a GPU alone, and their factors, kept and copied side by side, would take much memory."""


class Factors(NamedTuple):
    """What the gradient of some rows of a weight is the product of, gradᵀ x."""

    first_row: int
    grad: Tensor
    """(X, O)."""
    x: Tensor
    """(X, K)."""


def keep_factors(weight_OK: Tensor) -> list[Factors]:
    """Let a weight get no gradient from small products. Return the list to which their backward passes add its factors."""
    cast("Any", weight_OK).late_factors = factors = []
    return factors


def multiplied(alike: Sequence[Factors]) -> Sequence[Tensor]:
    """Return the gradients, (O, K) each, of factors that have the same shapes; most GPUs return those of several in fp32."""
    if len(alike) == 1:
        return [factors.grad.T @ factors.x for factors in alike]
    grads_LXO = torch.stack([factors.grad for factors in alike])
    x_LXK = torch.stack([factors.x for factors in alike])
    if _returns_fp32(x_LXK.device):
        return torch.bmm(grads_LXO.transpose(1, 2), x_LXK, out_dtype=torch.float32).unbind()
    return torch.bmm(grads_LXO.transpose(1, 2), x_LXK).unbind()


@cache
def _returns_fp32(device: torch.device) -> bool:
    """Say whether a device has a batched product of bf16 with a result in fp32; PyTorch has none for CPUs and older GPUs."""
    return device.type == "cuda" and (torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0))


def _late(weight_OK: Tensor, *inputs: Tensor) -> list[Factors] | None:
    """Return where a product with the inputs leaves the factors of the weight's gradient; None: it computes that itself."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and weight_OK.requires_grad):
        return None
    late = getattr(weight_OK, "late_factors", None)
    if late is None or weight_OK.numel() > _MOST_LATE_WEIGHTS:
        return None
    n_row = sum(x.numel() for x in inputs) // weight_OK.shape[1]
    return late if n_row <= _MOST_LATE_ROWS else None


def linear(x: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + bias as `F.linear` does, (…, O); of a state that has a copy in the type of autocast, this is read."""
    x = _with_copy(x)
    late = _late(weight_OK, x)
    if late is not None:
        return _LateProduct.apply(narrowed(x), weight_OK, bias_O, late)
    if _is_for_onednn(x, weight_OK):
        return _Product.apply(x.flatten(0, -2), weight_OK, bias_O).unflatten(0, x.shape[:-1])
    return F.linear(x, weight_OK, bias_O)


def _is_for_onednn(x: Tensor, weight_OK: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # before sizes are compared, which would fix those of an exported graph
        and x.dtype == weight_OK.dtype == torch.float32
        and x.device.type == weight_OK.device.type == "cpu"
        and x.dim() > 1
        and x.numel() * weight_OK.shape[0] >= _LEAST_WORK
        and type(weight_OK) in (Tensor, nn.Parameter)  # no parts of weights in several processes
        and (weight_OK.is_contiguous() or weight_OK.T.is_contiguous())  # of columns of a matrix it takes 250 times as long
        and not torch.is_autocast_enabled("cpu")
        and _prefers_onednn()
    )


@cache
def _prefers_onednn() -> bool:
    """Say whether oneDNN multiplies fp32 faster than MKL here."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processor().startswith("AMD")
    )


def narrowed(x: Tensor) -> Tensor:
    """Return x in the type in which autocast multiplies, if it is on, and as it is in fp64, which autocast leaves alone."""
    kind = x.device.type
    is_narrowed = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return _with_copy(x).to(torch.get_autocast_dtype(kind)) if is_narrowed else x


def _with_copy(x: Tensor) -> Tensor:
    """Return the copy that a kernel made beside x (see `backends.fused_blocks.added`), if autocast would make the same now."""
    found = getattr(x, "autocast_copy", None)
    if found is None or not torch.is_autocast_enabled(x.device.type):
        return x
    copy, version = found
    return copy if x._version == version and copy.dtype == torch.get_autocast_dtype(x.device.type) else x


def products_of_one(x_XK: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return x Wᵀ, (X, O), of several weights of one shape, by one product; x gets no gradient from small ones."""
    x, weights = narrowed(x_XK), [narrowed(weight_OK) for weight_OK in weights]
    late = [found for weight_OK in weights if (found := _late(weight_OK, x)) is not None]
    return _ProductsOfOne.apply(x, late, *weights) if len(late) == len(weights) else _multiply_by_each(x, weights)


def _multiply_by_each(x_XK: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.bmm(x_XK.expand(len(weights), *x_XK.shape), torch.stack([*weights]).transpose(1, 2)).unbind()


class _ProductsOfOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        x, ctx.late, *weights = args
        ctx.save_for_backward(x)
        return _multiply_by_each(x, weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (x,) = ctx.saved_tensors
        for late, grad_XO in zip(ctx.late, grad_outputs, strict=True):
            late.append(Factors(0, grad_XO, x))
        return None, None, *[None] * len(grad_outputs)


def joined_products(mem_BMD: Tensor, h_BTD: Tensor, weight_OD: Tensor, n_query: int) -> tuple[Tensor, Tensor]:
    """Return h Wᵀ for the first rows of W, and [mem ; h] Wᵀ for the others: queries (B, T, ·), and keys and values (B, S, ·).

    A GPU takes fewer and larger products than with memory and segment apart. No gradient is computed for a memory that needs
    none. This needs Triton.
    """
    weight_OD = narrowed(weight_OD)
    return _JoinedProducts.apply(mem_BMD, narrowed(h_BTD), weight_OD, n_query, _late(weight_OD, mem_BMD, h_BTD))


class _JoinedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        from transformer_xl.model.backends.fused_blocks import joined_states  # Triton takes a second

        mem, h, weight, n_query, ctx.late = args
        joined = joined_states(mem, h)
        ctx.save_for_backward(h, joined, weight)
        ctx.n_query, ctx.mem_dtype = n_query, mem.dtype
        w_q, w_kv = weight.tensor_split([n_query])
        return F.linear(h, w_q), F.linear(joined, w_kv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        h, joined, weight = ctx.saved_tensors
        grad_q, grad_kv = (grad.contiguous() for grad in grad_outputs)
        w_q, w_kv = weight.tensor_split([ctx.n_query])
        B, M = len(h), joined.shape[1] - h.shape[1]
        own = w_kv.expand(B, *w_kv.shape)  # a row at a time, because those of the segment lie apart
        needs_mem, needs_h, needs_weight, *_ = ctx.needs_input_grad
        grad_mem = torch.bmm(grad_kv[:, :M], own).to(ctx.mem_dtype) if needs_mem else None
        grad_h = torch.baddbmm(grad_q @ w_q, grad_kv[:, M:], own) if needs_h else None
        if not needs_weight:
            return grad_mem, grad_h, None, None, None
        factors = [
            Factors(0, grad_q.flatten(0, 1), h.flatten(0, 1)),
            Factors(ctx.n_query, grad_kv.flatten(0, 1), joined.flatten(0, 1)),
        ]
        if ctx.late is not None:
            ctx.late.extend(factors)
            return grad_mem, grad_h, None, None, None
        grad_weight = torch.empty_like(weight)
        for part, (_, grad, x) in zip(grad_weight.tensor_split([ctx.n_query]), factors, strict=True):
            torch.mm(grad.T, x, out=part)
        return grad_mem, grad_h, grad_weight, None, None


class _LateProduct(torch.autograd.Function):
    """x W^T + bias, whose backward pass leaves the factors of the weight's gradient in a list."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        x, weight_OK, bias_O, ctx.late = args
        ctx.save_for_backward(x, weight_OK)
        return F.linear(x, weight_OK, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_OK = ctx.saved_tensors
        grad_XO = grad_outputs[0].reshape(-1, len(weight_OK))
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        ctx.late.append(Factors(0, grad_XO, x.reshape(-1, x.shape[-1])))
        grad_x = (grad_XO @ weight_OK).view(x.shape) if needs_x else None
        return grad_x, None, grad_XO.sum(0) if needs_bias else None, None


def halves(x_BS2NH: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values, which lie side by side; on a GPU, gradients that do so, too, are not copied."""
    first, second = _Halves.apply(x_BS2NH) if is_fused(x_BS2NH) else x_BS2NH.unbind(2)
    return first, second


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Any:
        return args[0].unbind(2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        first, second = grad_outputs
        B, S, N, H = first.shape
        strides = (S * 2 * N * H, 2 * N * H, H, 1)
        are_halves = (
            first.stride() == second.stride() == strides
            and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
            and second.storage_offset() - first.storage_offset() == N * H
            and not torch.is_grad_enabled()
        )
        if are_halves:
            return first.as_strided((B, S, 2, N, H), (*strides[:2], N * H, *strides[2:]))
        return torch.stack([first, second], 2)


class _Product(torch.autograd.Function):
    """x W^T + bias; its gradients are such products again, so it can be differentiated any number of times."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        x_XK, weight_OK, bias_O = args
        ctx.save_for_backward(x_XK, weight_OK)
        return torch.ops.mkldnn._linear_pointwise(x_XK, weight_OK, bias_O, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad_XO,) = grad_outputs
        x_XK, weight_OK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = _Product.apply(grad_XO, weight_OK.T, None) if needs_x else None
        grad_weight = _Product.apply(grad_XO.T, x_XK.T, None) if needs_weight else None
        return grad_x, grad_weight, grad_XO.sum(0) if needs_bias else None
