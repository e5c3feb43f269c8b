"""Tensors in safetensors files.

Reference: https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data without gaps).

Reading is the library's. It checks the header, and `pread` reads each tensor into memory of its own: a mapped file that is
changed changes the tensors, and one that is cut ends the process.
Writing is ours, because `save_file` wants all tensors on the CPU at once (a conversion makes them one at a time, and some
models fill the memory), refuses those that are tied, and neither forces the file to the disk nor heeds the umask.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from transformer_xl.errors import CheckpointError, one_line
from transformer_xl.files import canonical_json
from transformer_xl.manifest import Manifest
from transformer_xl.untrusted import open_regular

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_DTYPES = {code: dtype for dtype, code in CODES.items()}


class TensorSpec(NamedTuple):
    """Type and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFile:
    """An open safetensors file, whose header has been checked: tensors do not overlap, and cover the file without holes.

    Attributes:
        path: of the file.
        tensors: types and shapes by name, in the order of the file.
        metadata: what else the header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file, _ = open_regular(path)
        with file, _explained(path):
            self._file = safe_open(path, framework="pt", backend="pread")
            length = file.read(8)
            self._header = length + file.read(int.from_bytes(length, "little"))
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.tensors = {name: self._spec(name) for name in self._file.offset_keys()}

    def load(self, manifest: Manifest | None = None) -> dict[str, Tensor]:
        """Read all tensors, each into memory of its own, to the CPU; a manifest says what the bytes must be.

        Raises:
            CheckpointError: they are others, or cannot be read.
        """
        digest = hashlib.sha256(self._header)
        loaded: dict[str, Tensor] = {}
        for name in self.tensors:
            loaded[name] = tensor = self.load_one(name)
            if manifest:
                digest.update(_tensor_bytes(tensor))
        if manifest:
            manifest.check(self.path, digest.hexdigest())
        return loaded

    def load_one(self, name: str) -> Tensor:
        """Read one tensor to compute with."""
        return self.read_one(name).clone()  # aligned as PyTorch's own, because sums depend on it

    def read_one(self, name: str) -> Tensor:
        """Read one tensor, in half the memory, to write it elsewhere."""
        with _explained(self.path):
            return self._file.get_tensor(name)

    def _spec(self, name: str) -> TensorSpec:
        place = self._file.get_slice(name)
        if (dtype := _DTYPES.get(place.get_dtype())) is None:
            raise CheckpointError(f"'{self.path}': tensor {name[:100]!a} has type {place.get_dtype()}, which is not known here")
        return TensorSpec(dtype, tuple(place.get_shape()))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, RuntimeError) as error:  # the latter of PyTorch, for sizes that overflow
        reason = one_line(error).removeprefix("Error while deserializing header: ")[:150]
        raise CheckpointError(
            f"'{path}' is no sound safetensors file ({ascii(reason)[1:-1]}); copy or download it again"
        ) from None


def load_tensors(path: Path, manifest: Manifest | None = None) -> dict[str, Tensor]:
    """Load all tensors of a safetensors file to the CPU; see `TensorFile.load`."""
    return TensorFile(path).load(manifest)


def encode_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file; they do not depend on the order of the dict.

    Tensors may be on any device, strided, overlapping or tied. Each is written in full, so other tools need not know which ones
    are tied. At most one tensor is copied at a time.

    Raises:
        CheckpointError: a tensor is none that such a file can hold; no byte has been yielded then.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES or tensor.layout != torch.strided or tensor.is_meta:
            what = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise CheckpointError(f"tensor {name!r} ({what}) cannot be stored; make it real, dense numbers")
    content = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return encode_lazily(content, tensors.__getitem__, metadata)


def encode_lazily(
    content: Mapping[str, TensorSpec], load: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file from types and shapes by name, the header first; `load` is called once for each."""
    # Wide types come first, so that every tensor is aligned to its type; readers that map the file need this.
    names = sorted(content, key=lambda name: (-content[name].dtype.itemsize, name))
    # Some readers (Hugging Face transformers) refuse a file that does not name the framework its layout follows.
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        dtype, shape = content[name]
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = canonical_json(header)
    text += b" " * (-len(text) % 8)  # so that the data starts at a multiple of 8, too
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield _tensor_bytes(load(name))


def _tensor_bytes(tensor: Tensor) -> memoryview:
    dense = tensor.detach().cpu().resolve_neg().contiguous()
    # A dimension of size 1 may keep any stride and still count as contiguous, so reshape(-1) would not do.
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
