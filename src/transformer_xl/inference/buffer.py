"""`KeyValueMemory`: what a model keeps of the past when its weights no longer change.

With frozen weights the keys and values of a position never change. So they are kept instead of the hidden states that they are
computed from, and no token is projected twice. They lie in ring buffers allotted once: the token at position p of a row is in
slot p modulo C, and overwrites the token C positions before it. Rows may have different ages and stand at different slots.

Values are kept transposed, so that both products of attention read memory in the order in which it lies.

Shapes: B rows, N heads, C slots, H d_head, R slots of inputs and of tokens, D d_model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED_SLOTS = 16
"""C is a multiple of this, so that the rows of values begin where vector loads like them to."""


def count_slots(*, mem_len: int, window: int | None, tgt_len: int) -> int:
    """Return C: room for the memory or window of a segment's first token, and for the segment itself."""
    return math.ceil((max(mem_len, window or 0) + tgt_len) / _ALIGNED_SLOTS) * _ALIGNED_SLOTS


def slot_of(position: Tensor, n_slot: int) -> Tensor:
    """Return the slots in which positions lie."""
    return position % n_slot


def runs(slot: int, n: int, n_slot: int) -> Iterator[tuple[slice, slice]]:
    """Yield the slots of n positions from a slot on, and on from the ring's beginning; and which positions lie there."""
    n_to_end = min(n, n_slot - slot)
    yield slice(slot, slot + n_to_end), slice(0, n_to_end)
    if n_to_end < n:
        yield slice(0, n - n_to_end), slice(n_to_end, n)


