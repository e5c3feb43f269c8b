"""Dropout that is not the slowest part of a training step on a CPU.

PyTorch draws one random number per element, one after another on one core; at the size of the paper's enwik8 model that was a
sixth of the whole step. Here one 64-bit draw decides for four elements, and the mask is kept as one byte per element.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 1 << 16  # an element is decided by 16 random bits: the probability is exact to 1 / 131,072


def keep_mask(like: Tensor, p: float) -> tuple[Tensor, float]:
    """Draw which elements survive dropout.

    Args:
        like: a tensor of the shape and device wanted.
        p: probability of dropping an element.

    Returns:
        A uint8 tensor, 1 where an element is kept and 0 where not, and the factor 1 / (share kept) that preserves the mean.
    """
    dropped_levels = min(round(p * _LEVELS), _LEVELS - 1)
    draws = torch.empty((like.numel() + 3) // 4, dtype=torch.int64, device=like.device).random_(-(2**63), None)
    levels = draws.view(torch.int16)[: like.numel()].view(like.shape)
    keep = (levels >= dropped_levels - _LEVELS // 2).view(torch.uint8)
    return keep, _LEVELS / (_LEVELS - dropped_levels)


def apply_mask(x: Tensor, keep: Tensor, factor: float) -> Tensor:
    """Multiply by the outcome of `keep_mask`."""
    # converting the mask first is several times faster than a product of mixed types or a masked fill
    return keep.to(x.dtype).mul_(x).mul_(factor)


class Dropout(nn.Module):
    """`torch.nn.Dropout` with the mask of `keep_mask` on a CPU.

    Args:
        p: probability of dropping an element, at least 0 and below 1.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements at random while training; shape and dtype are kept."""
        if not self.training or self.p == 0:
            return x
        return _CpuDropout.apply(x, self.p) if x.device.type == "cpu" else F.dropout(x, self.p)

    def extra_repr(self) -> str:
        """Return the probability, for `print(model)`."""
        return f"p={self.p}"


class _CpuDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        x, p = args
        keep, ctx.factor = keep_mask(x, p)
        ctx.save_for_backward(keep)
        return apply_mask(x, keep, ctx.factor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        (keep,) = ctx.saved_tensors
        return apply_mask(grad, keep, ctx.factor), None


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """Return dropout(relu(x)); on a CPU, the result, 0 where either made it so, is all that the backward pass needs."""
    return _CpuReluDropout.apply(x, p) if x.device.type == "cpu" else F.dropout(F.relu(x), p)


class _CpuReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        x, p = args
        keep, ctx.factor = keep_mask(x, p)
        out = apply_mask(x, keep, ctx.factor).clamp_min_(0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        (out,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, out, 0).mul_(ctx.factor), None
