"""The same bits every time: what of PyTorch's behaviour that needs, for as long as a run trains."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Allow only deterministic algorithms until the block ends, where `wanted`; then everything is as it was.

    PyTorch raises an error at an operation that has no deterministic form, and cuBLAS sums in a fixed order only with a
    workspace of a fixed size, which it asks the environment for.
    """
    if not wanted:
        yield
        return
    enabled, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(_CUBLAS)
    os.environ[_CUBLAS] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if workspace is None:
            del os.environ[_CUBLAS]
        else:
            os.environ[_CUBLAS] = workspace
