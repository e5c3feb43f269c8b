"""How rows of text are read on: token after token over kept keys, or where that is impossible by reading again.

Both offer the same: `read` for some tokens of one row or of all, `step` for one token of each row, `reset`, and a state.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Mems
from transformer_xl.model.precision import Precision, autocast
from transformer_xl.model.reader import Reader


class Streams(Protocol):
    """Rows of text being read; what is returned is what the softmax is computed of."""

    def read(self, rows: slice, ids: Tensor) -> Tensor:
        """Read int64 (b, T) in the rows of a slice, b of them; return (b, D), of the last token."""
        ...

    def step(self, ids: Tensor, active: Tensor | None) -> Tensor:
        """Read int64 (B,) in the rows that are active, bool (B,); return (B, D)."""
        ...

    def reset(self, rows: Tensor) -> None:
        """Let rows, bool (B,), forget."""
        ...

    def together(self) -> bool:
        """Say whether all rows can be read at once."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return what was read as named tensors."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a state, in place; ValueError if it is not one of these streams', and nothing is taken over then."""
        ...


class KeptStreams:
    """Rows over a `KeyValueMemory`."""

    def __init__(self, reader: Reader, batch_size: int) -> None:
        self.reader = reader
        self.memory = reader.empty_memory(batch_size)

    def read(self, rows: slice, ids: Tensor) -> Tensor:
        """Read in pieces of at most `tgt_len`."""
        *pieces, last = ids.split(self.reader.tgt_len, dim=1)
        for piece in pieces:
            self.reader.read(piece, self.memory, rows=rows)
        h_BTD = self.reader.read(last, self.memory, rows=rows)
        # a view would keep all positions, and other strides than those of a step would have compiled code compiled again
        return h_BTD[:, -1].clone(memory_format=torch.contiguous_format)

    def step(self, ids: Tensor, active: Tensor | None) -> Tensor:
        """Read one token in fixed shapes."""
        return self.reader.step(ids, self.memory, active=active)

    def reset(self, rows: Tensor) -> None:
        """Empty rows."""
        self.reader.reset(self.memory, rows)

    def together(self) -> bool:
        """Say whether the rings of all rows stand at the same place."""
        return bool((self.memory.end == self.memory.end[0]).all())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory."""
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a memory."""
        self.memory.load_state_dict(state)


class CarriedStreams:
    """Rows of a model whose memory says all that it knows of what was read, as an LSTM's state does."""

    def __init__(self, model: LanguageModel, batch_size: int, *, precision: Precision) -> None:
        self.model = model
        self.precision: Precision = precision
        self._mems = model.init_mems(batch_size)

    @torch.no_grad()
    def read(self, rows: slice, ids: Tensor) -> Tensor:
        """Read on in some rows."""
        with autocast(self.model.device, self.precision):
            h_BTD, mems = self.model.read(ids, mems=self._mems.select(rows))
        for own, new in zip(self._mems.hidden, mems.hidden, strict=True):
            own[rows] = new
        self._mems.n_valid[rows] = mems.n_valid
        return h_BTD[:, -1].clone()

    @torch.no_grad()
    def step(self, ids: Tensor, active: Tensor | None) -> Tensor:
        """Read one token in the active rows; the others get NaN."""
        with autocast(self.model.device, self.precision):
            h_BTD, mems = self.model.read(ids.unsqueeze(1), mems=self._mems)
        if active is None:
            self._mems = mems
            return h_BTD[:, -1]
        hidden = (torch.where(active[:, None, None], new, own) for new, own in zip(mems.hidden, self._mems.hidden, strict=True))
        self._mems = Mems(tuple(hidden), torch.where(active, mems.n_valid, self._mems.n_valid))
        return h_BTD[:, -1].masked_fill(~active.unsqueeze(1), torch.nan)

    def reset(self, rows: Tensor) -> None:
        """Empty rows."""
        self._mems = self._mems.reset(rows)

    def together(self) -> bool:
        """Any rows can be read at once."""
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory."""
        return self._mems.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a copy of a memory, for reading writes into it."""
        _check_state(state, self.state_dict())
        self._mems = Mems.from_state_dict({name: x.clone() for name, x in state.items()}).to(self.model.device)


class ReadAgain:
    """Rows of models whose tokens cannot be read one by one, because positions count from a segment's end, or without a memory.

    Of each row the segment that is still open is kept, and read again with every token. Segments that are full go to memory as
    in training; without a memory the oldest token is dropped.
    """

    def __init__(self, model: LanguageModel, batch_size: int, *, tgt_len: int, precision: Precision) -> None:
        self.model, self.tgt_len = model, tgt_len
        self.precision: Precision = precision
        self._mems = [model.init_mems(1) for _ in range(batch_size)]
        self._open: list[list[int]] = [[] for _ in range(batch_size)]

    def read(self, rows: slice, ids: Tensor) -> Tensor:
        """Read row by row, in pieces of at most `tgt_len`."""
        index = range(len(self._open))[rows]
        return torch.cat([self._read_row(row, own) for row, own in zip(index, ids.tolist(), strict=True)])

    def step(self, ids: Tensor, active: Tensor | None) -> Tensor:
        """Read one token in the active rows; the others get NaN."""
        reads = [True] * len(self._open) if active is None else active.tolist()
        h_D = [self._read_row(row, [own]) if reads[row] else None for row, own in enumerate(ids.tolist())]
        nothing = torch.full((1, self.model.config.d_model), torch.nan, dtype=self.model.dtype, device=self.model.device)
        return torch.cat([nothing if h is None else h for h in h_D])

    def reset(self, rows: Tensor) -> None:
        """Empty rows."""
        for row in rows.nonzero().flatten().tolist():
            self._mems[row], self._open[row] = self.model.init_mems(1), []

    def together(self) -> bool:
        """Rows are read one after another anyway."""
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Return memory and open segments."""
        state = Mems.concatenate(self._mems).state_dict()
        padded = [own + [-1] * (self.tgt_len - len(own)) for own in self._open]
        return {**state, "open": torch.tensor(padded)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over memory and open segments."""
        _check_state(state, self.state_dict())
        rest = {name: x.to(self.model.device) for name, x in state.items() if name != "open"}
        mems = Mems.from_state_dict(rest)
        self._mems = [mems.select(torch.tensor([row])) for row in range(mems.batch_size)]
        self._open = [[i for i in ids if i >= 0] for ids in state["open"].tolist()]

    @torch.no_grad()
    def _read_row(self, row: int, ids: Sequence[int]) -> Tensor:
        h_1TD = None
        for piece in _pieces(ids, self.tgt_len):
            h_1TD = self._read_piece(row, piece)
        assert h_1TD is not None
        return h_1TD[:, -1]

    def _read_piece(self, row: int, ids: Sequence[int]) -> Tensor:
        own = [*self._open[row], *ids]
        n_closed = max(len(own) - self.tgt_len, 0)
        mems = self._mems[row]
        with autocast(self.model.device, self.precision):
            if n_closed and self.model.mem_len:
                n_closed = self.tgt_len
                _, mems = self.model.read(self._tensor(own[:n_closed]), mems=mems)
            h_1TD = self.model.read(self._tensor(own[n_closed:]), mems=mems)[0]
        self._mems[row], self._open[row] = mems, own[n_closed:]
        return h_1TD

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], device=self.model.device)


def _check_state(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    if {name: (x.shape, x.dtype) for name, x in state.items()} != {name: (x.shape, x.dtype) for name, x in own.items()}:
        raise ValueError("the tensors are not those of rows of this shape")


def _pieces(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(ids), size):
        yield ids[first : first + size]
