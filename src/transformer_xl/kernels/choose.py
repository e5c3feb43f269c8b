"""Which function computes attention, and whether fused kernels do a layer's work, on a device and in a type."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from transformer_xl.errors import ConfigError, did_you_mean

Attention = Callable[..., Tensor]

SCRATCH_BYTES = 1 << 30
"""Fused kernels take scores of positions of at most so many bytes at a time, unless those of one head of one row are more."""
KEPT_BYTES = 1 << 22
"""They keep scores of positions of at most this size for the backward pass. Those of a large model would take most of a GPU's
memory."""

_FUNCTIONS = {
    "equation": ("kernels.equation", "relative_attention"),
    "matmul": ("kernels.cpu_attention", "matmul_attention"),
    "sdpa": ("kernels.sdpa", "sdpa_attention"),
    "triton": ("kernels.flash", "fused_attention"),
}
"""By name, the module and the function, imported when they are chosen because Triton takes a second."""


def choose_backend(
    name: str, device: torch.device, *, dtype: torch.dtype = torch.float32, d_head: int = 64, by_keys: bool = True
) -> Attention:
    """Return the attention function of a name; its arguments are those of `relative_attention`.

    `equation` is the paper's, in plain code. `matmul`: batched products, with a gradient written out. `sdpa`: PyTorch's
    `scaled_dot_product_attention` with positions as a bias. `triton`: fused kernels, which keep no weights. `auto`: the fastest
    that works on the device.

    Args:
        name: of the backend.
        device: where the model is.
        dtype: of its weights.
        d_head: width of its heads.
        by_keys: whether positions are the paper's, u, v and r, which is what fused kernels compute.

    Raises:
        ConfigError: no such backend, or it cannot run there.
    """
    known = ("auto", *_FUNCTIONS)
    if name not in known:
        raise ConfigError(f"unknown attention backend '{name}'; {did_you_mean(name, known)}")
    problem = None if by_keys else "it computes positions as the paper does, and this kind of attention has others"
    if name == "triton" and (problem := problem or fused_problem(device, dtype, d_head)):
        raise ConfigError(f"attention backend '{name}' cannot run here: {problem}; use 'auto'")
    if name == "auto":
        fuses_here = device.type == "cuda" and by_keys and fused_problem(device, dtype, d_head) is None
        name = "triton" if fuses_here else "matmul" if by_keys or device.type == "cpu" else "sdpa"
    return _load(*_FUNCTIONS[name])


def check_no_backend(name: str, what: str) -> None:
    """Refuse a choice of backend for `what`, which has none."""
    if name != "auto":
        raise ConfigError(
            f"train.attention ({name}) chooses an attention backend, and {what} has none; use train.attention=auto"
        )


@cache
def _load(module: str, function: str) -> Attention:
    return getattr(import_module(f"transformer_xl.{module}"), function)


def run_untraced(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call a function that launches kernels, outside of what `torch.compile` makes of a layer; it would trace the launches."""
    if not torch.compiler.is_compiling():
        return function(*inputs)
    from transformer_xl.kernels.untraced import call  # which loads the compiler

    return call(function, *inputs)


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


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start the programs of a kernel, if there are any, on the device of its first argument; Triton takes the current one."""
    device = arguments[0].device
    if 0 not in grid:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](*arguments, **constants)


def _is_interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
