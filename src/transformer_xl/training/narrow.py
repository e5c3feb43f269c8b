"""Weights in bf16, copied once a step, instead of at each use and again for each gradient, as autocast does.

The numbers are the same: a gradient was bf16 before it became fp32. Such copies are a fifth of the kernels of a small model.
Weights that are dropped at random are not copied, because they are scaled before they become bf16.
"""
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn


class NarrowWeights:
    """Copies of the matrices inside the layers, and of their biases, that stand in for them within a step.

    Args:
        model: whose layers compute with the copies.
        dtype: of the copies.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        layers = getattr(model, "layers", [])
        maps = [
            module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear) and not _drops(module)
        ]
        self._places = [(module, name, p) for module in maps for name, p in module.named_parameters(recurse=False)]
        self._own: list[Tensor] = [p for _, _, p in self._places]
        self._copies: list[Tensor] = [nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad) for p in self._own]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with copies of its present weights inside the block."""
        if self._own:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._own)
        for (module, name, _), copy in zip(self._places, self._copies, strict=True):
            module._parameters[name] = cast("nn.Parameter", copy)
        try:
            yield
        finally:
            for module, name, parameter in self._places:
                module._parameters[name] = parameter

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the copies to those of the weights, and drop them."""
        pairs = [(p, copy.grad) for p, copy in zip(self._own, self._copies, strict=True) if copy.grad is not None]
        first = [(p, grad) for p, grad in pairs if p.grad is None]
        more = [(p.grad, grad) for p, grad in pairs if p.grad is not None]
        if more:
            torch._foreach_add_([into for into, _ in more], [grad for _, grad in more])
        if first:
            gradients = [torch.empty_like(p) for p, _ in first]
            torch._foreach_copy_(gradients, [grad for _, grad in first])
            for (p, _), gradient in zip(first, gradients, strict=True):
                p.grad = gradient
        for copy in self._copies:
            copy.grad = None


def _drops(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "drop", None), "p", 0))
