"""Reading single tokens by code that inductor compiles; one function for all layers, kept for all readers of a process."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from transformer_xl.model.frozen_layer import read_token
from transformer_xl.model.frozen_softmax import HeadFunction, streamed_head

_OPTIONS: dict[str, Any] = {
    "dynamic": False,
    "fullgraph": True,
    "recompile_limit": 64,
    "options": {"size_asserts": False, "alignment_asserts": False},
}
"""Each number of rows, slots and each precision is compiled by itself: shapes that are known make the faster code. They are
checked before the code is entered; checking them again inside takes a fifth of what a layer costs besides its loops."""


@cache
def compiled_token() -> Callable[..., Tensor]:
    """Return `read_token`, compiled at the first call with tensors of a shape."""
    return torch.compile(partial(read_token, streamed=True), **_OPTIONS)


@cache
def compiled_head() -> HeadFunction:
    """Return `FrozenSoftmax.head` as a function, compiled at the first call with tensors of a shape."""
    return torch.compile(streamed_head, **_OPTIONS)


def cannot_compile(device: torch.device) -> str | None:
    """Say why nothing can be compiled for a device here; None if it can, as far as can be told without trying."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is not installed"
    if device.type != "cpu":
        return f"inductor is not known to compile for {device.type}"
    from torch._inductor import cpp_builder, exc  # imports half of torch, so only where it is asked for

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError) as error:
        return "no C++ compiler is found" if isinstance(error, exc.InvalidCxxCompiler) else str(error)
    return None
