"""Pairs of numbers of a head turned by angles, which is what rotary positions do to queries and keys.

Number f of a head's first half and number f of its second half are a pair, as in GPT-NeoX and transformers' `rotate_half`. The
paper (Su et al. 2021, arXiv 2104.09864, sec. 3.2) pairs neighbors, which is the same with the rows of W_q and W_k in another
order.

Shapes: H d_head, F = H / 2 pairs.
"""

from typing import Any, cast

import torch
from torch import Tensor

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of the angles that pairs of numbers are turned by."""


def turns(positions: Tensor, d_head: int, dtype: torch.dtype) -> Turns:
    """Return cosines and sines of the angles of positions, int64 (…), as (…, F) in `dtype`, but at least fp32.

    Angles are computed in fp64: in fp32, those of positions above a million would be off by a tenth and more.

    Example:
        >>> turns(torch.tensor([0]), 4, torch.float32)
        (tensor([[1., 1.]]), tensor([[0., 0.]]))
    """
    place = torch.device("cpu") if positions.device.type == "mps" else positions.device  # which has no fp64
    exponents = torch.arange(0, d_head, 2, device=place, dtype=torch.float64) / d_head
    angles = positions.to(place, torch.float64).unsqueeze(-1) * 10000.0**-exponents
    to = {"device": positions.device, "dtype": torch.promote_types(dtype, torch.float32)}
    return angles.cos().to(**to), angles.sin().to(**to)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of queries or keys (…, H) by angles (…, F); with `-sin` that is undone."""
    if x.requires_grad and torch.is_grad_enabled():
        return cast("Tensor", _Turn.apply(x, cos, sin))
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    halves = [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)]
    return torch.cat(halves, dim=-1).to(x.dtype)


class _Turn(torch.autograd.Function):
    """The gradient of a turn is one turn back, where autograd would add up those of its products."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        x, cos, sin = args
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return turned(grad_outputs[0], cos, -sin), None, None
