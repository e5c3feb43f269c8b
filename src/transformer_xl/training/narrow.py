"""Weights in bf16, copied once a step, instead of at each use and again for each gradient, as autocast does.

The numbers are the same: a gradient was bf16 before it became fp32. Such copies are a fifth of the kernels of a small model.
Weights that are dropped at random are not copied, because they are scaled before they become bf16.

Gradients of small weights are computed after the backward pass, those of equal shapes in one batched product. Each alone would
fill a small part of a GPU. The kernels that sum over rows for norms and biases leave partial sums, which are added up then, too
(`LateSums`). These gradients of biases are not rounded to bf16.
"""
# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from transformer_xl.model.products import Factors, keep_factors, multiplied

_Part = tuple[int, Tensor]
"""The gradient of some rows of a weight, and the first of them."""


class LateSums:
    """Partial sums of the gradients of norms and biases, kept for all layers until the backward pass has ended.

    Each program of a kernel sums some rows. The kernels of all layers write partial sums of one shape to one buffer. One more
    kernel adds up the whole buffer, and nothing is copied. A kernel writes here if its norm or bias has this object as its
    attribute `late_sums`.

    Args:
        n_slot: how many kernels write to one buffer.
    """

    def __init__(self, n_slot: int) -> None:
        self._n_slot = n_slot
        self._buffers: dict[torch.Size, list[tuple[Tensor, list[Sequence[Tensor | None]]]]] = defaultdict(list)
        """By the shape of a slot, (P, N, D): buffers, and the vectors of each slot that is taken."""

    def slot(self, vectors: Sequence[Tensor | None], shape: torch.Size, device: torch.device) -> Tensor:
        """Return where a kernel of P programs writes its sums for N vectors, fp32 (P, N, D)."""
        buffers = self._buffers[shape]
        if not buffers or len(buffers[-1][1]) == self._n_slot:
            buffers.append((torch.empty(self._n_slot, *shape, dtype=torch.float32, device=device), []))
        buffer, taken = buffers[-1]
        taken.append(vectors)
        return buffer[len(taken) - 1]

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each vector that wants a gradient, and this gradient, fp32 (D,); a vector that was used twice comes twice."""
        if not self._buffers:
            return
        from transformer_xl.model.backends.fused_blocks import stacked_totals  # Triton takes a second

        for buffer, taken in (pair for buffers in self._buffers.values() for pair in buffers):
            for vectors, sums_ND in zip(taken, stacked_totals(buffer[: len(taken)]), strict=True):
                for vector, sum_D in zip(vectors, sums_ND, strict=True):
                    if vector is not None and vector.requires_grad:
                        yield vector, sum_D

    def forget(self) -> None:
        """Drop all sums."""
        self._buffers.clear()


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
        self._late: list[list[Factors]] = [keep_factors(copy) for copy in self._copies]
        self._sums = LateSums(len(layers))
        norms = [module for layer in layers for module in layer.modules() if isinstance(module, nn.LayerNorm)]
        self._summed = {p for norm in norms for p in norm.parameters()} | {copy for copy in self._copies if copy.ndim == 1}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with copies of its present weights inside the block."""
        if self._own:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._own)
        for (module, name, _), copy in zip(self._places, self._copies, strict=True):
            module._parameters[name] = cast("nn.Parameter", copy)
        for vector in self._summed:
            cast("Any", vector).late_sums = self._sums
        try:
            yield
        finally:
            for module, name, parameter in self._places:
                module._parameters[name] = parameter
            for vector in self._summed:
                del cast("Any", vector).late_sums
            self._forget()  # what a backward pass that failed has left

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the copies to those of the weights, and drop them; inside the block of `in_place`."""
        parts: dict[Tensor, list[_Part]] = {p: [] for p in self._own}
        for p, copy in zip(self._own, self._copies, strict=True):
            if copy.grad is not None:
                parts[p].append((0, copy.grad))
        for p, part in self._late_parts():
            parts[p].append(part)
        _add({p: _apart(found, p) for p, found in parts.items() if found})
        own = dict(zip(self._copies, self._own, strict=True))
        for vector, gradient in self._sums.gradients():
            p = own.get(vector, vector)
            p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        self._forget()

    def _late_parts(self) -> Iterator[tuple[Tensor, _Part]]:
        """Multiply the factors that the backward pass has left, those of equal shapes together."""
        alike: dict[tuple[torch.Size, torch.Size], list[tuple[Tensor, Factors]]] = defaultdict(list)
        for p, late in zip(self._own, self._late, strict=True):
            for factors in late:
                alike[factors.grad.shape, factors.x.shape].append((p, factors))
        for group in alike.values():
            gradients = multiplied([factors for _, factors in group])
            for (p, factors), gradient in zip(group, gradients, strict=True):
                yield p, (factors.first_row, gradient)

    def _forget(self) -> None:
        for copy, late in zip(self._copies, self._late, strict=True):
            copy.grad = None
            late.clear()
        self._sums.forget()


def _apart(parts: list[_Part], weight: Tensor) -> list[_Part]:
    """Return the gradients of parts of a weight as those of parts that make up all of it and do not overlap."""
    ordered = sorted(parts, key=lambda part: part[0])
    ends = accumulate(len(gradient) for _, gradient in ordered)
    if [0, *ends] == [*(first for first, _ in ordered), len(weight)]:
        return ordered
    total = torch.zeros_like(weight)
    for first, gradient in parts:
        total[first : first + len(gradient)] += gradient
    return [(0, total)]


def _add(parts: dict[Tensor, list[_Part]]) -> None:
    """Add gradients to those of the weights, in few kernels; the parts of each weight make up all of it."""
    more = [p for p in parts if p.grad is not None]
    first = [p for p in parts if p.grad is None]
    for p in first:
        [(_, gradient), *others] = parts[p]
        p.grad = gradient if not others and gradient.dtype == p.dtype else torch.empty_like(p)
    first = [p for p in first if p.grad is not parts[p][0][1]]
    for change, weights in ((torch._foreach_add_, more), (torch._foreach_copy_, first)):
        for rows, gradients in _pairs(weights, parts):
            change(rows, gradients)


def _pairs(weights: Iterable[Tensor], parts: dict[Tensor, list[_Part]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Return the rows of the weights' gradients that the parts belong to, and the parts; those of each type together.

    Given several types at once, PyTorch would take each pair by itself.
    """
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for p in weights:
        for first, gradient in parts[p]:
            alike[gradient.dtype].append((cast("Tensor", p.grad)[first : first + len(gradient)], gradient))
    for pairs in alike.values():
        yield [rows for rows, _ in pairs], [gradient for _, gradient in pairs]


def _drops(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "drop", None), "p", 0))
