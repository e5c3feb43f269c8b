"""What readers return: plain Python values, objects that do nothing, and tensors that still lie in their file."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError


@dataclass
class Stub:
    """An object of a foreign class, as data: what it was called, made with, and filled with.

    Attributes:
        name: module and class as the file names them, such as `mem_transformer.MemTransformerLM`; never imported.
        args: what the class would have been called with.
        state: its attributes (`__dict__`), or what the file would have given to `__setstate__` under the key `""`.
        items: what the file would have appended to it, or (key, value) pairs it would have set, if it is a container.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class TensorRef:
    """A tensor that still lies in a file; its place has been checked against the file, nothing has been read.

    Attributes:
        path: the file that holds the bytes.
        offset: of the first element in that file (bytes).
        shape: sizes.
        stride: distances between neighbors (elements), never negative.
        dtype: of the elements, little endian.
        verify: told the bytes read, says in a few words what is wrong with them, or None; None: the format has no checksum.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    verify: Callable[[bytearray], str | None] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes between the first element and the end of the last."""
        if 0 in self.shape:
            return 0
        return (1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def load(self) -> Tensor:
        """Read the tensor into memory of its own.

        Raises:
            CheckpointError: the file ends early, or its checksum says otherwise.
        """
        if self.n_bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        data = bytearray(self.n_bytes)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            n = file.readinto(data)
        if n != len(data):
            raise CheckpointError(f"'{self.path}' ends {len(data) - n} bytes too early; copy or download it again")
        complaint = self.verify(data) if self.verify else None
        if complaint:
            raise CheckpointError(f"'{self.path}' is damaged: {complaint}; copy or download it again")
        return torch.frombuffer(data, dtype=self.dtype).as_strided(self.shape, self.stride).contiguous()
