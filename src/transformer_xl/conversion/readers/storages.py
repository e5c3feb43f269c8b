"""Bytes of a file that hold numbers, and tensors as places in them; every place is checked before anything is read."""

import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer_xl.conversion.readers.inert import TensorRef
from transformer_xl.errors import CheckpointError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    )
}
"""Types of elements by the name that files give them."""

MAX_DIMENSIONS = 16
"""Sizes of one tensor: the model needs 4."""


class Checksum:
    """Compares bytes that were read with the CRC-32 of the storage they belong to.

    Args:
        path: the file.
        offset: of the storage (bytes).
        size: of the storage (bytes).
        crc: what the file says it is.
    """

    def __init__(self, path: Path, offset: int, size: int, crc: int) -> None:
        self._path, self._offset, self._size, self._crc = path, offset, size, crc
        self._sound: bool | None = None

    def __call__(self, data: bytearray) -> str | None:
        """Return what is wrong with `data`, or None; for part of a storage, the whole is read once, a block at a time."""
        sound = zlib.crc32(data) == self._crc if len(data) == self._size else self.matches_file()
        return None if sound else "the checksum of a tensor does not match its bytes"

    def matches_file(self) -> bool:
        """Return whether the bytes in the file are what they were; they are read once."""
        if self._sound is None:
            self._sound = self._read() == self._crc
        return self._sound

    def _read(self) -> int:
        crc, left = 0, self._size
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while left and (block := file.read(min(left, 2**20))):
                crc, left = zlib.crc32(block, crc), left - len(block)
        return crc


@dataclass(frozen=True)
class Storage:
    """A run of elements in a file.

    Attributes:
        offset: of its first byte.
        size: bytes.
        verify: see `TensorRef`.
    """

    offset: int
    size: int
    verify: Checksum | None = None


def place(path: Path, storage: Storage, dtype: str, offset: int, shape: list[int], stride: list[int]) -> TensorRef:
    """Make a tensor of part of a storage.

    Args:
        path: the file.
        storage: checked to lie within it.
        dtype: name of the type of the elements.
        offset: of its first element in the storage (elements).
        shape: sizes.
        stride: distances between neighbors (elements).

    Returns:
        The tensor, all of whose elements lie within the storage, and which is no larger than it.

    Raises:
        CheckpointError: it would not lie there.
    """
    kind = DTYPES.get(dtype)
    if kind is None:
        raise CheckpointError(f"'{path}' holds a tensor of type {dtype!r}, which no Transformer-XL has")
    if len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) >= 2**60:
        raise CheckpointError(f"'{path}' holds a tensor of impossible shape {shape[:8]} with strides {stride[:8]}")
    first = offset * kind.itemsize
    tensor = TensorRef(path, storage.offset + first, tuple(shape), tuple(stride), kind, storage.verify)
    # Strides of 0 could make terabytes out of four bytes, so that many elements must fit as well.
    needed = max(tensor.n_bytes, tensor.numel * kind.itemsize)
    if min(offset, *shape, *stride, 0) < 0 or first + needed > storage.size:
        raise CheckpointError(
            f"'{path}' holds a tensor of shape {shape} and strides {stride} that does not fit into its storage of "
            f"{storage.size} bytes; copy or download it again"
        )
    return tensor
