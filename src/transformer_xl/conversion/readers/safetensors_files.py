"""Finds the tensors in a safetensors file of unknown origin.

Reference: the format, https://huggingface.co/docs/safetensors (8 bytes length, JSON header, data without holes).
Known deviation: the `safetensors` library is not used. It parses headers of up to 100 MB before anything can be counted, and it
returns tensors instead of their places.
"""

from pathlib import Path
from typing import Any

from transformer_xl.checkpoint.tensor_file import CODES, MAX_HEADER_BYTES, MAX_TENSORS
from transformer_xl.conversion.readers.files import open_regular, parse_json, read_at
from transformer_xl.conversion.readers.inert import DTYPES, Storage, TensorRef, place
from transformer_xl.errors import CheckpointError

MAX_TOKENS = 20 * MAX_TENSORS
"""Brackets, braces, commas and colons of a header; a matrix takes 12. Counting them is cheap, parsing is not."""

_NAMES = {CODES[dtype]: name for name, dtype in DTYPES.items()}


def read_safetensors(path: Path) -> dict[str, TensorRef]:
    """Read the header of a safetensors file; return its tensors by name. The format has no checksums.

    Raises:
        CheckpointError: the file is missing, its header is oversized or malformed, or tensors overlap, leave holes or lie
            outside of the file.
    """
    file, size = open_regular(path)
    with file:
        length = int.from_bytes(read_at(path, file, 0, 8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"'{path}' claims a header of {length} bytes; {MAX_HEADER_BYTES} is the most accepted")
        text = read_at(path, file, 8, length)
    header = _parse(path, text)
    return _check(path, header, 8 + length, size)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    if sum(map(text.count, (b"{", b"[", b",", b":"))) > MAX_TOKENS:
        raise CheckpointError(f"'{path}' has a header of too many parts for {MAX_TENSORS} tensors, the most accepted")
    try:
        header = parse_json(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(ascii(str(error)).split())[:150]
        raise CheckpointError(f"'{path}' is no sound safetensors file: its header is no JSON ({reason})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"'{path}' is no sound safetensors file: its header holds no tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"'{path}' is no sound safetensors file: its metadata is not text by name")
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"'{path}' claims {len(header)} tensors; {MAX_TENSORS} is the most accepted")
    return header


def _check(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    spans = []
    for name, entry in header.items():
        tensors[name], first, end = _tensor(path, name, entry, start, size)
        spans.append((first, end))
    at = 0
    for first, end in sorted(spans):
        if first != at:
            what = "overlap" if first < at else "leave a hole"
            raise CheckpointError(f"'{path}' is no sound safetensors file: its tensors {what}")
        at = end
    if start + at != size:
        raise CheckpointError(f"'{path}' has {size - start - at} bytes that belong to no tensor; copy or download it again")
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> tuple[TensorRef, int, int]:
    """Return a tensor, and where its bytes begin and end, counted from the end of the header."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [first, end]} if len(entry) == 3:
            integers = all(type(number) is int and 0 <= number < 2**62 for number in (*shape, first, end))
        case _:
            integers, dtype, shape, first, end = False, "", [], 0, 0
    what = f"'{path}' is no sound safetensors file: tensor {name[:100]!a} has"
    if not integers or dtype not in _NAMES or not first <= end <= size - start:
        raise CheckpointError(f"{what} an impossible type, shape or place")
    stride = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    tensor = place(path, Storage(start + first, end - first), _NAMES[dtype], 0, shape, stride)
    if tensor.numel * tensor.dtype.itemsize != end - first:
        raise CheckpointError(f"{what} another size than its shape")
    return tensor, first, end
