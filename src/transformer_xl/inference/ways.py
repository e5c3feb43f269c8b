"""How a `Reader` computes: by the library's functions, by compiled code, or by kernels of our own on a GPU."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from transformer_xl.inference.frozen import product, streamed_product
from transformer_xl.inference.layer import SEGMENT, STREAMED, TOKEN, Way, attend_by_kernel, read_layer
from transformer_xl.inference.softmax import HeadFunction, compute_head
from transformer_xl.kernels.choose import choose_backend
from transformer_xl.kernels.fused import fused_problem

_MOST_SHAPES = 64
"""For so many numbers of rows and slots a process compiles code."""

_COMPILER_OPTIONS: dict[str, Any] = {
    "dynamic": False,
    "fullgraph": True,
    "options": {"size_asserts": False, "alignment_asserts": False},
}
"""Code is compiled for each number of rows and slots and each precision, because known shapes make it faster. They are checked
before the code is entered; checking them again inside takes a fifth of what a layer costs besides its loops."""


class TokenFunctions(NamedTuple):
    """What reads single tokens."""

    kind: Literal["library", "fused", "compiled"]
    read_layer: Callable[..., Tensor]
    compute_head: HeadFunction


def segment_way(device: torch.device, dtype: torch.dtype, d_head: int, *, by_keys: bool, fused: bool | None) -> Way:
    """Return how layers read a segment.

    Args:
        device: where the weights are.
        dtype: of keys and values.
        d_head: H.
        by_keys: whether positions are u, v and r, which is what the kernel computes.
        fused: by a kernel of our own, which Triton interprets elsewhere than on a GPU; None: on a GPU that can, unless in fp32,
            which the kernel multiplies more slowly than the library does.
    """
    if not by_keys or not _fuses(device, dtype, d_head, fused) or (fused is None and dtype.itemsize > 2):
        return SEGMENT
    return Way(product, partial(attend_by_kernel, backend=choose_backend("triton", device, dtype=dtype, d_head=d_head)))


def token_functions(device: torch.device, dtype: torch.dtype, d_head: int, *, fused: bool | None) -> TokenFunctions:
    """Return functions that read single tokens without a compiler; the arguments are those of `segment_way`."""
    if not _fuses(device, dtype, d_head, fused):
        return TokenFunctions("library", partial(read_layer, way=TOKEN), compute_head)
    from transformer_xl.inference.token_kernels import FUSED, fused_product

    return TokenFunctions("fused", partial(read_layer, way=FUSED), partial(compute_head, product=fused_product))


def _fuses(device: torch.device, dtype: torch.dtype, d_head: int, fused: bool | None) -> bool:
    return device.type == "cuda" and fused_problem(device, dtype, d_head) is None if fused is None else fused


@cache
def compiled_functions() -> TokenFunctions:
    """Return functions that read single tokens, compiled when they are first called with tensors of a new shape.

    All layers, and all readers of a process, share them.
    """
    options = _COMPILER_OPTIONS
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options = {**options, "recompile_limit": _MOST_SHAPES}
    else:  # older ones (torch 2.10) have one limit for everything that it compiles
        from torch._dynamo import config as everything

        everything.recompile_limit = max(everything.recompile_limit, _MOST_SHAPES)

    def read_token(*inputs: Any, **named: Any) -> Tensor:  # as an argument, the way would be looked at again in each call
        return read_layer(*inputs, **named, way=STREAMED)

    head = partial(compute_head, product=streamed_product)
    return TokenFunctions("compiled", torch.compile(read_token, **options), torch.compile(head, **options))
