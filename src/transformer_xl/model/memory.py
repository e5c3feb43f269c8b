"""`Memory`: what a model keeps of the past, as a value that goes in and comes out. Most models use `Mems`.

Code that carries, saves, resets or counts a memory does not know its kind: it sees named tensors with a row for each text. A
kind of your own only has to define how it becomes such tensors and is made from them again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor


class Memory(ABC):
    """What a model keeps of the past: named tensors whose first axis is rows.

    Nobody changes them in place, except that a trainer on a GPU writes into a copy of its own.
    """

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory as named tensors (B, …), for example for a checkpoint."""

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
        """Return this memory with some rows emptied.

        `TaskModel` uses it, whose texts begin with a segment. Where a document may begin anywhere, as in pre-training, see
        `Rows.document_starts`: attention masks what was before, and an LSTM sets its state to zeros.

        Args:
            rows: bool (B,), True where a row is emptied.

        Returns:
            A new memory; the emptied rows hold zeros, so nothing of the old text is left in them.
        """
        return self.where(~rows, self._map(torch.zeros_like))

    def select(self, rows: Tensor | slice) -> Self:
        """Return the memory of some rows in that order (indices, bool (B,) or a slice)."""
        return self._map(lambda x: x[rows])

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Put the rows of several memories of the same kind and shape one after another."""
        states = [part.state_dict() for part in parts]
        return type(parts[0]).from_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]})

    def where(self, rows: Tensor, other: Self) -> Self:
        """Return this memory's rows where bool (B,) is True, and those of another one elsewhere."""
        # where, not a product: 0 x NaN is NaN, and rows with NaN are often those to replace
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

    def check(self, batch_size: int, own: "Memory") -> None:
        """Refuse a memory that a model cannot have made for so many rows. Types and sizes are compared; no number is looked at.

        Sizes are those of a full memory, but for rows. A kind that grows overrides this.

        Args:
            batch_size: rows of the segment that is read after it.
            own: a full memory of the model, of any number of rows.

        Raises:
            ValueError: it is of another kind, or its tensors have other rows, widths or types.
        """
        if problem := self._misfit(batch_size, own):
            raise ValueError(f"{problem}; use model.init_mems({batch_size})")

    def _misfit(self, batch_size: int, own: "Memory") -> str | None:
        """Say what does not fit; arguments as `check`. The number of rows is shown only then, or compiled code would fix it."""
        if type(self) is not type(own):
            return f"mems are {type(self).__name__}, and those of this model {type(own).__name__}"
        if self.batch_size != batch_size:
            return f"a memory of {self.batch_size} rows must fit ids of {batch_size} rows"
        state, wanted = self.state_dict(), own.state_dict()
        for name in wanted | state:
            x, like = state.get(name), wanted.get(name)
            if x is None or like is None or x.shape[0] != batch_size or (x.dtype, x.shape[1:]) != (like.dtype, like.shape[1:]):
                have = "missing" if x is None else f"{x.dtype} {tuple(x.shape)}"
                want = "nothing" if like is None else f"{like.dtype} {(batch_size, *like.shape[1:])}"
                return f"mems of another model: {name} is {have} where {want} belongs"
        return None

    def check_values(self) -> None:  # noqa: B027 (most kinds have nothing to refuse)
        """Refuse numbers that no memory of this kind holds, such as counts that are too large; this one accepts all.

        A file may say anything, so numbers from a file are checked before they become indices.

        Raises:
            ValueError: there are such numbers.
        """

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self.from_state_dict({name: change(x) for name, x in self.state_dict().items()})


