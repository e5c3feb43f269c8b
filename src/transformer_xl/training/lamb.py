"""LAMB (You et al. 2020, arXiv 1904.00962): Adam's direction, scaled to the length of each parameter tensor.

    m ← β₁m + (1 - β₁)g        v ← β₂v + (1 - β₂)g²        r = m / (√v + ε) + λw
    w ← w - lr · min(‖w‖, 10) / (‖r‖ + ε) · r              a ratio of 1 where ‖w‖ or ‖r‖ is 0

Reference: `JITLamb` of NVIDIA's `PyTorch/LanguageModeling/Transformer-XL/pytorch/lamb.py`, which has published results. Like
version 3 of the paper, and unlike the last, it does not divide m and v by 1 - βᵗ.
"""

from collections.abc import Iterable
from typing import Any

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
        self.found_inf: Tensor | None = None
        """fp32 scalar; where it is 1, a step changes nothing. None: it is not asked."""

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter and its moments in place, without waiting for the device."""
        (beta1, beta2), eps, lr, state = group["betas"], group["eps"], group["lr"], self.state[weight]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        first, second, share = state["exp_avg"], state["exp_avg_sq"], 1 - beta1
        if self.found_inf is not None:
            is_bad = self.found_inf > 0
            gradient = gradient.masked_fill(is_bad, 0)
            share, beta2, lr = (torch.where(is_bad, same, usual) for same, usual in ((0.0, share), (1.0, beta2), (0.0, lr)))
        first.lerp_(gradient, share)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - group["betas"][1])
        direction = first / (second.sqrt() + eps)
        if group["weight_decay"]:
            direction.add_(weight, alpha=group["weight_decay"])
        weight_norm, norm = weight.norm().clamp(max=10.0), direction.norm()
        ratio = torch.where((weight_norm > 0) & (norm > 0), weight_norm / (norm + eps), 1.0)
        weight.sub_(direction * (ratio * lr))
