"""Tensors in safetensors files: written one tensor at a time, and read after every line of the header has been checked.

Reference: the format, https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data without gaps).
Known deviation: the `safetensors` library is not used. Its writer does not force files to the disk (no fsync), uses a temporary
file and a rename that we cannot control, and refuses tied tensors. Its reader parses headers of up to 100 MB before anything is
counted, and maps files, which nobody may change then.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError
from transformer_xl.files import canonical_json
from transformer_xl.untrusted import open_regular, parse_json, read_at

MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 50_000
MAX_PARTS = 20 * MAX_TENSORS
"""Brackets, braces, commas and colons of a header; a matrix takes 12."""

MAX_DIMENSIONS = 16  # the model needs 4

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
_CHUNK_BYTES = 2**24


def encode_tensors(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file; they do not depend on the order of the dict.

    Tensors may be on any device, strided, overlapping or tied. Each is written in full, so other tools need not know which ones
    are tied. At most one tensor is copied at a time.

    Raises:
        CheckpointError: a name or tensor cannot be stored; no byte has been yielded then.
    """
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
    return encode_lazily({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__)


def encode_lazily(
    content: Mapping[str, tuple[torch.dtype, torch.Size]], load: Callable[[str], Tensor]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file from types and shapes by name; `load` is called once for each tensor."""
    # Wide types come first, so that every tensor is aligned to its type; readers that map the file need this.
    names = sorted(content, key=lambda name: (-content[name][0].itemsize, name))
    yield _encode_header([(name, *content[name]) for name in names])
    for name in names:
        yield _tensor_bytes(load(name))


@dataclass(frozen=True)
class Place:
    """Type and shape of a tensor in a file, and the bytes that hold it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # from the beginning of the file
    end: int


@dataclass(frozen=True)
class TensorFile:
    """An open safetensors file whose header has been checked.

    Attributes:
        path: of the file.
        tensors: places by name; they lie within the file, one after another without holes.
        metadata: what else the header says.
    """

    path: Path
    tensors: dict[str, Place]
    metadata: dict[str, str]
    _file: FileIO

    def load(self) -> dict[str, Tensor]:
        """Read all tensors, each into memory of its own, to the CPU."""
        in_order = sorted(self.tensors.items(), key=lambda item: item[1].begin)
        loaded = {name: self._read(place) for name, place in in_order}
        return {name: loaded[name] for name in self.tensors}

    def _read(self, place: Place) -> Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        left = _tensor_bytes(tensor)
        try:
            self._file.seek(place.begin)
            while len(left) and (n := self._file.readinto(left[:_CHUNK_BYTES])):
                left = left[n:]
        except OSError as error:
            raise CheckpointError(f"'{self.path}' cannot be read: {error.strerror or error}; check the disk") from error
        if len(left):
            raise CheckpointError(f"'{self.path}' ends {len(left)} bytes too early; copy or download it again")
        return tensor


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file of unknown origin and check its header; no tensor is read or allotted by that.

    Raises:
        CheckpointError: the file is missing, its header is oversized or malformed, names a tensor twice or a type that PyTorch
            does not have, or tensors overlap, leave holes or lie outside of the file.
    """
    file, size = open_regular(path)
    with file:
        length = int.from_bytes(read_at(path, file, 0, 8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"'{path}' claims a header of {length} bytes; {MAX_HEADER_BYTES} is the most accepted")
        header, metadata = _parse_header(path, read_at(path, file, 8, length))
        yield TensorFile(path, _check_header(path, header, 8 + length, size), metadata, file)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load all tensors of a safetensors file to the CPU; see `open_tensors`.

    The file is not mapped, so it may be replaced or deleted afterwards.
    """
    with open_tensors(path) as file:
        return file.load()


def _check_storable(name: str, tensor: Tensor) -> None:
    if not isinstance(name, str) or not _is_utf8(name) or name == "__metadata__":
        raise CheckpointError(f"tensor name {name!r} cannot be stored; use text other than '__metadata__'")
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{name!r} is a {type(tensor).__name__}, not a tensor; put it into `state`")
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(f"tensor {name!r} is {kind}, without plain data to store; make it dense first")
    if tensor.dtype not in CODES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
        raise CheckpointError(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be stored; convert it to one of {known}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_header(tensors: list[tuple[str, torch.dtype, torch.Size]]) -> bytes:
    # Some readers (Hugging Face transformers) refuse a file that does not name the framework its layout follows.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = canonical_json(header)
    text += b" " * (-len(text) % 8)  # so that the data starts at a multiple of 8, too
    if len(text) > MAX_HEADER_BYTES or len(tensors) > MAX_TENSORS:
        raise CheckpointError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes, and {MAX_TENSORS} tensors and {MAX_HEADER_BYTES} "
            "bytes is the most that loads back; store fewer tensors or shorter names"
        )
    return len(text).to_bytes(8, "little") + text


def _tensor_bytes(tensor: Tensor) -> memoryview:
    dense = tensor.detach().cpu().resolve_neg().contiguous()
    # A dimension of size 1 may keep any stride and still count as contiguous, so reshape(-1) would not do.
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _parse_header(path: Path, text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries of a header, unchecked, and its metadata."""
    try:
        header = parse_json(text, most_parts=MAX_PARTS)
    except ValueError as error:
        reason = " ".join(ascii(str(error)).split())[:150]
        raise CheckpointError(f"'{path}' is not a valid safetensors file: its header is not JSON ({reason})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"'{path}' is not a valid safetensors file: its header holds no tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"'{path}' is not a valid safetensors file: its metadata is not text by name")
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"'{path}' claims {len(header)} tensors; {MAX_TENSORS} is the most accepted")
    return header, metadata


def _check_header(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, Place]:
    tensors = {name: _place(path, name, entry, start, size) for name, entry in header.items()}
    at = start
    for begin, end in sorted((place.begin, place.end) for place in tensors.values()):
        if begin != at:
            what = "overlap" if begin < at else "leave a hole"
            raise CheckpointError(f"'{path}' is not a valid safetensors file: its tensors {what}")
        at = end
    if at != size:
        raise CheckpointError(f"'{path}' has {size - at} bytes that belong to no tensor; copy or download it again")
    return tensors


def _place(path: Path, name: str, entry: Any, start: int, size: int) -> Place:
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [first, end]} if len(entry) == 3:
            integers = all(type(number) is int and 0 <= number < 2**62 for number in (*shape, first, end))
        case _:
            integers, code, shape, first, end = False, "", [], 0, 0
    what = f"'{path}' is not a valid safetensors file: tensor {name[:100]!a} has"
    fits = integers and len(shape) <= MAX_DIMENSIONS and math.prod(filter(None, shape)) < 2**60 and first <= end <= size - start
    if not fits or code not in _DTYPES:
        raise CheckpointError(f"{what} an impossible type, shape or place")
    dtype = _DTYPES[code]
    if math.prod(shape) * dtype.itemsize != end - first:
        raise CheckpointError(f"{what} another size than its shape")
    return Place(dtype, tuple(shape), start + first, start + end)
