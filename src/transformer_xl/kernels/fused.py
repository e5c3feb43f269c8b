"""Whether kernels of our own do a layer's work on a device and in a type, how one is launched, and what spares them copies.

This file is read where Triton is not installed, and loads it only where kernels run.
"""

from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

SCRATCH_BYTES = 1 << 30
"""Fused kernels take scores of positions of at most so many bytes at a time, unless those of one head of one row are more."""
KEPT_BYTES = 1 << 22
"""They keep scores of positions of at most this size for the backward pass. Those of a large model would take most of a GPU's
memory."""

_WIDEST = 16_384
"""Features of a state that a kernel of our own can normalize."""


def is_fused(x: Tensor) -> bool:
    """Whether kernels of our own compute what a layer does with states besides products.

    They do on a GPU, unless layers are compiled or divided among processes.
    """
    if x.device.type != "cuda" or torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter):
        return False
    return x.shape[-1] <= _WIDEST and fused_problem(x.device, x.dtype, 1) is None


def fused_blocks(x: Tensor, *modules: nn.Module) -> Any:
    """Return `kernels.blocks` if it does what modules of a layer would do with x, see `is_fused`; None: they are called.

    They are called, too, if somebody listens to one.
    """
    if not is_fused(x) or any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules
    ):
        return None
    return import_module("transformer_xl.kernels.blocks")  # Triton takes a second


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


def fused_problem(device: torch.device, dtype: torch.dtype, d_head: int) -> str | None:
    """Say why fused kernels cannot compute in this type, with heads of this width, on this device; None: they can."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if device.type != "cuda" and not _is_interpreted():
        return f"it is compiled for a GPU, and the model is on {device.type} (TRITON_INTERPRET=1 runs it anywhere, very slowly)"
    if dtype == torch.float64:
        return "it computes in fp32 at most, and the weights are fp64"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs compute capability 8.0 (Ampere), and {torch.cuda.get_device_name(device)} is older"
    widest = 128 if dtype == torch.float32 else 256
    if d_head > widest:
        return f"a tile of heads as wide as d_head ({d_head}) does not fit the memory of a multiprocessor; {widest} do"
    return None


def n_padded(n_key: int) -> int:
    """Return how many rows the position keys of `n_key` distances have with the zeros that fused attention reads after them."""
    return -(-n_key // 8) * 8 + 8


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start the programs of a kernel, if there are any, on the device of its first argument; Triton takes the current one."""
    device = arguments[0].device
    if 0 not in grid:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](*arguments, **constants)


def _is_interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
