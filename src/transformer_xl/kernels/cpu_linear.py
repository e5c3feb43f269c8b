"""Products with weights and in attention, by the faster of PyTorch's two libraries.

PyTorch multiplies fp32 by MKL, which is slow on processors of AMD with AVX-512. There oneDNN, which PyTorch takes for bf16, is
twice as fast. Both sum in fp32, in another order.

Shapes: X any number of rows, K width of the input, O of the output.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.kernels.device import processor

_LEAST_WORK = 1 << 22
"""Products of fewer multiplications than this take less time than the choice saves."""


def linear(x: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + bias as `F.linear` does, (…, O)."""
    if _is_for_onednn(x, weight_OK):
        return _Product.apply(x.flatten(0, -2), weight_OK, bias_O).unflatten(0, x.shape[:-1])
    return F.linear(x, weight_OK, bias_O)


def products(a_XMK: Tensor, b_XNK: Tensor, *, plus: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return a b^T + plus of each pair of matrices, (X, M, N), without gradient; `out` is where the result shall be."""
    if not _is_for_onednn(a_XMK[0], b_XNK[0]):
        b_XKN = b_XNK.transpose(1, 2)
        return torch.bmm(a_XMK, b_XKN, out=out) if plus is None else torch.baddbmm(plus, a_XMK, b_XKN, out=out)
    onednn = torch.ops.mkldnn._linear_pointwise
    if plus is None:
        results = [onednn(a, b, None, "none", [], "") for a, b in zip(a_XMK, b_XNK, strict=True)]
    else:
        results = [onednn.binary(a, other, b, None, "add") for a, other, b in zip(a_XMK, plus, b_XNK, strict=True)]
    return results[0].unsqueeze(0) if len(results) == 1 and out is None else torch.stack(results, out=out)


def _is_for_onednn(x: Tensor, weight_OK: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # before sizes are compared, which would fix those of an exported graph
        and x.dim() > 1
        and x.numel() * weight_OK.shape[0] >= _LEAST_WORK  # soon, because a small model notices each question
        and x.dtype == weight_OK.dtype == torch.float32
        and x.device.type == weight_OK.device.type == "cpu"
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