@dataclass(frozen=True)
class Mems(Memory):
    """Hidden states of past positions (Dai et al. 2019, sec. 3.2), newest last.

    They are the inputs of each layer at the last positions of each row, without gradient (the paper's SG(h)). Rows may have
    different ages. Nothing attends to positions that are not valid, whatever they hold. So an empty memory, of zeros,
    contributes nothing, and may still have the shape of a full one from the first segment on.

    Attributes:
        hidden: one tensor per layer, (B, M, D), detached unless the call had `keep_graph`.
        n_valid: int64 (B,), how many of the last M positions hold real states.
        tokens: int64 (B, K), the ids of the last K tokens plus 1, 0 where there were none, for a model with n-grams; else None.
        valid_when_empty: whether queries attend to the zeros of a row that has read nothing.
    """

    valid_when_empty: ClassVar[bool] = False

    hidden: tuple[Tensor, ...]
    n_valid: Tensor
    tokens: Tensor | None = None

    def __repr__(self) -> str:
        sizes = f"rows={self.batch_size}, layers={len(self.hidden)}, positions={self.length}"
        widths = "/".join(dict.fromkeys(str(h.shape[2]) for h in self.hidden))
        kind = f"dtype={self.hidden[0].dtype}, device={self.n_valid.device}"
        return f"{type(self).__name__}({sizes}, width={widths}, {kind})"

    @property
    def batch_size(self) -> int:
        return self.n_valid.shape[0]

    @property
    def length(self) -> int:
        """M, positions per row, valid or not."""
        return self.hidden[0].shape[1]

    def reset(self, rows: Tensor) -> Self:
        emptied = super().reset(rows)
        n_valid = torch.where(rows.to(self.n_valid.device), self.length if self.valid_when_empty else 0, emptied.n_valid)
        return replace(emptied, n_valid=n_valid)

    def state_dict(self) -> dict[str, Tensor]:
        tokens = {} if self.tokens is None else {"tokens": self.tokens}
        return {"n_valid": self.n_valid, **{f"hidden.{i}": h for i, h in enumerate(self.hidden)}, **tokens}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Self:
        n_layer = sum(name.startswith("hidden.") for name in state)
        return cls(tuple(state[f"hidden.{i}"] for i in range(n_layer)), state["n_valid"], state.get("tokens"))

    def check(self, batch_size: int, own: Memory) -> None:
        if type(self) is Mems and isinstance(own, ZeroFirstMems):  # the same states: they differ in what an empty row is
            own = Mems(own.hidden, own.n_valid, own.tokens)
        if type(own) is type(self) and self.length < own.length:  # it grows until it is full
            own = replace(own, hidden=tuple(h[:, : self.length] for h in own.hidden))
        super().check(batch_size, own)

    def check_values(self) -> None:
        if ((self.n_valid < 0) | (self.n_valid > self.length)).any():
            raise ValueError("its rows have impossible lengths")


class ZeroFirstMems(Mems):
    """Hidden states for models with `zero_first_memory`: where a text begins, queries attend to zeros."""

    valid_when_empty = True


def join(memory: Tensor, segment: Tensor, n_pad: Tensor | None = None) -> Tensor:
    """Put a segment (B, T, …) after its memory (B, M, …) along time, as the paper's ∘ does.

    Where the segment is padded, memory moves up to its text. So the last positions of each row of the result (B, M + T, …) are
    contiguous in time. The positions freed at the left repeat the oldest one; they are outside `n_valid` and masked. `n_pad` is
    int64 (B,), padding tokens at the left of each row.

    Example:
        >>> join(torch.tensor([[1, 2]]), torch.tensor([[0, 3]]), torch.tensor([1])).tolist()  # 0 is padding
        [[1, 1, 2, 3]]
    """
    joined = torch.cat([memory, segment], dim=1)
    if n_pad is None:
        return joined
    place = torch.arange(joined.shape[1], device=joined.device)
    moved = place - n_pad[:, None]
    source = torch.where(place < memory.shape[1] + n_pad[:, None], moved.clamp(min=0), place)
    return joined[torch.arange(joined.shape[0], device=joined.device)[:, None], source]


def remembered(mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None, *, mem_len: int, ext_len: int, keep_graph: bool) -> Tensor:
    """Return the last `mem_len` positions of memory and segment before the last `ext_len`.

    They have no gradient (the paper's SG) unless `keep_graph`; `n_pad` is that of `join`.
    """
    if not keep_graph:
        mem_BMD, h_BTD = mem_BMD.detach(), h_BTD.detach()
    whole = n_pad is None and h_BTD.shape[1] >= mem_len + ext_len  # no old position is kept
    joined = h_BTD if whole else join(mem_BMD, h_BTD, n_pad)
    end = max(joined.shape[1] - ext_len, 0)
    return joined[:, max(end - mem_len, 0) : end]
