"""`KeyValueMemory`: what a model keeps of the past when its weights no longer change.

With frozen weights the keys and values of a position never change. So they are kept instead of the hidden states that they are
computed from, and no token is projected twice. They lie in ring buffers allotted once: the token at position p of a row is in
slot p modulo C, and overwrites the token C positions before it. Rows may have different ages and stand at different slots.

Values are kept transposed, so that both products of attention read memory in the order in which it lies.

Shapes: B rows, N heads, C slots, H d_head, R slots of inputs, D d_model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.model.precision import at_least_fp32


@dataclass(frozen=True)
class KeyValueMemory:
    """Projected keys and values of past positions, in ring buffers that readers write in place.

    Attributes:
        keys: one tensor per layer, (N, B, C, H).
        values: one tensor per layer, (N, B, H, C).
        inputs: one tensor per layer, (B, R, D), the layer's inputs at the last positions, each in slot p modulo R, for layers
            with a shift; else R is 0.
        end: int64 (B,), position of each row's next token; its slot is `end` modulo C.
        n_valid: int64 (B,), how many of the last positions before `end` are real, at most C.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    end: Tensor
    n_valid: Tensor

    @classmethod
    def empty(
        cls,
        batch_size: int,
        *,
        n_layer: int,
        n_head: int,
        d_head: int,
        n_slot: int,
        inputs: tuple[int, int] = (0, 0),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "KeyValueMemory":
        """Allot an empty memory.

        Args:
            batch_size: B, number of rows.
            n_layer: number of layers.
            n_head: N.
            d_head: H.
            n_slot: C, slots per row: for the keys that a query may see, and the longest segment read at once.
            inputs: R and D.
            dtype: of keys and values; inputs are at least fp32.
            device: where it lives.

        Returns:
            Zeros that nothing attends to.
        """
        place = {"dtype": dtype, "device": device}
        return cls(
            tuple(torch.zeros(n_head, batch_size, n_slot, d_head, **place) for _ in range(n_layer)),
            tuple(torch.zeros(n_head, batch_size, d_head, n_slot, **place) for _ in range(n_layer)),
            tuple(at_least_fp32(torch.zeros(batch_size, *inputs, **place)) for _ in range(n_layer)),
            torch.zeros(batch_size, dtype=torch.int64, device=device),
            torch.zeros(batch_size, dtype=torch.int64, device=device),
        )

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
        """Bytes of it all: n_layer x B x (C x 2 x N x H + R x D) x the size of a number, and 16 per row."""
        return sum(x.nbytes for x in (*self.keys, *self.values, *self.inputs, self.end, self.n_valid))

    def reset(self, rows: Tensor) -> None:
        """Empty some rows in place; nothing of the old text is left in them, and they begin as new ones do.

        Args:
            rows: bool (B,), True where a row is emptied.
        """
        index = rows.to(self.end.device).nonzero().squeeze(1)
        for buffer in (*self.keys, *self.values):
            buffer.index_fill_(1, index, 0)
        for buffer in self.inputs:
            buffer.index_fill_(0, index, 0)
        self.end.index_fill_(0, index, 0)
        self.n_valid.index_fill_(0, index, 0)

    @staticmethod
    def concatenate(parts: Sequence["KeyValueMemory"]) -> "KeyValueMemory":
        """Put the rows of several memories with the same number of slots one after another."""
        keys = tuple(torch.cat(layer, dim=1) for layer in zip(*(part.keys for part in parts), strict=True))
        values = tuple(torch.cat(layer, dim=1) for layer in zip(*(part.values for part in parts), strict=True))
        inputs = tuple(map(torch.cat, zip(*(part.inputs for part in parts), strict=True)))
        return KeyValueMemory(
            keys, values, inputs, torch.cat([part.end for part in parts]), torch.cat([part.n_valid for part in parts])
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory as named tensors, for example for a file."""
        layers = range(len(self.keys))
        keys, values = ({f"{name}.{i}": x[i] for i in layers} for name, x in (("keys", self.keys), ("values", self.values)))
        inputs = {f"inputs.{i}": x for i, x in enumerate(self.inputs) if x.shape[1]}
        return {**keys, **values, **inputs, "end": self.end, "n_valid": self.n_valid}

    def inputs_before(self, layer: int, rows: slice, n: int) -> Tensor:
        """Return a layer's inputs at the last `n` < R positions of some rows, (B, n, D); 0 where a row has read nothing."""
        ring_BRD, age_n = self.inputs[layer][rows], torch.arange(n, 0, -1, device=self.end.device)
        slot_Bn = (self.end[rows].unsqueeze(1) - age_n) % ring_BRD.shape[1]
        return ring_BRD[torch.arange(len(ring_BRD), device=slot_Bn.device).unsqueeze(1), slot_Bn]

    def write_inputs(self, layer: int, rows: slice, h_BTD: Tensor) -> None:
        """Keep a layer's inputs at the positions that begin at `end`, in place."""
        ring_BRD = self.inputs[layer][rows]
        new_BTD = h_BTD[:, -ring_BRD.shape[1] :]
        first = h_BTD.shape[1] - new_BTD.shape[1]
        place_T = torch.arange(first, h_BTD.shape[1], device=self.end.device)
        slot_BT = (self.end[rows].unsqueeze(1) + place_T) % ring_BRD.shape[1]
        ring_BRD[torch.arange(len(ring_BRD), device=slot_BT.device).unsqueeze(1), slot_BT] = new_BTD.to(ring_BRD.dtype)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the tensors of another memory of the same shape into this one, in place.

        Args:
            state: the result of its `state_dict()`.

        Raises:
            ValueError: names, shapes or types differ from this memory's; it is unchanged then.
        """
        own = self.state_dict()
        if {name: (x.shape, x.dtype) for name, x in state.items()} != {name: (x.shape, x.dtype) for name, x in own.items()}:
            raise ValueError("the tensors are not those of a memory of this shape")
        for name, x in state.items():
            own[name].copy_(x)
