"""Finds the tensors in a safetensors file of unknown origin."""

import math
from pathlib import Path

from transformer_xl.conversion.readers.inert import TensorRef
from transformer_xl.tensor_file import open_tensors


def read_safetensors(path: Path) -> dict[str, TensorRef]:
    """Read the header of a safetensors file; return its tensors by name. The format has no checksums.

    Raises:
        CheckpointError: see `open_tensors`.
    """
    with open_tensors(path) as file:
        return {
            name: TensorRef(path, place.begin, place.shape, _strides(place.shape), place.dtype)
            for name, place in file.tensors.items()
        }


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
