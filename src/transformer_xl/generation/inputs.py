"""Turn what callers give to a `Decoder` into tensors, or refuse it before anything is read.

Shapes: B rows.
"""

import reprlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Ids = Tensor | np.ndarray | Sequence[int]
"""Token ids."""

RowIds = Tensor | np.ndarray | Sequence[Ids]
"""Token ids of each row."""

Mask = Tensor | np.ndarray | Sequence[bool]
"""True or False for each row."""

EMPTY_PROMPT = "the prompt is empty; give at least one token, of text that the tokenizer keeps"


def integers(ids: object, what: str) -> Tensor:
    """Return integers of any shape as int64; refuse others, because floats would be rounded silently.

    Raises:
        ValueError: they are not integers; `what` names them.

    Example:
        >>> integers([3, 4], "ids")
        tensor([3, 4])
    """
    found = _tensor(ids)
    if found is not None and found.dtype == torch.uint64 and found.numel() and int(found.view(torch.int64).min()) < 0:
        found = None  # too large to be an id; as int64 it would be negative
    if found is None or (found.numel() and (found.dtype == torch.bool or found.dtype.is_floating_point or found.is_complex())):
        raise ValueError(f"{what}, {_described(ids)}, must be integers of at most 64 bits")
    return found.to(torch.int64)


def text_ids(ids: object, what: str) -> Tensor:
    """Return the token ids of one text, int64 (T,), T ≥ 0, or raise a ValueError."""
    found = integers(ids, what)
    if found.dim() != 1:
        raise ValueError(f"{what}, {_described(ids)}, must be the token ids of one text")
    return found


def one_id_per_row(ids: object, n_row: int) -> Tensor:
    """Return one token id of each row, int64 (B,), or raise a ValueError."""
    found = integers(ids, "ids")
    if found.shape != (n_row,):
        raise ValueError(f"ids, {_described(ids)}, must be {n_row}, one for each row")
    return found


def batch_ids(ids: Tensor, n_row: int) -> Tensor:
    """Return token ids, int64 (B, T) with T ≥ 1, or raise a ValueError."""
    found = integers(ids, "ids")
    if found.dim() != 2 or found.shape[0] != n_row or found.shape[1] == 0:
        raise ValueError(f"ids, {_described(ids)}, must have shape (batch_size, length): ({n_row}, at least 1)")
    return found


def ragged_ids(ids: object, n_row: int) -> list[Tensor]:
    """Return the token ids of each row, int64 (T,) on the CPU, T = 0 in some rows but not in all, or raise a ValueError."""
    rows = []
    if isinstance(ids, Sequence | np.ndarray) and not isinstance(ids, str) and getattr(ids, "ndim", 1) > 0:
        rows = [integers(own, f"ids of row {row}") for row, own in enumerate(ids)]
    if len(rows) != n_row or any(own.dim() != 1 for own in rows) or not any(len(own) for own in rows):
        raise ValueError(
            f"ids, {_described(ids)}, must be a list of token ids for each of {n_row} rows (batch_size), not all of them empty"
        )
    return [own.cpu() for own in rows]


def row_mask(flags: object, n_row: int, what: str) -> Tensor:
    """Return bool (B,), or raise a ValueError in which `what` names the flags: row numbers must not pass for flags."""
    found = _tensor(flags)
    if found is None or found.dtype != torch.bool or found.shape != (n_row,):
        raise ValueError(f"{what}, {_described(flags)}, must be bool of shape ({n_row},), True or False for each row")
    return found


def _tensor(value: object) -> Tensor | None:
    try:
        # a copy, because torch warns of arrays that are read-only, and refuses some strides and byte orders
        return torch.as_tensor(np.array(value) if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else reprlib.repr(value)
