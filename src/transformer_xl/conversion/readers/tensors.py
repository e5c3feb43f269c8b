"""Tensors of foreign files that have not been read yet: where they lie, and that they fit there."""

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError, counted
from transformer_xl.tensor_file import TensorFile

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    )
}
"""Types of elements by their names in PyTorch."""

MAX_DIMENSIONS = 16  # the model needs 4


@dataclass(eq=False)
class Storage:
    """Bytes of a file, which tensors may share."""

    path: Path
    size: int
    offset: int = 0  # in the file; in files before PyTorch 1.6, known only when all tensors are
    verify: Callable[[Iterable[bytes | bytearray]], str | None] | None = None  # of all bytes, in parts: what is wrong, or None


@dataclass(frozen=True)
class TensorRef:
    """A tensor that has not been read yet; `place` makes it."""

    storage: Storage
    start: int  # of the first element in the storage (bytes)
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements, never negative
    dtype: torch.dtype  # little endian

    @property
    def path(self) -> Path:
        """The file that holds it."""
        return self.storage.path

    @property
    def offset(self) -> int:
        """Where its first element lies in the file (bytes)."""
        return self.storage.offset + self.start

    @property
    def n_bytes(self) -> int:
        """Bytes between the first element and the end of the last."""
        if 0 in self.shape:
            return 0
        return (1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize

    def load(self) -> Tensor:
        """Read the tensor into new memory; refuse a file that ends early or, of a whole storage, a wrong checksum."""
        if self.n_bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        data = bytearray(self.n_bytes)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            n = file.readinto(data)
        if n != len(data):
            raise CheckpointError(f"'{self.path}' ends {counted(len(data) - n, 'byte')} too early; copy or download it again")
        complaint = self.storage.verify([data]) if self.storage.verify and n == self.storage.size else None
        if complaint:
            raise CheckpointError(f"'{self.path}' is damaged: {complaint}; copy or download it again")
        return torch.frombuffer(data, dtype=self.dtype).as_strided(self.shape, self.stride).contiguous()


def place(
    storage: Storage, dtype: torch.dtype, start: int, end: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> TensorRef | None:
    """Return a tensor that begins at a byte of a storage, or None if it is larger than what follows to `end`.

    No argument is negative.
    """
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) >= 2**60:
        return None
    tensor = TensorRef(storage, start, shape, stride, dtype)
    # With strides of 0, four bytes could become terabytes. So there must be room for every element.
    needed = max(tensor.n_bytes, math.prod(shape) * dtype.itemsize)
    return tensor if start + needed <= end else None


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie one after another."""
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def crc32(expected: int) -> Callable[[Iterable[bytes | bytearray]], str | None]:
    """Return a function that compares bytes, in parts, with their CRC-32."""

    def verify(parts: Iterable[bytes | bytearray]) -> str | None:
        found = 0
        for part in parts:
            found = zlib.crc32(part, found)
        return None if found == expected else "the checksum of a tensor or pickle does not match its bytes"

    return verify


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of a safetensors file, which has no checksums."""

    file: TensorFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    n_bytes: int

    def load(self) -> Tensor:
        """Read the tensor into new memory."""
        return self.file.read_one(self.name)


ForeignTensor = TensorRef | SafeTensor


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """Return the tensors of a safetensors file by name; refuse a damaged one."""
    file = TensorFile(path)
    return {
        name: SafeTensor(file, name, dtype, shape, path, math.prod(shape) * dtype.itemsize)
        for name, (dtype, shape) in file.tensors.items()
    }
