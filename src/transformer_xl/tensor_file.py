"""Tensors in safetensors files: written one tensor at a time, and read after every line of the header has been checked.

Reference: the format, https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data without gaps).
Known deviation: the `safetensors` library is not used. Its writer does not force files to the disk (no fsync), uses a temporary
file and a rename that we cannot control, and refuses tied tensors. Its reader parses headers of up to 100 MB before anything is
counted, and maps files, which nobody may change then.
"""

import hashlib
import math
import os
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
from transformer_xl.seals import seal_command
from transformer_xl.untrusted import is_unicode, open_regular, parse_json, read_at

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
_CHUNK_BYTES = 2**20  # what is hashed is still in the processor's cache
_SHA256, _BLANK = "transformer_xl.sha256", "0" * 64
"""Name of the hash in the metadata, and what stands in its place while it is computed."""


def encode_tensors(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file; they do not depend on the order of the dict.

    Tensors may be on any device, strided, overlapping or tied. Each is written in full, so other tools need not know which ones
    are tied. At most one tensor is copied at a time.

    Raises:
        CheckpointError: a name or tensor cannot be stored; no byte has been yielded then.
    """
    check_storable(tensors)
    return encode_lazily({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__)


def encode_lazily(
    content: Mapping[str, tuple[torch.dtype, torch.Size]],
    load: Callable[[str], Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file from types and shapes by name, the header first; `load` is called once for each."""
    # Wide types come first, so that every tensor is aligned to its type; readers that map the file need this.
    names = sorted(content, key=lambda name: (-content[name][0].itemsize, name))
    yield _encode_header([(name, *content[name]) for name in names], metadata or {})
    for name in names:
        yield _tensor_bytes(load(name))


def write_sealed_tensors(
    path: Path,
    content: Mapping[str, tuple[torch.dtype, torch.Size]],
    load: Callable[[str], Tensor],
    *,
    metadata: Mapping[str, str],
    on_progress: Callable[[int], object] | None = None,
) -> int:
    """Write a new safetensors file whose metadata has its own SHA-256, so that reading finds any change of a bit.

    Args:
        path: of a file that does not exist.
        content: types and shapes by name.
        load: called once for each tensor.
        metadata: what else the header says.
        on_progress: called with the number of bytes written so far.

    Returns:
        Bytes of the file.

    Raises:
        OSError: the file exists or cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        header = b""
        for chunk in encode_lazily(content, load, metadata={**metadata, _SHA256: _BLANK}):
            header = header or bytes(chunk)
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            if on_progress:
                on_progress(size)
        file.seek(header.index(_entry(_BLANK)))
        file.write(_entry(digest.hexdigest()))
        file.flush()
        os.fsync(file.fileno())
    return size


def _entry(sha256: str) -> bytes:
    """Return the hash as it stands in a header."""
    return f'"{_SHA256}":"{sha256}"'.encode()


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
    _header: bytes

    @property
    def is_sealed(self) -> bool:
        """Whether the file has its own SHA-256; those of other programs have none."""
        return _SHA256 in self.metadata

    def load(self) -> dict[str, Tensor]:
        """Read all tensors, each into memory of its own, to the CPU.

        Raises:
            CheckpointError: the file has a SHA-256, and it is another, or it ends early.
        """
        digest = self._begun_digest()
        in_order = sorted(self.tensors.items(), key=lambda item: item[1].begin)
        loaded = {name: self._read(place, digest) for name, place in in_order}
        self._compare(digest)
        return {name: loaded[name] for name in self.tensors}

    def load_one(self, name: str) -> Tensor:
        """Read one tensor, unverified."""
        return self._read(self.tensors[name], None)

    def verify(self) -> None:
        """Read the whole file and compare its SHA-256, if it has one; see `load`."""
        if (digest := self._begun_digest()) is None:
            return
        self._file.seek(len(self._header))
        while chunk := self._file.read(_CHUNK_BYTES):
            digest.update(chunk)
        self._compare(digest)

    def _begun_digest(self) -> "hashlib._Hash | None":
        if not self.is_sealed:
            return None
        return hashlib.sha256(self._header.replace(_entry(self.metadata[_SHA256]), _entry(_BLANK), 1))

    def _compare(self, digest: "hashlib._Hash | None") -> None:
        if digest and digest.hexdigest() != self.metadata[_SHA256]:
            raise CheckpointError(
                f"'{self.path}' is damaged: its bytes are not those that were written (SHA-256); restore it from a copy, or "
                f"accept it with: {seal_command(self.path.parent)}"
            )

    def _read(self, place: Place, digest: "hashlib._Hash | None") -> Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        left = _tensor_bytes(tensor)
        try:
            self._file.seek(place.begin)
            while len(left) and (n := self._file.readinto(left[:_CHUNK_BYTES])):
                if digest:
                    digest.update(left[:n])
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
        text = read_at(path, file, 8, length)
        header, metadata = _parse_header(path, text)
        yield TensorFile(
            path, _check_header(path, header, 8 + length, size), metadata, file, length.to_bytes(8, "little") + text
        )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load all tensors of a safetensors file to the CPU; see `open_tensors`.

    The file is not mapped, so it may be replaced or deleted afterwards.
    """
    with open_tensors(path) as file:
        return file.load()


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Raise a `CheckpointError` for a name or tensor that cannot be stored."""
    for name, tensor in tensors.items():
        _check_storable(name, tensor)


def _check_storable(name: str, tensor: Tensor) -> None:
    if not isinstance(name, str) or not is_unicode(name) or name == "__metadata__":
        raise CheckpointError(f"tensor name {name!r} cannot be stored; use text other than '__metadata__'")
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{name!r} is a {type(tensor).__name__}, not a tensor; put it into `state`")
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(f"tensor {name!r} is {kind}, without plain data to store; make it dense first")
    if tensor.dtype not in CODES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
        raise CheckpointError(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be stored; convert it to one of {known}")


def _encode_header(tensors: list[tuple[str, torch.dtype, torch.Size]], metadata: Mapping[str, str]) -> bytes:
    # Some readers (Hugging Face transformers) refuse a file that does not name the framework its layout follows.
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
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
