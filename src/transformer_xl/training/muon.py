"""Muon (Jordan et al. 2024), in fp32 on devices that only emulate bf16, and with few kernels on a GPU.

    b ← μb + (1 - μ)g        u = (1 - μ)g + μb        O = u by five steps of Newton and Schulz towards its orthogonal factor
    w ← (1 - lr λ)w - 0.2 √max(rows, columns) lr O

`torch.optim.Muon` always multiplies in bf16. On a device without bf16 instructions that takes four times as long as fp32, which
is two fifths of a training step of a small model. It also multiplies one matrix after another, and a GPU takes longer to launch
such small products than to compute them.
"""
# pyright: reportPrivateImportUsage=false

import math
from typing import Any, cast

import torch
from torch import Tensor

from transformer_xl.kernels.device import choose_precision

_MOST_TOGETHER = 1 << 25
"""Numbers of matrices that are multiplied together; each takes some 20 bytes meanwhile."""


class Muon(torch.optim.Muon):
    """Momentum with orthogonal updates, computed in the precision that the device multiplies natively.

    Updates are scaled to the size of AdamW's, so the same learning rates work.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
        >>> Muon([weight], lr=1.0, momentum=0.9, weight_decay=0.0).step()
        >>> (weight.detach() / -(0.2 * 2**0.5)).round().tolist()  # roughly the identity
        [[1.0, -0.0], [-0.0, 1.0]]
    """

    def __init__(
        self,
        params: list[Tensor] | list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",  # a learning rate then means the same for Muon and AdamW
        )
        device = self.param_groups[0]["params"][0].device
        self.in_bf16 = choose_precision("auto", device)[0] == "bf16"
        self.found_inf: Tensor | None = None
        """fp32 scalar; where it is 1, a step changes nothing. None: it is not asked."""

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.found_inf is not None:
            for group in self.param_groups:
                learning = [parameter for parameter in group["params"] if parameter.grad is not None]
                for shape in dict.fromkeys(parameter.shape for parameter in learning):
                    alike = [parameter for parameter in learning if parameter.shape == shape]
                    n_fit = max(1, _MOST_TOGETHER // alike[0].numel())
                    for first in range(0, len(alike), n_fit):
                        self._update_together(alike[first : first + n_fit], group, self.found_inf > 0)
            return
        if self.in_bf16:
            super().step()
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, float]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = orthogonalized(gradient.lerp(buffer, momentum))
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(update, alpha=-0.2 * math.sqrt(max(parameter.shape)) * lr)

    def _update_together(self, parameters: list[Tensor], group: dict[str, Any], is_bad: Tensor) -> None:
        """Do as `_update` for K matrices of one shape."""
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradient = torch.stack([cast(Tensor, parameter.grad) for parameter in parameters]).masked_fill_(is_bad, 0)
        buffer = torch.stack(buffers).lerp_(gradient, torch.where(is_bad, 0.0, 1 - group["momentum"]))
        torch._foreach_copy_(buffers, list(buffer))
        update = gradient.lerp_(buffer, group["momentum"])
        update = orthogonalized(update.bfloat16() if self.in_bf16 else update).to(buffer.dtype)
        lr = torch.where(is_bad, 0.0, group["lr"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, list(update * (lr * (-0.2 * math.sqrt(max(parameters[0].shape))))))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors and singular values around 1, between about 0.7 and 1.2.

    `matrix` has the shape (…, rows, columns) with at most one axis before, and its type is the type of the arithmetic.

    Example:
        >>> torch.linalg.svdvals(orthogonalized(torch.tensor([[3.0, 0.0, 1.0], [0.0, 2.0, 0.0]]))).round().tolist()
        [1.0, 1.0]
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # the polynomial's coefficients in torch.optim.Muon
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    x = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(5):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.mT