class Rings(NamedTuple):
    """Keys and values of one layer and some rows."""

    keys: Tensor
    """(N, B, C, H)."""
    values: Tensor
    """(N, B, H, C)."""

    def write(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        """Write keys and values, (B, T, N, H) or (B, N, H), into slots (B, T) or (B), in place."""
        row = torch.arange(k.shape[0], device=slot.device)
        row = row if slot.dim() == 1 else row.unsqueeze(1)
        # assigned by index, which a compiler does in place; it would copy the whole ring for scatter_
        self.keys[:, row, slot] = k.to(self.keys.dtype).movedim(-2, 0)
        self.values[:, row, :, slot] = v.to(self.values.dtype)

    def write_at(self, k_BTNH: Tensor, v_BTNH: Tensor, slot: int) -> None:
        """Write keys and values of rows that stand at one slot, from there on, in place."""
        k_NBTH, v_NBHT = k_BTNH.permute(2, 0, 1, 3), v_BTNH.permute(2, 0, 3, 1)
        for slots, tokens in runs(slot, k_BTNH.shape[1], self.keys.shape[2]):
            self.keys[:, :, slots] = k_NBTH[:, :, tokens]
            self.values[..., slots] = v_NBHT[..., tokens]

    def in_order(self, slot_BC: Tensor) -> "Rings":
        """Return copies in which each row's slots follow each other as listed, (B or 1, C)."""
        N, B, C, H = self.keys.shape
        row_B1 = torch.arange(B, device=slot_BC.device).unsqueeze(1)
        return Rings(self.keys[:, row_B1, slot_BC], self.values.gather(3, slot_BC[None, :, None].expand(N, B, H, C)))


@dataclass(frozen=True)
class KeyValueMemory:
    """Projected keys and values of past positions, in ring buffers that readers write in place.

    Attributes:
        keys: one tensor per layer, (N, B, C, H).
        values: one tensor per layer, (N, B, H, C).
        inputs: one tensor per layer, (B, R, D), the layer's inputs at the last positions, each in slot p modulo R, for layers
            with a shift; else R is 0.
        tokens: int64 (B, R), the ids of the last tokens plus 1, in the same way, for models with n-grams; else R is 0.
        end: int64 (B,), position of each row's next token; its slot is `end` modulo C.
        n_valid: int64 (B,), how many of the last positions before `end` are real, at most C.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    tokens: Tensor
    end: Tensor
    n_valid: Tensor

    @property
    def batch_size(self) -> int:
        """B, number of rows."""
        return self.end.shape[0]

    @property
    def n_slot(self) -> int:
        """C, slots per row, valid or not."""
        return self.keys[0].shape[2]

    @property
    def n_bytes(self) -> int:
        """Bytes of it all: n_layer x B x (C x 2 x N x H keys and values, R x D inputs), the tokens, and 16 per row."""
        return sum(x.nbytes for x in self.state_dict().values())

    def rings(self, layer: int, rows: slice = slice(None)) -> Rings:
        """Return views of the keys and values of a layer."""
        if rows == slice(None):  # to make views of all rows costs a small compiled model a tenth of a step
            return Rings(self.keys[layer], self.values[layer])
        return Rings(self.keys[layer][:, rows], self.values[layer][:, rows])

    def advance(self, rows: slice, n_new: Tensor | int) -> None:
        """Count tokens whose keys and values have been written, int64 (rows,) or the same for all."""
        self.end[rows].add_(n_new)
        self.n_valid[rows].add_(n_new).clamp_(max=self.n_slot)

    def reset(self, rows: Tensor) -> None:
        """Empty some rows in place; nothing of the old text is left in them, and they begin as new ones do.

        Args:
            rows: bool (B,), True where a row is emptied.
        """
        index = rows.to(self.end.device).nonzero().squeeze(1)
        for buffer in (*self.keys, *self.values):
            buffer.index_fill_(1, index, 0)
        for buffer in (*self.inputs, self.tokens, self.end, self.n_valid):
            buffer.index_fill_(0, index, 0)

    def reorder(self, sources: Tensor) -> None:
        """Copy rows over others in place, all at once.

        Args:
            sources: int64 (B,), for each row the one that it goes on from; itself where nothing changes.
        """
        to = (sources != torch.arange(self.batch_size, device=sources.device)).nonzero().squeeze(1)
        if len(to) == 0:
            return
        of = sources[to]
        end, n_valid = self.end[of], self.n_valid[of]
        for buffer in (*self.inputs, self.tokens, self.end, self.n_valid):
            buffer[to] = buffer[of]
        # of a ring that is not full yet, no query sees the rest; but with zero_first_memory it sees zeros before the text
        used = slice(int(end.max()) if (n_valid <= end).all() else None)
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[:, to, used] = keys[:, of, used]
            values[:, to, :, used] = values[:, of, :, used]

    @staticmethod
    def concatenate(parts: Sequence["KeyValueMemory"]) -> "KeyValueMemory":
        """Put the rows of several memories with the same number of slots one after another."""
        keys = tuple(torch.cat(layer, dim=1) for layer in zip(*(part.keys for part in parts), strict=True))
        values = tuple(torch.cat(layer, dim=1) for layer in zip(*(part.values for part in parts), strict=True))
        inputs = tuple(map(torch.cat, zip(*(part.inputs for part in parts), strict=True)))
        rest = (torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "end", "n_valid"))
        return KeyValueMemory(keys, values, inputs, *rest)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory as named tensors, for example for a file."""
        layers = range(len(self.keys))
        keys, values = ({f"{name}.{i}": x[i] for i in layers} for name, x in (("keys", self.keys), ("values", self.values)))
        inputs = {f"inputs.{i}": x for i, x in enumerate(self.inputs) if x.shape[1]}
        tokens = {"tokens": self.tokens} if self.tokens.shape[1] else {}
        return {**keys, **values, **inputs, **tokens, "end": self.end, "n_valid": self.n_valid}

    def last(self, ring: Tensor, rows: slice, n: int) -> Tensor:
        """Return what a ring holds of the latest positions; 0 where a row has read nothing.

        Args:
            ring: `inputs` of a layer or `tokens`, (B, R, …).
            rows: the rows to look at.
            n: how many positions, less than R.

        Returns:
            Oldest first, (rows, n, …).
        """
        ring, places = self._places(ring, rows, range(-n, 0))
        return ring[places]

    def keep(self, ring: Tensor, rows: slice, x_BT: Tensor) -> None:
        """Write the positions that begin at `end` into a ring, in place.

        Args:
            ring: `inputs` of a layer or `tokens`, (B, R, …).
            rows: the rows to write.
            x_BT: what stands at those positions, (rows, T, …).
        """
        T, R = x_BT.shape[1], ring.shape[1]
        ring, places = self._places(ring, rows, range(max(0, T - R), T))
        ring[places] = x_BT[:, -R:].to(ring.dtype)

    def _places(self, ring: Tensor, rows: slice, since_end: range) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return some rows of a ring, and an index of what they hold of positions that are counted from `end`."""
        position = self.end[rows].unsqueeze(1) + torch.arange(since_end.start, since_end.stop, device=self.end.device)
        return ring[rows], (torch.arange(len(position), device=position.device).unsqueeze(1), slot_of(position, ring.shape[1]))
