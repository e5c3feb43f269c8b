"""`Mask`: what each token of a segment sees (documents, padding, memory, window), as one number each, for all layers.

A query sees itself and every earlier key of its own document, except padding, unused positions of a memory that is still
filling up, and, with a window, keys before the last ones of it. So it sees all keys from a first one to its own, and the first
one says everything. `hidden_keys` of `kernels/equation.py` makes a mask of it.

Shapes: B batch, T tgt_len, M memory, S keys, k earlier tokens that a shift reads, L = M + T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
        """Return the mask of a segment.

        Args:
            document_starts: bool (B, T), True where a token begins a new document; None: nowhere.
            n_valid: int64 (B,), how many of the last memory positions are real.
            n_pad: int64 (B,), padding tokens at the left of each row; None: none. A row's memory ends where its padding ends.
            tgt_len: T.
            memory_length: M.
            window: how many keys a query may see, itself included (`same_length`); None: all.
            n_before: see `Mask`; None: the model has no shift.
        """
        M, T = memory_length, tgt_len
        own_T = torch.arange(M, M + T, device=n_valid.device)
        oldest_B1 = (M - n_valid if n_pad is None else M + n_pad - n_valid).unsqueeze(1)
        text_BT = oldest_B1.expand(-1, T)
        if document_starts is not None:
            text_BT = torch.where(document_starts, own_T, text_BT).cummax(dim=1).values
        n_own = M + T - text_BT[:, -1]
        first_BT = text_BT if window is None else torch.maximum(text_BT, own_T - window + 1)
        first_BT = torch.minimum(first_BT, own_T)  # a padding query sees only itself; its result is not used
        if n_before is None:
            return cls(first_BT, n_own, n_pad)
        start_BL = None
        is_whole = n_pad is None and document_starts is None and n_valid.device.type == "cpu" and (n_valid == M).all()
        if not is_whole:  # only on a CPU is that looked for; elsewhere it would mean waiting
            start_BL = torch.cat([oldest_B1.expand(-1, M), text_BT], dim=1)
        if n_before:  # keys are counted from the first one, and memory has moved up by the padding
            oldest_key_B1 = torch.zeros_like(oldest_B1) if n_pad is None else n_pad.unsqueeze(1)
            first_BT = (first_BT - n_before).maximum(oldest_key_B1).minimum(own_T - n_before)
        return cls(first_BT, n_own, n_pad, n_before, start_BL)
