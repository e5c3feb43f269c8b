"""Which function computes attention, by name, or the fastest on a device and in a type."""

from collections.abc import Callable

import torch
from torch import Tensor

from transformer_xl.errors import ConfigError, did_you_mean
from transformer_xl.kernels.cpu_attention import matmul_attention
from transformer_xl.kernels.equation import relative_attention
from transformer_xl.kernels.fused import fused_problem
from transformer_xl.kernels.sdpa import sdpa_attention

Attention = Callable[..., Tensor]

_PLAIN: dict[str, Attention] = {"equation": relative_attention, "matmul": matmul_attention, "sdpa": sdpa_attention}


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
    known = ("auto", *_PLAIN, "triton")
    if name not in known:
        raise ConfigError(f"unknown attention backend '{name}'; {did_you_mean(name, known)}")
    problem = None if by_keys else "it computes positions as the paper does, and this kind of attention has others"
    if name == "triton" and (problem := problem or fused_problem(device, dtype, d_head)):
        raise ConfigError(f"attention backend '{name}' cannot run here: {problem}; use 'auto'")
    if name == "auto":
        fuses_here = device.type == "cuda" and by_keys and fused_problem(device, dtype, d_head) is None
        name = "triton" if fuses_here else "matmul" if by_keys or device.type == "cpu" else "sdpa"
    if name == "triton":
        from transformer_xl.kernels.flash import fused_attention  # Triton takes a second

        return fused_attention
    return _PLAIN[name]
