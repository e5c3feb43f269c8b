"""Random masks of dropout, fast on a CPU, too, and seeds of those that a GPU draws.

PyTorch draws one random number per element, one after another on one core. At the size of the paper's enwik8 model that was a
sixth of the training step. Here one 64-bit draw decides for four elements, and the mask is kept as one byte per element.
Kernels on a GPU draw masks from a seed, forward and backward, and keep none.
"""

import torch
from torch import Tensor

_LEVELS = 1 << 16  # 16 random bits decide for an element, so the probability is exact to 1 / 131,072


def keep_mask(like: Tensor, p: float) -> tuple[Tensor, float]:
    """Draw a uint8 mask of the shape and device of `like`: 0 where an element is dropped, with probability `p`, else 1.

    The second result is the factor 1 / (share kept), which preserves the mean.
    """
    dropped_levels = min(round(p * _LEVELS), _LEVELS - 1)
    draws = torch.empty((like.numel() + 3) // 4, dtype=torch.int64, device=like.device).random_(-(2**63), None)
    levels = draws.view(torch.int16)[: like.numel()].view(like.shape)
    keep = levels >= dropped_levels - _LEVELS // 2
    # a view saves a copy, but older compilers (torch 2.10) fail at it; compiled code copies nothing either way
    keep = keep.to(torch.uint8) if torch.compiler.is_compiling() else keep.view(torch.uint8)
    return keep, _LEVELS / (_LEVELS - dropped_levels)


def apply_mask(x: Tensor, keep: Tensor, factor: float) -> Tensor:
    """Multiply by the mask and the factor of `keep_mask`."""
    # converting the mask first is several times faster than a product of mixed types or a masked fill
    return keep.to(x.dtype).mul_(x).mul_(factor)


def drawn_seeds(n: int, device: torch.device) -> Tensor:
    """Return numbers that decide which elements are dropped, int64 (n,).

    They stay on the device, so that the host does not wait for them and a graph can be captured.
    """
    return torch.randint(2**62, (n,), device=device)
