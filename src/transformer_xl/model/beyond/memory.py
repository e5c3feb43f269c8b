"""`BeyondMems`: hidden states as in `Mems`, and what is kept of those that left; `Leaving`: which positions leave, and when.

A row's positions leave in blocks of C (`compression`), counted from the beginning of its document. Those that are out of the
memory's reach and not yet a whole block wait as hidden states. So what was made of the blocks depends on the text alone, not on
how it is cut into segments.

Shapes: B batch, T tgt_len, Y hidden states held, S = Y + T, D d_model, C positions of a block, n blocks that leave.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from transformer_xl.model.attention.equation import first_keys
from transformer_xl.model.call import Rows
from transformer_xl.model.memory import Memory

_MOST_BLOCKS = 2**62
_OF_LAYERS = ("hidden", "beyond", "inputs")


@dataclass(frozen=True)
class BeyondMems(Memory):
    """Hidden states of the last positions, and for each layer what is kept of earlier ones.

    Attributes:
        hidden: one tensor per layer, (B, Y, D), what keys are made of, newest last: inputs of the layer, or what a shift made
            of them; the memory and what waits to leave it.
        n_valid: int64 (B,), how many of the last Y positions hold real states.
        beyond: one tensor per layer, (B, …); zeros where nothing has left.
        n_block: int64 (B,), how many blocks have left since the document began.
        inputs: one tensor per layer, (B, k, D), its inputs at the last k positions, for its shift; zeros where the document had
            not begun.
        tokens: int64 (B, K), those of `Mems`.
    """

    hidden: tuple[Tensor, ...]
    n_valid: Tensor
    beyond: tuple[Tensor, ...]
    n_block: Tensor
    inputs: tuple[Tensor, ...]
    tokens: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """B, number of rows."""
        return self.n_valid.shape[0]

    @property
    def length(self) -> int:
        """Y, positions per row, valid or not."""
        return self.hidden[0].shape[1]

    def state_dict(self) -> dict[str, Tensor]:
        """Return both counts, the tensors of each layer, and the last tokens."""
        layers = {f"{name}.{i}": x for name in _OF_LAYERS for i, x in enumerate(getattr(self, name))}
        tokens = {} if self.tokens is None else {"tokens": self.tokens}
        return {"n_valid": self.n_valid, "n_block": self.n_block, **layers, **tokens}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Self:
        """Rebuild a memory from `state_dict()`."""
        n_layer = sum(name.startswith("hidden.") for name in state)
        layers = {name: tuple(state[f"{name}.{i}"] for i in range(n_layer)) for name in _OF_LAYERS}
        return cls(n_valid=state["n_valid"], n_block=state["n_block"], **layers, tokens=state.get("tokens"))

    def check(self, batch_size: int, n_layer: int) -> None:
        """Refuse a segment with other rows, or a model with another number of layers."""
        super().check(batch_size, n_layer)
        if len(self.hidden) != n_layer:
            raise ValueError(
                f"mems of {len(self.hidden)} layers must fit a model of {n_layer}; use model.init_mems({batch_size})"
            )

    def check_values(self) -> None:
        """Refuse rows with fewer than 0 or more than Y valid positions, and counts of blocks that no text has."""
        too_many = (self.n_valid > self.length) | (self.n_block > _MOST_BLOCKS)
        if ((self.n_valid < 0) | (self.n_block < 0) | too_many).any():
            raise ValueError("its rows have impossible lengths")


@dataclass(frozen=True)
class Leaving:
    """Which positions of memory and segment each query may still read, and which leave after the segment.

    Places are those of held states and segment joined, S = Y + T, where padded rows have moved up (`join`).

    Attributes:
        first: int64 (B, T), the first place of each query's document.
        goes_on: bool (B, T), whether that document had begun before the segment; None: all had.
        ended: bool (B,), rows whose document ended, so that what was kept of it is forgotten; None: none.
        begin: int64 (B,), the place of the oldest position that has not left.
        n_block: int64 (B,), blocks that leave.
        n_most: n, most blocks that a row could lose.
        size: C.
        n_valid: int64 (B,), positions that are held afterwards.
    """

    first: Tensor
    goes_on: Tensor | None
    ended: Tensor | None
    begin: Tensor
    n_block: Tensor
    n_most: int
    size: int
    n_valid: Tensor

    @classmethod
    def of(
        cls, rows: Rows, mems: BeyondMems, *, tgt_len: int, mem_len: int, ext_len: int, size: int, n_waiting: int
    ) -> "Leaving":
        """Find out what leaves.

        Args:
            rows: padding and documents of the segment.
            mems: the memory before it.
            tgt_len: T.
            mem_len: positions that stay.
            ext_len: positions at the end of the segment that are not remembered.
            size: C.
            n_waiting: 1: the newest block waits although it is whole, until a position follows it; 0: it leaves.
        """
        starts = rows.document_starts
        first_BT, n_own_B = first_keys(
            starts, mems.n_valid, rows.n_pad, tgt_len=tgt_len, memory_length=mems.length, window=None
        )
        n_left_B = (n_own_B - ext_len).clamp(min=0)
        n_block_B = (n_left_B - mem_len - n_waiting).clamp(min=0) // size
        return cls(
            first=first_BT,
            goes_on=None if starts is None else starts.cumsum(dim=1) == 0,
            ended=None if starts is None else starts.any(dim=1),
            begin=mems.length + tgt_len - n_own_B,
            n_block=n_block_B,
            n_most=max(mems.length + tgt_len - ext_len - mem_len - n_waiting, 0) // size,
            size=size,
            n_valid=n_left_B - n_block_B * size,
        )

    @property
    def leaves(self) -> Tensor:
        """Bool (B, n), which blocks leave."""
        return torch.arange(self.n_most, device=self.begin.device) < self.n_block[:, None]

    def first_of(self, n_input: int, n_held: int) -> Tensor | None:
        """Return `first`, int64 (B, T), among `n_input` inputs and the segment; 0 where a document goes on; None: all do.

        `n_held` is Y, which `first` counts before the segment.
        """
        if self.goes_on is None:
            return None
        return (self.first - n_held + n_input).where(~self.goes_on, 0)

    def blocks(self, x_BS: Tensor) -> Tensor:
        """Return the blocks (B, n, C, …) of what stands at the places (B, S, …); those that do not leave mean nothing."""
        places_nC = torch.arange(self.n_most * self.size, device=x_BS.device).view(self.n_most, self.size)
        places_BnC = (self.begin[:, None, None] + places_nC).clamp(max=x_BS.shape[1] - 1)
        return x_BS[torch.arange(x_BS.shape[0], device=x_BS.device)[:, None, None], places_BnC]

    def kept(self, beyond_B: Tensor) -> Tensor:
        """Return what is kept of the document that the row is in after the segment: zeros for rows whose document ended."""
        if self.ended is None:
            return beyond_B
        return beyond_B.where(~self.ended.view(-1, *(1 for _ in beyond_B.shape[1:])), 0)
