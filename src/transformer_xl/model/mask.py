"""`Mask`: what each token of a segment sees, as a few numbers; the same for all layers.

A query sees all keys from a first one to its own (`first_keys` of `kernels/equation.py`). So documents, padding, the ages of
rows and a window of keys come down to one number for each query.

Shapes: B batch, T tgt_len, M memory, S keys, k earlier tokens that a shift reads, L = M + T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.kernels.equation import first_keys


@dataclass(frozen=True)
class Mask:
    """Where the text of each row begins, and what of it each token sees.

    Attributes:
        first: int64 (B, T), the first of the S keys that each query sees.
        n_own: int64 (B,), how many of the last positions belong to the document that each row is in after the segment.
        n_pad: int64 (B,), padding tokens at the left of each row, by which its memory moves up; None: none.
        n_before: how many of the memory's oldest positions are no keys, but read by a shift; at most k.
        start: int64 (B, L), how far back a shift may read at each position, as the first one; None: as far as there are any.
    """

    first: Tensor
    n_own: Tensor
    n_pad: Tensor | None = None
    n_before: int = 0
    start: Tensor | None = None

    @classmethod
    def of(
        cls,
        document_starts: Tensor | None,
        n_valid: Tensor,
        n_pad: Tensor | None,
        *,
        tgt_len: int,
        memory_length: int,
        window: int | None = None,
        n_before: int | None = None,
    ) -> "Mask":
        """Return the mask of a segment; arguments as `first_keys`, and `n_before`, None if the model has no shift."""
        M, T = memory_length, tgt_len
        first_BT, n_own = first_keys(document_starts, n_valid, n_pad, tgt_len=T, memory_length=M, window=window)
        if n_before is None:
            return cls(first_BT, n_own, n_pad)
        start_BL = None
        is_whole = n_pad is None and document_starts is None and n_valid.device.type == "cpu" and (n_valid == M).all()
        if not is_whole:  # only on a CPU is that looked for; elsewhere it would mean waiting
            start_BT, _ = first_keys(document_starts, n_valid, n_pad, tgt_len=T, memory_length=M, window=None)
            oldest_B = M - n_valid if n_pad is None else M - n_valid + n_pad
            start_BL = torch.cat([oldest_B.unsqueeze(1).expand(-1, M), start_BT], dim=1)
        if n_before:
            first_BT = without_oldest(first_BT, n_before, n_pad, n_key=M - n_before + T)
        return cls(first_BT, n_own, n_pad, n_before, start_BL)


def without_oldest(first_BT: Tensor, n_before: int, n_pad: Tensor | None, *, n_key: int) -> Tensor:
    """Return the first key that each query sees (see `first_keys`) when the memory's oldest positions are no keys.

    Args:
        first_BT: with them.
        n_before: how many they are.
        n_pad: int64 (B,), padding tokens at the left of each row, by which its memory has moved up; None: none.
        n_key: keys without them.

    Example:
        >>> without_oldest(torch.tensor([[0, 3]]), 1, None, n_key=4).tolist()
        [[0, 2]]
    """
    oldest_B1 = torch.zeros_like(first_BT[:, :1]) if n_pad is None else n_pad.unsqueeze(1)
    own_T = torch.arange(n_key - first_BT.shape[1], n_key, device=first_BT.device)
    return (first_BT - n_before).maximum(oldest_B1).minimum(own_T)
