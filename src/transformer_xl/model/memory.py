"""`Mems`: what a model keeps of the past, as a value that goes in and comes out.

Per layer, the hidden states that entered it for the last positions of each row, without gradient (the paper's SG(h)). Rows may
be of different ages: `n_valid` counts, per row, how many of the last positions are real. The rest is zeros that nothing attends
to, so an empty memory contributes nothing while its shape can be that of a full one from the first segment on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mems:
    """Hidden states of past positions (Dai et al. 2019, sec. 3.2), newest last.

    Attributes:
        hidden: one tensor per layer, (B, M, D), detached unless the model was told to `keep_graph`.
        n_valid: int64 (B,), how many of the last M positions hold real states.
    """

    hidden: tuple[Tensor, ...]
    n_valid: Tensor

    @classmethod
    def empty(
        cls,
        batch_size: int,
        *,
        n_layer: int,
        d_model: int,
        length: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        valid: bool = False,
    ) -> "Mems":
        """Make a memory that holds nothing.

        Args:
            batch_size: B, number of rows.
            n_layer: number of layers.
            d_model: D, width of a hidden state.
            length: M, places already allotted; with the model's `mem_len` shapes never change, with 0 the memory grows.
            dtype: of the hidden states.
            device: where it lives.
            valid: its zeros are attended to, for models that were trained so.

        Returns:
            Zeros, all or none of which are valid.
        """
        zeros = torch.zeros(batch_size, length, d_model, dtype=dtype, device=device)
        return cls((zeros,) * n_layer, torch.full((batch_size,), length if valid else 0, device=device))

    @property
    def batch_size(self) -> int:
        """B, number of rows."""
        return self.n_valid.shape[0]

    @property
    def length(self) -> int:
        """M, places per row, valid or not."""
        return self.hidden[0].shape[1]

    def reset(self, rows: Tensor, *, valid: bool = False) -> "Mems":
        """Return this memory with some rows emptied, for example where a new document begins.

        Args:
            rows: bool (B,), True where a row forgets.
            valid: the zeros of the emptied rows are attended to, see `empty`.

        Returns:
            A new memory; the emptied rows hold zeros, so nothing of the old text is left in them.
        """
        keep = ~rows.to(self.n_valid.device)
        # where, not a product: 0 x NaN is NaN, and a row is often reset because it went wrong
        hidden = tuple(
            torch.where(keep[:, None, None], h, torch.zeros((), dtype=h.dtype, device=h.device)) for h in self.hidden
        )
        return Mems(hidden, torch.where(keep, self.n_valid, self.length if valid else 0))

    def select(self, rows: Tensor | slice) -> "Mems":
        """Return the memory of some rows, in the order given (indices, bool (B,) or a slice)."""
        return Mems(tuple(h[rows] for h in self.hidden), self.n_valid[rows])

    @staticmethod
    def concatenate(parts: Sequence["Mems"]) -> "Mems":
        """Put the rows of several memories of equal length one after another."""
        hidden = tuple(torch.cat(layer) for layer in zip(*(part.hidden for part in parts), strict=True))
        return Mems(hidden, torch.cat([part.n_valid for part in parts]))

    def detach(self) -> "Mems":
        """Return this memory without gradients."""
        return Mems(tuple(h.detach() for h in self.hidden), self.n_valid)

    def to(self, device: torch.device | str) -> "Mems":
        """Return this memory on another device."""
        return Mems(tuple(h.to(device) for h in self.hidden), self.n_valid.to(device))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory as named tensors, for a checkpoint."""
        return {"n_valid": self.n_valid, **{f"hidden.{i}": h for i, h in enumerate(self.hidden)}}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> "Mems":
        """Rebuild a memory from `state_dict()`."""
        return cls(tuple(state[f"hidden.{i}"] for i in range(len(state) - 1)), state["n_valid"])


def join(past: Tensor, present: Tensor, n_pad: Tensor | None = None) -> Tensor:
    """Put a segment after its memory along time; where the segment is padded at the left, memory moves up to its first token.

    Args:
        past: (B, M, …) memory, or a projection of it.
        present: (B, T, …) the segment.
        n_pad: int64 (B,), padding tokens at the left of each row; None: none.

    Returns:
        (B, M + T, …), where the last positions of every row are contiguous in time. The places freed at the left repeat the
        oldest position; they are outside `n_valid` and masked.

    Example:
        >>> join(torch.tensor([[1, 2]]), torch.tensor([[0, 3]]), torch.tensor([1])).tolist()  # 0 is padding
        [[1, 1, 2, 3]]
    """
    joined = torch.cat([past, present], dim=1)
    if n_pad is None:
        return joined
    place = torch.arange(joined.shape[1], device=joined.device)
    moved = place - n_pad[:, None]
    source = torch.where(place < past.shape[1] + n_pad[:, None], moved.clamp(min=0), place)
    return joined[torch.arange(joined.shape[0], device=joined.device)[:, None], source]
