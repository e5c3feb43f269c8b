"""What `torch.compile` must not trace. A file of its own, because saying so loads the compiler, which takes a second."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.compiler.disable(reason="the kernels are compiled already")
def call(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call a function as it is."""
    return function(*inputs)
