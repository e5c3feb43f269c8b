"""Layers whose training step inductor compiles."""

import torch

from transformer_xl.errors import ConfigError
from transformer_xl.model.call import RunLayer, run_layer
from transformer_xl.model.compiled import cannot_compile


def compiled_layer(device: torch.device) -> RunLayer:
    """Return `run_layer`, compiled when a layer is first used in training with tensors of a shape.

    Layers are alike, so that one is compiled for all; compiling the whole model takes as many times as long, and leaves the
    choice of a backend, which is no arithmetic, to the compiler.

    Raises:
        ConfigError: nothing can be compiled here.
    """
    check_compiler(device)
    return torch.compile(run_layer)


def check_compiler(device: torch.device) -> None:
    """Refuse to compile for a device where that cannot work.

    Raises:
        ConfigError: nothing can be compiled here.
    """
    problem = cannot_compile(device)
    if problem:
        raise ConfigError(f"train.compile (True) cannot work here: {problem}; install it, or use train.compile=false")
