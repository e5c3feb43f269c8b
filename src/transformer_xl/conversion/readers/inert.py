"""What readers return besides plain Python values: `Stub` for objects, and `TensorRef` for tensors still in their file."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError


@dataclass
class Stub:
    """An object of a foreign class, as data: the name of its class, its arguments and its content."""

    name: str  # module and class, as the file names them; never imported
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)  # its `__dict__`, or under "" the argument of `__setstate__`
    items: list[Any] = field(default_factory=list)  # what the file appended to it, or its (key, value) pairs


@dataclass(frozen=True)
class TensorRef:
    """A tensor that has not been read yet; its place is known to lie within the file."""

    path: Path
    offset: int  # of the first element (bytes)
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements, never negative
    dtype: torch.dtype  # little endian
    verify: Callable[[bytearray], str | None] | None = None  # returns what is wrong with the bytes, or None

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
        """Read the tensor into new memory; refuse a file that ends early or a wrong checksum."""
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


DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    )
}
"""Types of elements by the name that files give them."""

MAX_DIMENSIONS = 16  # the model needs 4


class Checksum:
    """Compares bytes with the CRC-32 of their storage; the storage's offset and size are in bytes."""

    def __init__(self, path: Path, offset: int, size: int, crc: int) -> None:
        self._path, self._offset, self._size, self._crc = path, offset, size, crc
        self._sound: bool | None = None

    def __call__(self, data: bytearray) -> str | None:
        """Return what is wrong with `data`, or None. For a part of a storage, read the whole storage once, in blocks."""
        sound = zlib.crc32(data) == self._crc if len(data) == self._size else self.matches_file()
        return None if sound else "the checksum of a tensor does not match its bytes"

    def matches_file(self) -> bool:
        """Return whether the storage in the file matches its checksum; it is read only once."""
        if self._sound is None:
            crc, left = 0, self._size
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while left and (block := file.read(min(left, 2**20))):
                    crc, left = zlib.crc32(block, crc), left - len(block)
            self._sound = crc == self._crc
        return self._sound


@dataclass(frozen=True)
class Storage:
    """A run of elements in a file; offset and size are in bytes."""

    offset: int
    size: int
    verify: Checksum | None = None  # see `TensorRef`


def place(path: Path, storage: Storage, dtype: str, offset: int, shape: list[int], stride: list[int]) -> TensorRef:
    """Return a tensor in a storage, which lies within its file; offset and strides count elements.

    Raises:
        CheckpointError: the tensor would not lie within the storage, or would be larger than it.
    """
    kind = DTYPES.get(dtype)
    if kind is None:
        raise CheckpointError(f"'{path}' holds a tensor of type {dtype!r}, which no Transformer-XL has")
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) >= 2**60:
        raise CheckpointError(f"'{path}' holds a tensor of impossible shape {shape[:8]} with strides {stride[:8]}")
    first = offset * kind.itemsize
    tensor = TensorRef(path, storage.offset + first, tuple(shape), tuple(stride), kind, storage.verify)
    # With strides of 0, four bytes could become terabytes. So the storage must have room for every element.
    needed = max(tensor.n_bytes, tensor.numel * kind.itemsize)
    if min(offset, *shape, *stride, 0) < 0 or first + needed > storage.size:
        raise CheckpointError(
            f"'{path}' holds a tensor of shape {shape} and strides {stride} that does not fit into its storage of "
            f"{storage.size} bytes; copy or download it again"
        )
    return tensor
