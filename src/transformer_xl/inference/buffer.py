"""`KeyValueMemory`: what a model keeps of the past when its weights no longer change.

With frozen weights the keys and values of a position never change. So they are kept instead of the hidden states that they are
computed from, and no token is projected twice. They lie in ring buffers allotted once: the token at position p of a row is in
slot p modulo C, and overwrites the token C positions before it. Rows may have different ages and stand at different slots.
How many slots there are is the reader's choice (`Reader.n_slot`).

Values are kept transposed, so that both products of attention read memory in the order in which it lies.

Shapes: B rows, N heads, C slots, H d_head, R slots of inputs and of tokens, D d_model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
        return sum(x.nbytes for x in (*self.keys, *self.values, *self.inputs, self.tokens, self.end, self.n_valid))

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
        of = sources[to]
        for buffer in (*self.inputs, self.tokens, self.end, self.n_valid):
            buffer[to] = buffer[of]
        if len(to) == 0:
            return
        end, n_valid = self.end[of], self.n_valid[of]
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
        own, age_n = ring[rows], torch.arange(n, 0, -1, device=self.end.device)
        slot_Bn = (self.end[rows].unsqueeze(1) - age_n) % own.shape[1]
        return own[torch.arange(len(own), device=slot_Bn.device).unsqueeze(1), slot_Bn]

    def keep(self, ring: Tensor, rows: slice, x_BT: Tensor) -> None:
        """Write the positions that begin at `end` into a ring, in place.

        Args:
            ring: `inputs` of a layer or `tokens`, (B, R, …).
            rows: the rows to write.
            x_BT: what stands at those positions, (rows, T, …).
        """
        own = ring[rows]
        new_BT = x_BT[:, -own.shape[1] :]
        first = x_BT.shape[1] - new_BT.shape[1]
        place_T = torch.arange(first, x_BT.shape[1], device=self.end.device)
        slot_BT = (self.end[rows].unsqueeze(1) + place_T) % own.shape[1]
        own[torch.arange(len(own), device=slot_BT.device).unsqueeze(1), slot_BT] = new_BT.to(own.dtype)
