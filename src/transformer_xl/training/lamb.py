"""LAMB (You et al. 2020, arXiv 1904.00962): Adam's direction, with a length in proportion to that of each parameter tensor.

    m ← β₁m + (1 - β₁)g        v ← β₂v + (1 - β₂)g²        r = m / (√v + ε) + λw
    w ← w - lr · min(‖w‖, 10) / (‖r‖ + ε) · r              a ratio of 1 where ‖w‖ or ‖r‖ is 0

Reference: `JITLamb` of NVIDIA's `PyTorch/LanguageModeling/Transformer-XL/pytorch/lamb.py`, because results are published for
it. Like version 3 of the paper, and unlike the last, it does not divide m and v by 1 - βᵗ.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments for large batches; `eps` is added to both denominators.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> weight.grad = torch.ones(4)
        >>> Lamb([weight], lr=0.5, betas=(0.0, 0.0)).step()
        >>> round(weight.norm().item(), 5)  # half of 2
        1.0
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            settings = {"lr": group["lr"], "betas": group["betas"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], **settings)
        return loss


def _update(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update one parameter and its moments in place, without waiting for the device."""
    if not state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    direction = first / (second.sqrt() + eps)
    if weight_decay:
        direction.add_(weight, alpha=weight_decay)
    weight_norm, norm = weight.norm().clamp(max=10.0), direction.norm()
    ratio = torch.where((weight_norm > 0) & (norm > 0), weight_norm / (norm + eps), 1.0)
    weight.sub_(direction * (ratio * lr))
