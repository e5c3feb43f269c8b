"""Reads files of `torch.save` as data, in the zip format (since PyTorch 1.6) and the older format (legacy)."""

from pathlib import Path
from typing import Any, BinaryIO

from transformer_xl.conversion.readers.inert import DTYPES, Checksum, Storage, place
from transformer_xl.conversion.readers.pickles import read_in_child, rebuild
from transformer_xl.conversion.readers.zip_directory import SIGNATURE, ZipEntry, read_directory
from transformer_xl.errors import CheckpointError
from transformer_xl.untrusted import open_regular, read_at

MAX_PICKLE_BYTES = 256 * 2**20
"""Bytes of the pickle in a zip file, which holds no tensors. A vocabulary of a million words, three times, takes 60 million."""


def read_torch(path: Path) -> Any:
    """Read a file of `torch.save` without running anything that it names; return plain values.

    Tensors and parameters become `TensorRef`s, which are checked to lie in the file. They are read when they are loaded; in the
    zip format, their checksum is verified then. Everything else is as in `read_pickle`.

    Raises:
        CheckpointError: the file is missing, damaged, hostile, needs too much time or memory for its size, or refers to names
            that no Transformer-XL needs.
    """
    file, size = open_regular(path)
    with file:
        if read_at(path, file, 0, min(4, size)) == SIGNATURE:
            return _read_zip(path, file, size)
        return _read_legacy(path, file, size)


def _read_zip(path: Path, file: BinaryIO, size: int) -> Any:
    entries = read_directory(path, file, size)
    folder = _folder(path, entries)
    pickle = entries[f"{folder}/data.pkl"]
    if pickle.size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"'{path}' holds a pickle of {pickle.size} bytes; {MAX_PICKLE_BYTES} is the most accepted")
    checked = any(entry.crc for entry in entries.values())  # PyTorch can write files without checksums
    if checked and not Checksum(path, pickle.offset, pickle.size, pickle.crc).matches_file():
        raise CheckpointError(f"'{path}' is damaged: the checksum of its pickle does not match; copy or download it again")
    order = entries.get(f"{folder}/byteorder")
    if order is not None and (order.size > 6 or read_at(path, file, order.offset, order.size) != b"little"):
        raise CheckpointError(f"'{path}' was written by a machine of another byte order; save it again on this one")
    header, body = read_in_child(path, file, "zip", pickle.offset, pickle.offset + pickle.size)

    storages = {}
    for key, (dtype, n) in header["storages"].items():
        entry = entries.get(f"{folder}/data/{key}")
        if entry is None or entry.size != n * DTYPES[dtype].itemsize:
            raise CheckpointError(f"'{path}' lacks the {n} numbers of storage {key!a}; copy or download it again")
        verify = Checksum(path, entry.offset, entry.size, entry.crc) if checked else None
        storages[key] = Storage(entry.offset, entry.size, verify)
    return _rebuild(path, body, storages, {key: dtype for key, (dtype, _) in header["storages"].items()})


def _folder(path: Path, entries: dict[str, ZipEntry]) -> str:
    """Return the folder that holds all entries of the zip file; its name is the file's name when it was saved."""
    folders = {name.split("/")[0] for name in entries}
    folder = folders.pop() if len(folders) == 1 else ""
    if f"{folder}/data.pkl" not in entries:
        raise CheckpointError(f"'{path}' is a zip file, but none of torch.save")
    if f"{folder}/constants.pkl" in entries:
        raise CheckpointError(f"'{path}' is TorchScript, which holds code; save the state_dict of the model instead")
    return folder


def _read_legacy(path: Path, file: BinaryIO, size: int) -> Any:
    header, body = read_in_child(path, file, "legacy", 0, size)
    storages = {}
    at = header["at"]
    for key in header["order"]:
        dtype, n = header["storages"][key]
        claimed = int.from_bytes(read_at(path, file, at, 8), "little")
        if claimed != n:
            raise CheckpointError(f"'{path}' holds {claimed} numbers where {n} belong; copy or download it again")
        storages[key] = Storage(at + 8, n * DTYPES[dtype].itemsize)
        at += 8 + storages[key].size
    if at != size:
        what = f"ends {at - size} bytes too early" if at > size else f"has {size - at} bytes too many at its end"
        raise CheckpointError(f"'{path}' {what}; copy or download it again")
    return _rebuild(path, body, storages, {key: dtype for key, (dtype, _) in header["storages"].items()})


def _rebuild(path: Path, body: str, storages: dict[str, Storage], dtypes: dict[str, str]) -> Any:
    def tensor(found: list[Any]) -> Any:
        key, dtype, start, n, offset, shape, stride = found
        whole, unit = storages[key], DTYPES[dtypes[key]].itemsize
        if start < 0 or n < 0 or (start + n) * unit > whole.size:
            raise CheckpointError(f"'{path}' holds a part of storage {key!a} that lies outside of it")
        part = Storage(whole.offset + start * unit, n * unit, whole.verify)
        return place(path, part, dtype, offset, shape, stride)

    return rebuild(path, body, tensor)
