"""`Stream`: rows of text that a model reads on, in the way that the model allows.

    KeptKeys      keys and values of past positions stay as they are, so no token is projected twice (`KeyValueMemory`)
    CarriedState  each `read` is a segment, and the model's own memory goes from segment to segment, as in training
    ReadAgain     positions count from the end of what is read, or nothing is remembered: the open segment is read again

Shapes: B rows, b of them that read, T tokens, D d_model.
"""

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from transformer_xl.errors import ConfigError
from transformer_xl.model.call import Rows
from transformer_xl.model.frozen_softmax import FrozenSoftmax
from transformer_xl.model.key_value_memory import KeyValueMemory
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.model.precision import InferencePrecision, Precision, autocast
from transformer_xl.model.reader import Reader
from transformer_xl.model.transformer_xl import TransformerXL

ALL = slice(None)
"""All rows."""


@contextmanager
def scoring(model: LanguageModel) -> Iterator[None]:
    """Put a model in evaluation mode, without gradients, in this block; its mode is restored afterwards.

    Views (`LanguageModel.with_context`) take over the mode of their model when they are made, so make them inside.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class Stream(ABC):
    """Rows of text that a model reads on. What is read comes back as what the softmax is computed of.

    Attributes:
        model: that reads, in evaluation mode; its weights must not change meanwhile.
        tgt_len: longest piece that is read at once.
        precision: of the matrix products.
    """

    model: LanguageModel
    tgt_len: int
    precision: InferencePrecision

    @abstractmethod
    def read(self, ids: Tensor, *, rows: slice = ALL, n_pad: Tensor | None = None) -> Tensor:
        """Read on in some rows.

        Args:
            ids: int64 (b, T), of the vocabulary, which the caller checks.
            rows: the b rows that read.
            n_pad: int64 (b,), padding tokens at the left of each row; only a `CarriedState` can be told.

        Returns:
            States of every token, (b, T, D).
        """

    def advance(self, ids: Tensor, *, rows: slice = ALL) -> Tensor:
        """Read on, in pieces of `tgt_len`, and return the states of the last tokens only, (b, D)."""
        *pieces, last = ids.split(self.tgt_len, dim=1)
        for piece in pieces:
            self.read(piece, rows=rows)
        h_BTD = self.read(last, rows=rows)
        # a view would keep all positions, and other strides than those of a step would have compiled code compiled again
        return h_BTD[:, -1].clone(memory_format=torch.contiguous_format)

    @abstractmethod
    def step(self, ids: Tensor, active: Tensor | None = None) -> Tensor:
        """Read one token in each active row.

        Args:
            ids: int64 (B,).
            active: bool (B,), rows that read; the others remember nothing, and get states of no meaning. None: all.

        Returns:
            States (B, D).
        """

    @cached_property
    def softmax(self) -> FrozenSoftmax:
        """The model's softmax, in the precision of the stream."""
        return FrozenSoftmax(self.model.softmax, self.model.embedding, self.precision)

    @torch.no_grad()
    def head(self, h_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Score the head of the softmax after a step; see `FrozenSoftmax.head`."""
        return self.softmax.head(h_BD)

    @torch.no_grad()
    def nll(self, h_BTD: Tensor, labels: Tensor) -> Tensor:
        """Return the nats of the tokens that follow some states.

        Args:
            h_BTD: states, (b, T, D).
            labels: int64 (b, T), on the same device; -100 is not scored.

        Returns:
            At least fp32 (b, T), 0 where the label is -100.
        """
        return self.softmax.nll(h_BTD.flatten(0, 1), labels.flatten()).view(labels.shape)

    def score(self, ids: Tensor, labels: Tensor, *, n_pad: Tensor | None = None) -> Tensor:
        """Read one segment in all rows, and return the nats of the tokens that follow, as `nll` does.

        Args:
            ids: int64 (B, T), on any device.
            labels: int64 (B, T), on any device; -100 is not scored.
            n_pad: as in `read`.
        """
        h_BTD = self.read(ids.to(self.model.device), n_pad=n_pad)
        if not (labels >= 0).any():
            return h_BTD.new_zeros(labels.shape)
        return self.nll(h_BTD, labels.to(self.model.device))

    @abstractmethod
    def prepend(self, n: int) -> None:
        """Put `n` rows that have read nothing before the others."""

    @abstractmethod
    def reset(self, rows: Tensor) -> None:
        """Let rows, bool (B,), forget; nothing of what they read is left."""

    @abstractmethod
    def together(self) -> bool:
        """Say whether all rows can be read at once."""

    @abstractmethod
    def take(self, row: int) -> dict[str, Tensor]:
        """Return copies of what a row remembers, as named tensors: all that `put` needs, and nothing that is out of sight."""

    @abstractmethod
    def check(self, state: dict[str, Tensor]) -> None:
        """Raise a ValueError unless a state is one that `take` of such a stream returns."""

    @abstractmethod
    def put(self, row: int, state: dict[str, Tensor]) -> None:
        """Let a row forget, and go on from what `take` returned, from whatever row of a stream opened alike.

        Raises:
            ValueError: it is no such state; the row is then as it was.
        """

    @abstractmethod
    def n_rewindable(self, row: int) -> int:
        """Return by how many tokens a row can go back so that the next numbers are those of a row that never read them."""

    @abstractmethod
    def rewind(self, row: int, n: int) -> None:
        """Let a row go back by `n` tokens, at most `n_rewindable`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return what was read as named tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a state, in place; ValueError if it is not one of this stream's, and nothing is taken over then."""


class KeptKeys(Stream):
    """Rows over a `KeyValueMemory`; see `open_stream`.

    Attributes:
        reader: the frozen weights.
        memory: of what was read.
    """

    def __init__(
        self, model: TransformerXL, batch_size: int, *, tgt_len: int, precision: InferencePrecision, window: int | None = None
    ) -> None:
        self.model, self.tgt_len, self.precision = model, tgt_len, precision
        self.reader = Reader(model, tgt_len=tgt_len, precision=precision, window=window)
        self.memory = self.reader.empty_memory(batch_size)

    @property
    def softmax(self) -> FrozenSoftmax:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The reader's."""
        return self.reader.softmax

    def read(self, ids: Tensor, *, rows: slice = ALL, n_pad: Tensor | None = None) -> Tensor:
        """Read in pieces of at most `tgt_len`, rows whose rings stand at the same place."""
        assert n_pad is None, "kept keys have no padding: let rows begin together"
        pieces = [self.reader.read(piece, self.memory, rows=rows) for piece in ids.split(self.tgt_len, dim=1)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def step(self, ids: Tensor, active: Tensor | None = None) -> Tensor:
        """Read one token in fixed shapes; rows may stand anywhere."""
        return self.reader.step(ids, self.memory, active=active)

    def head(self, h_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Score the head, by compiled code if steps are compiled."""
        return self.reader.head(h_BD)

    def prepend(self, n: int) -> None:
        """Put empty rows before the others, at the same place in their rings, so that all can be read at once."""
        empty = self.reader.empty_memory(n)
        empty.end.fill_(int(self.memory.end[0]))  # an empty ring may begin anywhere
        self.memory = KeyValueMemory.concatenate([empty, self.memory])

    def reset(self, rows: Tensor) -> None:
        """Empty rows."""
        self.reader.reset(self.memory, rows)

    def together(self) -> bool:
        """Say whether the rings of all rows stand at the same place."""
        return bool((self.memory.end == self.memory.end[0]).all())

    def take(self, row: int) -> dict[str, Tensor]:
        """Return keys and values (N, n, H) of the last n ≤ mem_len positions, `end` and n as `n_valid`."""
        memory = self.memory
        end, n = int(memory.end[row]), min(int(memory.n_valid[row]), self.reader.mem_len)
        slots = self._slots(end, n)
        keys = {f"keys.{i}": x_NBCH[:, row, slots] for i, x_NBCH in enumerate(memory.keys)}
        values = {f"values.{i}": x_NBHC[:, row][..., slots].transpose(1, 2) for i, x_NBHC in enumerate(memory.values)}
        return {**keys, **values, "end": torch.tensor(end), "n_valid": torch.tensor(n)}

    def check(self, state: dict[str, Tensor]) -> None:
        """Refuse other shapes, and numbers that no stream counts to; they would become indices."""
        own = self.take(0)
        _check_alike(state, own, besides=("keys.", "values."))
        end, n = int(state["end"]), int(state["n_valid"])
        if end < 0 or not 0 <= n <= self.reader.mem_len:
            raise ValueError("its rows have impossible lengths")
        n_head, _, d_head = own["keys.0"].shape
        for name in (name for name in own if name.startswith(("keys.", "values."))):
            check_like(name, state[name], own[name].dtype, (n_head, n, d_head))

    def put(self, row: int, state: dict[str, Tensor]) -> None:
        """Write keys and values to the same places in the ring, because sums are rounded in the order in which keys lie."""
        self.check(state)
        memory, end, n = self.memory, int(state["end"]), int(state["n_valid"])
        memory.reset(torch.arange(memory.batch_size) == row)
        slots = self._slots(end, n)
        for i, (keys, values) in enumerate(zip(memory.keys, memory.values, strict=True)):
            keys[:, row, slots] = state[f"keys.{i}"].to(keys.device)
            values[:, row].index_copy_(2, slots, state[f"values.{i}"].transpose(1, 2).to(values.device))
        memory.end[row], memory.n_valid[row] = end, n

    def n_rewindable(self, row: int) -> int:
        """Return how many tokens lie in the ring beyond those that a token sees; of a young row, all that it has read.

        One slot does not count: a row that sits out a step has its next slot, the oldest of a full ring, written all the same.
        """
        end, n_valid = int(self.memory.end[row]), int(self.memory.n_valid[row])
        intact = min(n_valid, self.reader.n_slot - 1)
        return end if end == intact else max(0, min(end, intact - self.reader.mem_len))

    def rewind(self, row: int, n: int) -> None:
        """Move the end of the row back; what lies beyond is out of every query's sight."""
        self.memory.end[row] -= n
        self.memory.n_valid[row] = min(int(self.memory.n_valid[row]), self.reader.n_slot - 1) - n

    def _slots(self, end: int, n: int) -> Tensor:
        """Return the slots of the last `n` positions, the oldest first."""
        return torch.arange(end - n, end, device=self.memory.end.device) % self.reader.n_slot

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory."""
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a memory."""
        self.memory.load_state_dict(state)


class CarriedState(Stream):
    """Rows that go from segment to segment with the model's own memory; each `read` is one segment, whatever its length.

    For a model whose memory is a state, as an LSTM's, it makes no difference how a text is cut into segments.

    Attributes:
        mems: the memory of all rows.
    """

    def __init__(self, model: LanguageModel, batch_size: int, *, tgt_len: int, precision: Precision) -> None:
        self.model, self.tgt_len = model, tgt_len
        self.precision: Precision = precision  # pyright: ignore[reportIncompatibleVariableOverride]  # never int8
        self.mems = model.init_mems(batch_size)

    @torch.no_grad()
    def read(self, ids: Tensor, *, rows: slice = ALL, n_pad: Tensor | None = None) -> Tensor:
        """Read one segment in some rows."""
        with autocast(self.model.device, self.precision):
            h_BTD, new = self.model.read(ids, mems=self.mems.select(rows), rows=Rows(n_pad=n_pad))
        self._replace(rows, new)
        return h_BTD

    @torch.no_grad()
    def step(self, ids: Tensor, active: Tensor | None = None) -> Tensor:
        """Read one token in the active rows; the others get NaN."""
        with autocast(self.model.device, self.precision):
            h_BTD, mems = self.model.read(ids.unsqueeze(1), mems=self.mems)
        if active is None:
            self.mems = mems
            return h_BTD[:, -1]
        self.mems = mems.where(active, self.mems)
        return h_BTD[:, -1].masked_fill(~active.unsqueeze(1), torch.nan)

    @torch.no_grad()
    def nll(self, h_BTD: Tensor, labels: Tensor) -> Tensor:
        """Return nats as the model itself computes them."""
        with autocast(self.model.device, self.precision):
            return self.model.softmax.nll(h_BTD, labels, self.model.embedding)

    @torch.no_grad()
    def score(self, ids: Tensor, labels: Tensor, *, n_pad: Tensor | None = None) -> Tensor:
        """Read and score in one forward pass of the model, which puts it together first if its weights are in parts (FSDP)."""
        device = self.model.device
        n_pad = None if n_pad is None else n_pad.to(device)
        with autocast(device, self.precision):
            out = self.model(ids.to(device), mems=self.mems, labels=labels.to(device), rows=Rows(n_pad=n_pad))
        self.mems = out.mems
        return out.nll

    def prepend(self, n: int) -> None:
        """Put empty rows before the others."""
        self.mems = type(self.mems).concatenate([self.model.init_mems(n), self.mems])

    def reset(self, rows: Tensor) -> None:
        """Empty rows; of some models, an empty memory holds zeros that are attended to."""
        self.mems = self.model.init_mems(self.mems.batch_size).where(rows, self.mems)

    def together(self) -> bool:
        """Any rows can be read at once."""
        return True

    def take(self, row: int) -> dict[str, Tensor]:
        """Return the memory of the row."""
        return {name: x[0].clone() for name, x in self.mems.select(slice(row, row + 1)).state_dict().items()}

    def check(self, state: dict[str, Tensor]) -> None:
        """Refuse other shapes."""
        _check_memory(state, self.take(0))

    def put(self, row: int, state: dict[str, Tensor]) -> None:
        """Replace the memory of the row."""
        self.check(state)
        self._replace(slice(row, row + 1), _memory_of(self.mems, state, self.model.device))

    def n_rewindable(self, row: int) -> int:
        """Return 0: a state does not tell what it was before."""
        return 0

    def rewind(self, row: int, n: int) -> None:
        """Go back by nothing."""

    def _replace(self, rows: slice, new: Memory) -> None:
        first, last, _ = rows.indices(self.mems.batch_size)
        before, after = self.mems.select(slice(0, first)), self.mems.select(slice(last, None))
        self.mems = type(new).concatenate([before, new, after]) if before.batch_size + after.batch_size else new

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory."""
        return self.mems.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a memory."""
        _check_state(state, self.state_dict())
        self.mems = type(self.mems).from_state_dict(state).to(self.model.device)


class ReadAgain(Stream):
    """Rows of models whose tokens cannot be read one by one, because positions count from a segment's end, or without a memory.

    Of each row the segment that is still open is kept, and read again with every token. Segments that are full go to memory as
    in training; without a memory the oldest token is dropped.
    """

    def __init__(self, model: LanguageModel, batch_size: int, *, tgt_len: int, precision: Precision) -> None:
        self.model, self.tgt_len = model, tgt_len
        self.precision: Precision = precision  # pyright: ignore[reportIncompatibleVariableOverride]  # never int8
        self._mems = [model.init_mems(1) for _ in range(batch_size)]
        self._open: list[list[int]] = [[] for _ in range(batch_size)]

    def read(self, ids: Tensor, *, rows: slice = ALL, n_pad: Tensor | None = None) -> Tensor:
        """Read token by token, because every state is that of the last token of a segment; `advance` is much faster."""
        assert n_pad is None, "rows are read one after another and need no padding"
        return torch.stack([self.advance(ids_B1, rows=rows) for ids_B1 in ids.split(1, dim=1)], dim=1)

    def advance(self, ids: Tensor, *, rows: slice = ALL) -> Tensor:
        """Read row by row, in pieces of at most `tgt_len`."""
        index = range(len(self._open))[rows]
        return torch.cat([self._read_row(row, own) for row, own in zip(index, ids.tolist(), strict=True)])

    def step(self, ids: Tensor, active: Tensor | None = None) -> Tensor:
        """Read one token in the active rows; the others get NaN."""
        reads = [True] * len(self._open) if active is None else active.tolist()
        h_D = [self._read_row(row, [own]) if reads[row] else None for row, own in enumerate(ids.tolist())]
        nothing = torch.full((1, self.model.config.d_model), torch.nan, dtype=self.model.dtype, device=self.model.device)
        return torch.cat([nothing if h is None else h for h in h_D])

    def prepend(self, n: int) -> None:
        """Put empty rows before the others."""
        self._mems = [*(self.model.init_mems(1) for _ in range(n)), *self._mems]
        self._open = [*([] for _ in range(n)), *self._open]

    def reset(self, rows: Tensor) -> None:
        """Empty rows."""
        for row in rows.nonzero().flatten().tolist():
            self._mems[row], self._open[row] = self.model.init_mems(1), []

    def together(self) -> bool:
        """Rows are read one after another anyway."""
        return True

    def take(self, row: int) -> dict[str, Tensor]:
        """Return the memory of the row and its open segment, filled up with -1."""
        memory = {name: x[0].clone() for name, x in self._mems[row].state_dict().items()}
        return {**memory, "open": torch.tensor(self._open[row] + [-1] * (self.tgt_len - len(self._open[row])))}

    def check(self, state: dict[str, Tensor]) -> None:
        """Refuse other shapes, and tokens that do not exist."""
        _check_memory(state, self.take(0))
        if ((state["open"] < -1) | (state["open"] >= (self.model.config.vocab_size or 0))).any():
            raise ValueError("it has token ids outside the vocabulary")

    def put(self, row: int, state: dict[str, Tensor]) -> None:
        """Replace memory and open segment of the row."""
        self.check(state)
        rest = {name: x for name, x in state.items() if name != "open"}
        self._mems[row] = _memory_of(self._mems[row], rest, self.model.device)
        self._open[row] = [i for i in state["open"].tolist() if i >= 0]

    def n_rewindable(self, row: int) -> int:
        """Return how many tokens are open; none where the oldest may have been dropped."""
        n = len(self._open[row])
        return n if self.model.mem_len or n < self.tgt_len else 0

    def rewind(self, row: int, n: int) -> None:
        """Take tokens away from the open segment."""
        self._open[row] = self._open[row][: len(self._open[row]) - n]

    def state_dict(self) -> dict[str, Tensor]:
        """Return memory and open segments."""
        state = type(self._mems[0]).concatenate(self._mems).state_dict()
        padded = [own + [-1] * (self.tgt_len - len(own)) for own in self._open]
        return {**state, "open": torch.tensor(padded)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over memory and open segments."""
        _check_state(state, self.state_dict())
        rest = {name: x.to(self.model.device) for name, x in state.items() if name != "open"}
        mems = type(self._mems[0]).from_state_dict(rest)
        self._mems = [mems.select(torch.tensor([row])) for row in range(mems.batch_size)]
        self._open = [[i for i in ids if i >= 0] for ids in state["open"].tolist()]

    @torch.no_grad()
    def _read_row(self, row: int, ids: Sequence[int]) -> Tensor:
        """Read on in one row, and return the state (1, D) of the last token."""
        *firsts, last = range(0, len(ids), self.tgt_len)
        for first in firsts:
            self._read_piece(row, ids[first : first + self.tgt_len])
        return self._read_piece(row, ids[last:])[:, -1]

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


def _check_alike(state: dict[str, Tensor], own: dict[str, Tensor], *, besides: tuple[str, ...] = ()) -> None:
    """Refuse other names, and other types or shapes of all tensors but those whose names begin so."""
    if state.keys() != own.keys():
        raise ValueError(f"tensors {reprlib.repr(sorted(state.keys() ^ own.keys())[:3])} are missing or unknown")
    for name in (name for name in own if not besides or not name.startswith(besides)):
        check_like(name, state[name], own[name].dtype, own[name].shape)


def check_like(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raise a ValueError, which says what it is, unless a tensor has some type and shape."""
    if x.dtype != dtype or tuple(x.shape) != tuple(shape):
        raise ValueError(f"tensor {name!r} is {x.dtype} {reprlib.repr(tuple(x.shape))} and should be {dtype} {tuple(shape)}")


def _check_memory(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Refuse what is no memory of one row."""
    _check_alike(state, own)
    if "n_valid" in own and not 0 <= int(state["n_valid"]) <= own["hidden.0"].shape[0]:
        raise ValueError("its rows have impossible lengths")


def _memory_of(like: Memory, state: dict[str, Tensor], device: torch.device) -> Memory:
    """Return the memory of one row, copied from its tensors."""
    return type(like).from_state_dict({name: x.unsqueeze(0).to(device, copy=True) for name, x in state.items()})


def open_stream(
    model: LanguageModel, batch_size: int, *, tgt_len: int, precision: InferencePrecision = "fp32", token_by_token: bool = False
) -> Stream:
    """Return rows that have read nothing, in the way that suits a model.

    Args:
        model: as it is to be read (`LanguageModel.with_context`), in evaluation mode.
        batch_size: B, number of rows.
        tgt_len: longest piece read at once.
        precision: of the matrix products, and of keys and values.
        token_by_token: every token sees the `mem_len` tokens before it (with `same_length` the model's window), so it makes no
            difference how a text is cut. False: each `read` is one segment, which sees what segments see in training.

    Raises:
        ConfigError: int8 for a model whose keys cannot be kept.
    """
    # without a memory, what a token sees begins anew with each segment
    if model.keeps_keys and model.ext_len == 0 and not model.is_sharded and (model.mem_len or not token_by_token):
        window = (model.window or model.mem_len + 1) if token_by_token else None
        return KeptKeys(cast(TransformerXL, model), batch_size, tgt_len=tgt_len, precision=precision, window=window)
    if precision == "int8":
        raise ConfigError(
            f"precision int8 needs keys that stay the same; with {model.config.reads_by}, mem_len ({model.mem_len}) and "
            f"ext_len ({model.ext_len}) they do not: use bf16 or fp32"
        )
    if token_by_token and not model.carries_state:
        return ReadAgain(model, batch_size, tgt_len=tgt_len, precision=precision)
    return CarriedState(model, batch_size, tgt_len=tgt_len, precision=precision)
