"""`Memory`: what a model keeps of the past, as a value that goes in and comes out; `Mems` is that of most models.

Who carries, saves, resets and counts a memory does not know which kind it is: to them it is named tensors with a row for each
text. A kind of your own has to say how it is taken apart into such tensors and put together again, no more.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


class Memory(ABC):
    """What a model keeps of the past: named tensors whose first axis is rows, never changed in place."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory as named tensors, (B, …) each, for example for a checkpoint."""

    @classmethod
    @abstractmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Self:
        """Rebuild a memory from `state_dict()`."""

    @property
    def batch_size(self) -> int:
        """B, number of rows."""
        return next(iter(self.state_dict().values())).shape[0]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.state_dict().values())

    def reset(self, rows: Tensor) -> Self:
        """Return this memory with some rows emptied, for example where a new document begins.

        Args:
            rows: bool (B,), True where a row forgets.

        Returns:
            A new memory; the emptied rows hold zeros, so nothing of the old text is left in them.
        """
        return self.where(~rows, self._map(torch.zeros_like))

    def select(self, rows: Tensor | slice) -> Self:
        """Return the memory of some rows, in the order given (indices, bool (B,) or a slice)."""
        return self._map(lambda x: x[rows])

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Put the rows of several memories, which are alike but for their rows, one after another."""
        states = [part.state_dict() for part in parts]
        return cls.from_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]})

    def where(self, rows: Tensor, other: Self) -> Self:
        """Return this memory's rows where bool (B,) is True, and those of another one elsewhere."""
        # where, not a product: 0 x NaN is NaN, and a row is often replaced because it went wrong
        theirs = other.state_dict()
        return self.from_state_dict(
            {
                name: torch.where(rows.to(x.device).view(-1, *(1 for _ in x.shape[1:])), x, theirs[name])
                for name, x in self.state_dict().items()
            }
        )

    def detach(self) -> Self:
        """Return this memory without gradients."""
        return self._map(Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        """Return this memory on another device."""
        return self._map(lambda x: x.to(device))

    def check(self, batch_size: int, n_layer: int) -> None:
        """Refuse to be read by a model that it is not the memory of.

        Args:
            batch_size: rows of the segment that is read after it.
            n_layer: layers of the model.

        Raises:
            ValueError: it does not fit.
        """
        if self.batch_size != batch_size:
            raise ValueError(
                f"a memory of {self.batch_size} rows must fit ids of {batch_size} rows; use model.init_mems({batch_size})"
            )

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self.from_state_dict({name: change(x) for name, x in self.state_dict().items()})


@dataclass(frozen=True)
class Mems(Memory):
    """Hidden states of past positions (Dai et al. 2019, sec. 3.2), newest last.

    Per layer, the states that entered it for the last positions of each row, without gradient (the paper's SG(h)). Rows may be
    of different ages. What is not valid is zeros that nothing attends to, so an empty memory contributes nothing while its
    shape can be that of a full one from the first segment on.

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
            Zeros, all of them valid or none.
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
        emptied = super().reset(rows)
        forget = rows.to(self.n_valid.device)
        return Mems(emptied.hidden, torch.where(forget, self.length if valid else 0, emptied.n_valid))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of valid positions, and the states of each layer."""
        return {"n_valid": self.n_valid, **{f"hidden.{i}": h for i, h in enumerate(self.hidden)}}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "Mems":
        """Rebuild a memory from `state_dict()`."""
        return cls(tuple(state[f"hidden.{i}"] for i in range(len(state) - 1)), state["n_valid"])

    def check(self, batch_size: int, n_layer: int) -> None:
        """Refuse to be read by a model of other layers or with other rows."""
        if (self.batch_size, len(self.hidden)) != (batch_size, n_layer):
            raise ValueError(
                f"mems of {self.batch_size} rows and {len(self.hidden)} layers must fit ids of {batch_size} rows and a model "
                f"of {n_layer} layers; use model.init_mems({batch_size})"
            )


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
