"""Tensors in safetensors files: written one tensor at a time, loaded into separate memory.

Reference: the format, https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data without gaps).
Known deviation: `safetensors.torch.save_file` is not used to write. It does not force files to the disk (no fsync), uses a
temporary file and a rename that we cannot control, and refuses tied tensors. Writing the format takes thirty lines. Reading
uses the library.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl.errors import CheckpointError, one_line
from transformer_xl.files import canonical_json

MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 50_000

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


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load a safetensors file, whose size and hash the caller has verified, to the CPU.

    The file is not mapped, so it may be replaced or deleted afterwards.

    Raises:
        CheckpointError: the header is too large, malformed or does not match the file; nothing is allocated then.
        OSError: the file cannot be read.
    """
    _check_header_size(path)
    try:
        return load_file(path, backend="pread")
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{str(path)!r} is no sound safetensors file: {one_line(error)}") from error


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


def _check_header_size(path: Path) -> None:
    """Refuse a header that would need too much memory to parse; a small file may list many empty tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{str(path)!r} claims a header of {length} bytes; {MAX_HEADER_BYTES} is the most accepted")
        # Each tensor has one opening brace, and so do the header and its metadata. Counting braces is cheap, parsing is not.
        n_tensors = file.read(length).count(b"{") - 2
    if n_tensors > MAX_TENSORS:
        raise CheckpointError(f"{str(path)!r} claims {n_tensors} tensors; {MAX_TENSORS} is the most accepted")
