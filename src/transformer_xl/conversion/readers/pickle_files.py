"""Reads plain pickles as data: vocabularies and cached corpora of the authors, of NVIDIA and of Hugging Face."""

from pathlib import Path
from typing import Any

from transformer_xl.conversion.readers.files import open_regular
from transformer_xl.conversion.readers.sandbox import read_in_child, rebuild
from transformer_xl.errors import CheckpointError

MAX_BYTES = 4 * 2**30
"""Bytes of a file: the authors' cached WikiText-103 has 900 million, most of them arrays that are skipped."""


def read_pickle(path: Path) -> Any:
    """Read a pickle of any protocol without running anything that it names.

    Args:
        path: the file; a link is followed.

    Returns:
        Plain values, objects as `Stub`s. Dicts of any class come back as dict, sets as list; NumPy arrays, bytes, and
        texts of more than a million are described by a `Stub` without their content: `numpy.ndarray` with (shape, type),
        `builtins.str` or `builtins.bytes` with (length,). Texts of Python 2 are decoded as latin-1, which loses nothing:
        `text.encode("latin-1")` gives the bytes back, which may be UTF-8.

    Raises:
        CheckpointError: the file is missing, damaged, hostile, too large for what it says, or refers to names that no
            Transformer-XL needs.
    """
    file, size = open_regular(path)
    with file:
        if size > MAX_BYTES:
            raise CheckpointError(f"'{path}' has {size} bytes; {MAX_BYTES} is the most that a pickle may have")
        _, body = read_in_child(path, file, "pickle", 0, size)

    def tensor(found: list[Any]) -> Any:
        raise CheckpointError(f"'{path}' holds a tensor, which a plain pickle cannot")

    return rebuild(path, body, tensor)
