"""`Stream`: rows of text, each continued in the fastest way that the model supports.

    KeptKeys      keys and values of past positions stay as they are, so no token is projected twice (`KeyValueMemory`)
    CarriedState  each `read` is a segment, and the model's own memory goes from segment to segment, as in training
    ReadAgain     positions count from a segment's end, or there is no memory: the open segment is read again

Shapes: B rows, b of them that read, T tokens, D d_model.
"""

import reprlib
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor

from transformer_xl.batch import Rows
from transformer_xl.errors import ConfigError, CorpusError, counted
from transformer_xl.inference.buffer import KeyValueMemory, count_slots, slot_of
from transformer_xl.inference.reader import Reader
from transformer_xl.inference.softmax import FrozenSoftmax
from transformer_xl.kernels.device import InferencePrecision, Precision, activation_dtype, autocast
from transformer_xl.kernels.graphs import Compute, Graphs, Readback, sent
from transformer_xl.model.base import LanguageModel, SequenceModel
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Memory
from transformer_xl.model.room import check_room
from transformer_xl.model.softmax import check_ids
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.segments import Cut

ALL = slice(None)
"""All rows."""


def stream_ids(token_ids: np.ndarray | Tensor, model: LanguageModel, what: str) -> np.ndarray:
    """Return ids (N,) of the model's vocabulary, N ≥ 2."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise ValueError(f"token_ids, {ids.dtype} {ids.shape}, must be integers of shape (N,)")
    if len(ids) < 2:
        raise CorpusError(f"the {what} has {counted(len(ids), 'token')}; at least 2 are needed: nothing predicts the first")
    check_ids(ids, vocab_size=model.vocab_size)
    return ids


@contextmanager
def scoring(model: SequenceModel) -> Iterator[None]:
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


def _n_late(device: torch.device) -> int:
    """Return how many segments are computed while the host waits for the nats of the one before: a GPU always has work."""
    return 1 if device.type == "cuda" else 0


def in_order(segments: Iterable[Cut], score: Callable[[Cut], Tensor], device: torch.device) -> Iterator[tuple[Cut, Tensor]]:
    """Yield each segment with its numbers on the CPU, on a GPU while it computes the next ones."""
    late: deque[tuple[Cut, Readback]] = deque()
    for segment in segments:
        late.append((segment, Readback(score(segment))))
        if len(late) > _n_late(device):
            first, numbers = late.popleft()
            yield first, numbers.tensor
    yield from ((segment, numbers.tensor) for segment, numbers in late)


class Stream(ABC):
    """Rows of text that a model goes on reading; reading returns the hidden states that the softmax needs.

    The model must be in evaluation mode; when its weights have changed, call `refresh`. No piece longer than `tgt_len` is read
    at once.
    """

    model: LanguageModel
    tgt_len: int
    precision: InferencePrecision
    pads_left = False
    """Whether rows of different lengths are read at once, padded at the left."""
    by_position: tuple[str, ...] = ()
    """Names of tensors of `take` whose shape is (X, n, Y), where n is the row's `n_valid`; other shapes are fixed."""

    @abstractmethod
    def read(self, ids: Tensor, *, rows: slice = ALL, n_pad: Tensor | None = None) -> Tensor:
        """Read ids (b, T), which the caller has checked, in b rows, and return the states (b, T, D) of every token.

        `n_pad` (b,) counts padding tokens at the left of each row; only `CarriedState` accepts it.
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
    def step(self, ids: Tensor, active: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        """Read one token (B,) in each row that is active, bool (B,), and return states (B, D).

        Rows that are not active stay as they are, and return their states of `last` (B, D); without it, their
        states mean nothing. None: all are active.
        """

    @cached_property
    def softmax(self) -> FrozenSoftmax:
        """The model's softmax, in the precision of the stream."""
        return FrozenSoftmax(self.model.softmax, self.model.embedding, self.precision)

    def refresh(self) -> None:
        """Read on with weights that have changed since the last reading; what was read stays as it was remembered."""
        vars(self).pop("softmax", None)

    @torch.no_grad()
    def head(self, h_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Score the head of the softmax after a step; see `FrozenSoftmax.head`."""
        return self.softmax.head(h_BD)

    @torch.no_grad()
    def nll(self, h_BTD: Tensor, labels: Tensor) -> Tensor:
        """Return the nats, at least fp32 (b, T), of the labels (b, T) that follow the states; 0 where a label is -100."""
        return self.softmax.nll(h_BTD.flatten(0, 1), labels.flatten()).view(labels.shape)

    def score(self, ids: Tensor, labels: Tensor, *, n_pad: Tensor | None = None) -> Tensor:
        """Read one segment (B, T) in all rows, and return the nats of its labels, as `nll` does; on any device.

        Ids and labels are on the CPU. A device may still be computing the nats when this returns.
        """
        return self.read_and_score(ids, labels, n_pad=n_pad)[1]

    def read_and_score(self, ids: Tensor, labels: Tensor, *, n_pad: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Read one segment (B, T) in all rows, and return its states (B, T, D) and the nats of its labels; see `score`."""
        device = self.model.device
        h_BTD = self.read(ids.to(device), n_pad=None if n_pad is None else n_pad.to(device))
        return h_BTD, self.nll(h_BTD, labels.to(device)) if (labels >= 0).any() else h_BTD.new_zeros(labels.shape)

    @torch.no_grad()
    def score_at(self, ids: Tensor, labels: Tensor, temperatures: Sequence[float], *, n_pad: Tensor | None = None) -> Tensor:
        """Read one segment (B, T) in all rows, and return the nats (K, B, T) of its labels at K temperatures."""
        device = self.model.device
        h_BTD = self.read(ids.to(device), n_pad=None if n_pad is None else n_pad.to(device))
        return self.softmax.nll_at(h_BTD.flatten(0, 1), labels.to(device).flatten(), temperatures).unflatten(1, labels.shape)

    def prepend(self, n: int) -> None:
        """Put `n` rows that have read nothing before the others, so that all can be read at once."""
        raise NotImplementedError("only streams that read segments score lanes")

    @abstractmethod
    def reset(self, rows: Tensor) -> None:
        """Let rows, bool (B,), forget; nothing of what they read is left."""

    def together(self) -> bool:
        """Return whether all rows can be read at once."""
        return True

    @abstractmethod
    def take(self, row: int) -> dict[str, Tensor]:
        """Return copies of what a row remembers, as named tensors: only what later tokens can see."""

    @abstractmethod
    def check(self, state: dict[str, Tensor]) -> None:
        """Raise a ValueError unless a state is one that `take` of such a stream returns."""

    @abstractmethod
    def put(self, row: int, state: dict[str, Tensor]) -> None:
        """Let a row forget, and go on from what `take` returned for any row of a stream with the same settings; see `check`."""

    @abstractmethod
    def reorder(self, sources: Tensor) -> None:
        """Let each row go on from what another has read, int64 (B,), its number; a row may be asked for several times."""

    def n_rewindable(self, row: int) -> int:
        """Return by how many tokens a row can go back, so that it reads on as if it had never read them."""
        return 0

    def rewind(self, row: int, n: int) -> None:
        """Let a row go back by `n` tokens, at most `n_rewindable`."""
        assert n == 0, "n_rewindable is 0"


_NO_PADDING = "kept keys allow no padding; start all rows together"


class KeptKeys(Stream):
    """Rows over a `KeyValueMemory`, which a `Reader` reads with frozen weights.

    On a GPU `score` and `score_at` launch what they do with a segment as one graph, from the second segment of a shape on.
    """

    def __init__(
        self, model: TransformerXL, batch_size: int, *, tgt_len: int, precision: InferencePrecision, window: int | None = None
    ) -> None:
        self.model, self.tgt_len, self.precision = model, tgt_len, precision
        n_slot = count_slots(mem_len=model.mem_len, window=window, tgt_len=tgt_len)
        n_row = (batch_size + 1) * model.config.numbers_per_position + model.config.n_head * tgt_len
        check_room(
            n_slot * n_row * activation_dtype(precision, model.dtype).itemsize,
            model.device,
            f"reading with mem_len {model.mem_len:,}, tgt_len {tgt_len:,} and batch_size {batch_size:,}",
        )
        self._window = window
        self._graphs = _graphs(model.device)
        self.refresh()
        self.memory = self.reader.empty_memory(batch_size)
        self._oldest = [0] * batch_size  # per row, the first position before which rings of inputs and tokens know nothing more
        self.by_position = tuple(f"{name}.{i}" for name in ("keys", "values") for i in range(len(self.memory.keys)))

    @property
    def softmax(self) -> FrozenSoftmax:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.reader.softmax

    def refresh(self) -> None:
        model = cast(TransformerXL, self.model)
        self.reader = Reader(model, tgt_len=self.tgt_len, precision=self.precision, window=self._window)
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    @torch.no_grad()
    def score(self, ids: Tensor, labels: Tensor, *, n_pad: Tensor | None = None) -> Tensor:
        if self._graphs is None:
            return super().score(ids, labels, n_pad=n_pad)
        assert n_pad is None, _NO_PADDING
        self.softmax.check(labels)
        is_scored = bool((labels >= 0).any())
        if self.softmax.has_tails or not is_scored:  # tails, chosen by labels, are not part of a graph
            h_BTD = self._launch("read", lambda places: self.read(places[0]), ids)
            flat = h_BTD.flatten(0, 1), labels.flatten()
            return self.softmax.nll(*flat, checked=True).view(labels.shape) if is_scored else h_BTD.new_zeros(labels.shape)

        def compute(places: Sequence[Tensor]) -> Tensor:
            h_BTD = self.read(places[0])
            return self.softmax.nll(h_BTD.flatten(0, 1), places[1].flatten(), checked=True).view(labels.shape)

        return self._launch("score", compute, ids, labels)

    @torch.no_grad()
    def score_at(self, ids: Tensor, labels: Tensor, temperatures: Sequence[float], *, n_pad: Tensor | None = None) -> Tensor:
        if self._graphs is None:
            return super().score_at(ids, labels, temperatures, n_pad=n_pad)
        assert n_pad is None, _NO_PADDING
        self.softmax.check(labels)

        def compute(places: Sequence[Tensor]) -> Tensor:
            h_BTD = self.read(places[0])
            nats_KX = self.softmax.nll_at(h_BTD.flatten(0, 1), places[1].flatten(), temperatures, checked=True)
            return nats_KX.unflatten(1, labels.shape)

        return self._launch(("score", *temperatures), compute, ids, labels)

    def _launch(self, what: Hashable, compute: Compute, *inputs: Tensor) -> Tensor:
        assert self._graphs is not None
        there = [sent(x, self.model.device) for x in inputs]
        had_problem = self._graphs.problem
        found = self._graphs.launch((what, inputs[0].shape), compute, there)
        if self._graphs.problem and not had_problem:
            warnings.warn(
                f"segments are launched kernel by kernel, because a graph fails: {self._graphs.problem}", stacklevel=2
            )
        return found

    def read(self, ids: Tensor, *, rows: slice = ALL, n_pad: Tensor | None = None) -> Tensor:
        assert n_pad is None, _NO_PADDING
        pieces = [self.reader.read(piece, self.memory, rows=rows) for piece in ids.split(self.tgt_len, dim=1)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def step(self, ids: Tensor, active: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        return self.reader.step(ids, self.memory, active=active, last=last)

    def head(self, h_BD: Tensor) -> tuple[Tensor, Tensor]:
        return self.reader.head(h_BD)

    def prepend(self, n: int) -> None:
        end = int(self.memory.end[0])
        empty = self.reader.empty_memory(n, end=end)
        self._oldest = [end] * n + self._oldest
        self.memory = KeyValueMemory.concatenate([empty, self.memory])
        self._forget_graphs()  # which write to the old one

    def reset(self, rows: Tensor) -> None:
        self.reader.reset(self.memory, rows)
        self._oldest = [0 if emptied else oldest for emptied, oldest in zip(rows.tolist(), self._oldest, strict=True)]

    def together(self) -> bool:
        return bool((self.memory.end == self.memory.end[0]).all())

    def take(self, row: int) -> dict[str, Tensor]:
        # keys and values (N, n, H) of the last n ≤ mem_len positions; with a shift, inputs (k, D) of the layers at the last k
        # positions, 0 where there were none; with n-grams, the last tokens (K)
        memory = self.memory
        end, n = int(memory.end[row]), min(int(memory.n_valid[row]), self.reader.mem_len)
        slots = self._slots(end, n)
        keys = {f"keys.{i}": x_NBCH[:, row, slots] for i, x_NBCH in enumerate(memory.keys)}
        values = {f"values.{i}": x_NBHC[:, row][..., slots].transpose(1, 2) for i, x_NBHC in enumerate(memory.values)}
        own, before = slice(row, row + 1), self.reader.n_before
        layers = range(len(memory.keys) if before else 0)
        rings = {f"inputs.{i}": memory.last(memory.inputs[i], own, before)[0] for i in layers}
        if n_earlier := self.model.config.n_earlier:
            rings["tokens"] = memory.last(memory.tokens, own, n_earlier)[0]
        return {**keys, **values, **rings, "end": torch.tensor(end), "n_valid": torch.tensor(n)}

    def check(self, state: dict[str, Tensor]) -> None:
        own = self.take(0)
        check_names(state, own)
        for name in ("end", "n_valid"):
            check_like(name, state[name], own[name].dtype, ())
        end, n = int(state["end"]), int(state["n_valid"])
        if end < 0 or not 0 <= n <= self.reader.mem_len:
            raise ValueError("its rows have impossible lengths")
        for name, x in own.items():
            check_like(name, state[name], x.dtype, (x.shape[0], n, x.shape[2]) if name in self.by_position else x.shape)

    def put(self, row: int, state: dict[str, Tensor]) -> None:
        memory, end, n = self.memory, int(state["end"]), int(state["n_valid"])
        memory.reset(torch.arange(memory.batch_size) == row)
        slots = self._slots(end, n)  # the same as they had, because sums are rounded in the order in which keys lie
        for i, (keys, values) in enumerate(zip(memory.keys, memory.values, strict=True)):
            keys[:, row, slots] = state[f"keys.{i}"].to(keys.device)
            values[:, row].index_copy_(2, slots, state[f"values.{i}"].transpose(1, 2).to(values.device))
        memory.n_valid[row] = n
        for name, ring in memory.state_dict().items():
            if name.startswith(("inputs.", "tokens")):
                last = state[name].unsqueeze(0).to(ring.device)
                memory.end[row] = end - last.shape[1]
                memory.keep(ring, slice(row, row + 1), last)
        memory.end[row] = self._oldest[row] = end

    def reorder(self, sources: Tensor) -> None:
        self.memory.reorder(sources.to(self.memory.end.device))
        self._oldest = [self._oldest[row] for row in sources.tolist()]

    def n_rewindable(self, row: int) -> int:
        # The ring holds n_slot positions, and the next token needs mem_len of them; the rest is how far a row can go back. One
        # slot does not count, because a step writes the next slot, the oldest one of a full ring, even in rows that are not
        # active. A young row, whose ring still holds all that it has read, can go back to its beginning. With zeros before the
        # text, all positions are valid from the start, so n_valid does not tell a young row. The rings of inputs (shift) and
        # tokens (n-grams) are shorter, and limit young rows, too: to `_in_rings` tokens, and not behind `_oldest`
        end, n_valid = int(self.memory.end[row]), int(self.memory.n_valid[row])
        intact, mem_len = min(n_valid, self.reader.n_slot - 1), self.reader.mem_len
        is_young = end == intact and not self.model.config.begins_with_zeros
        n = end if is_young else max(0, min(end, intact - mem_len))
        has_rings = self.reader.n_before or self.model.config.n_earlier
        return min(n, self._in_rings, int(self.memory.end[row]) - self._oldest[row]) if has_rings else n

    @property
    def _in_rings(self) -> int:
        """By how many tokens rings of inputs and tokens reach back farther than reading on needs."""
        return self.reader.n_slot - self.reader.mem_len

    def rewind(self, row: int, n: int) -> None:
        self._oldest[row] = max(self._oldest[row], int(self.memory.end[row]) - self._in_rings)
        self.memory.end[row] -= n
        self.memory.n_valid[row] = min(int(self.memory.n_valid[row]), self.reader.n_slot - 1) - n

    def _slots(self, end: int, n: int) -> Tensor:
        """Return the slots of the last `n` positions, the oldest first."""
        return slot_of(torch.arange(end - n, end, device=self.memory.end.device), self.reader.n_slot)


class CarriedState(Stream):
    """Rows that go from segment to segment with the model's own memory, `mems`; each `read` is one segment of any length.

    For a model whose memory is a state, such as an LSTM, it makes no difference how a text is cut into segments.
    """

    pads_left = True

    def __init__(
        self, model: LanguageModel, batch_size: int, *, tgt_len: int, precision: Precision, execution: Execution = Execution()
    ) -> None:
        self.model, self.tgt_len = model, tgt_len
        self.precision: Precision = precision  # pyright: ignore[reportIncompatibleVariableOverride]  # never int8
        self.execution = execution
        self.mems = model.init_mems(batch_size)

    @torch.no_grad()
    def read(self, ids: Tensor, *, rows: slice = ALL, n_pad: Tensor | None = None) -> Tensor:
        with autocast(self.model.device, self.precision):
            h_BTD, new = self.model.read(ids, mems=self.mems.select(rows), rows=Rows(n_pad=n_pad), execution=self.execution)
        self._replace(rows, new)
        return h_BTD

    @torch.no_grad()
    def step(self, ids: Tensor, active: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        with autocast(self.model.device, self.precision):
            h_BTD, mems = self.model.read(ids.unsqueeze(1), mems=self.mems, execution=self.execution)
        self.mems = mems if active is None else mems.where(active, self.mems)
        h_BD = h_BTD[:, -1]
        if active is None or last is None:
            return h_BD
        return torch.where(active.to(h_BD.device).unsqueeze(1), h_BD, last)

    @torch.no_grad()
    def nll(self, h_BTD: Tensor, labels: Tensor) -> Tensor:
        with autocast(self.model.device, self.precision):
            return self.model.softmax.nll(h_BTD, labels, self.model.embedding)

    @torch.no_grad()
    def score(self, ids: Tensor, labels: Tensor, *, n_pad: Tensor | None = None) -> Tensor:
        device = self.model.device
        n_pad = None if n_pad is None else n_pad.to(device)
        with autocast(device, self.precision):  # one forward pass of the model, because that gathers weights in parts (FSDP)
            out = self.model(
                ids.to(device), mems=self.mems, labels=labels.to(device), rows=Rows(n_pad=n_pad), execution=self.execution
            )
        self.mems = out.mems
        return out.nll

    def prepend(self, n: int) -> None:
        self.mems = type(self.mems).concatenate([self.model.init_mems(n), self.mems])

    def reset(self, rows: Tensor) -> None:
        self.mems = self.model.init_mems(self.mems.batch_size).where(rows, self.mems)

    def take(self, row: int) -> dict[str, Tensor]:
        return {name: x[0].clone() for name, x in self.mems.select(slice(row, row + 1)).state_dict().items()}

    def check(self, state: dict[str, Tensor]) -> None:
        _check_memory(state, self.take(0), self.mems)

    def put(self, row: int, state: dict[str, Tensor]) -> None:
        self._replace(slice(row, row + 1), _memory_of(self.mems, state, self.model.device))

    def reorder(self, sources: Tensor) -> None:
        self.mems = self.mems.select(sources.to(self.model.device))

    def _replace(self, rows: slice, new: Memory) -> None:
        first, last, _ = rows.indices(self.mems.batch_size)
        before, after = self.mems.select(slice(0, first)), self.mems.select(slice(last, None))
        self.mems = type(new).concatenate([before, new, after]) if before.batch_size + after.batch_size else new


class ReadAgain(Stream):
    """Rows of models whose tokens cannot be read one by one: positions count from a segment's end, or there is no memory.

    Each row keeps its open segment and reads it again with every token. Full segments go to memory as in training; without
    a memory, the row drops its oldest token.
    """

    def __init__(self, model: LanguageModel, batch_size: int, *, tgt_len: int, precision: Precision) -> None:
        self.model, self.tgt_len = model, tgt_len
        self.precision: Precision = precision  # pyright: ignore[reportIncompatibleVariableOverride]  # never int8
        self._mems = [model.init_mems(1) for _ in range(batch_size)]
        self._open: list[list[int]] = [[] for _ in range(batch_size)]

    def read(self, ids: Tensor, *, rows: slice = ALL, n_pad: Tensor | None = None) -> Tensor:
        assert n_pad is None, "rows are read one after another and need no padding"
        # token by token, because only the state of a segment's last token is right; `advance` is much faster
        return torch.stack([self.advance(ids_B1, rows=rows) for ids_B1 in ids.split(1, dim=1)], dim=1)

    def advance(self, ids: Tensor, *, rows: slice = ALL) -> Tensor:
        index = range(len(self._open))[rows]
        return torch.cat([self._read_row(row, own) for row, own in zip(index, ids.tolist(), strict=True)])

    def step(self, ids: Tensor, active: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        shape = (len(self._open), self.model.config.d_model)
        h_BD = torch.full(shape, torch.nan, dtype=self.model.dtype, device=self.model.device) if last is None else last.clone()
        for row, own in enumerate(ids.tolist()):
            if active is None or active[row]:
                h_BD[row] = self._read_row(row, [own])[0]
        return h_BD

    def reset(self, rows: Tensor) -> None:
        for row in rows.nonzero().flatten().tolist():
            self._mems[row], self._open[row] = self.model.init_mems(1), []

    def take(self, row: int) -> dict[str, Tensor]:
        memory = {name: x[0].clone() for name, x in self._mems[row].state_dict().items()}
        if "open" in memory:
            raise ValueError("a tensor of the model's memory cannot be called 'open'; give it another name")
        return {**memory, "open": torch.tensor(self._open[row] + [-1] * (self.tgt_len - len(self._open[row])))}

    def check(self, state: dict[str, Tensor]) -> None:
        _check_memory(state, self.take(0), self._mems[0])
        if ((state["open"] < -1) | (state["open"] >= self.model.vocab_size)).any():
            raise ValueError("it has token ids outside the vocabulary")

    def put(self, row: int, state: dict[str, Tensor]) -> None:
        self._mems[row] = _memory_of(self._mems[row], state, self.model.device)
        self._open[row] = [i for i in state["open"].tolist() if i >= 0]

    def reorder(self, sources: Tensor) -> None:
        self._mems = [self._mems[row] for row in sources.tolist()]  # shared: they are replaced and never changed
        self._open = [self._open[row] for row in sources.tolist()]

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


def _graphs(device: torch.device) -> Graphs | None:
    """Return what launches segments as graphs; None: the device has none."""
    return Graphs(device) if device.type == "cuda" else None


def check_names(state: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Raise a ValueError unless two states have the same names."""
    if state.keys() != own.keys():
        raise ValueError(f"tensors {reprlib.repr(sorted(state.keys() ^ own.keys())[:3])} are missing or unknown")


def check_like(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raise a ValueError unless a tensor has this type and shape."""
    if x.dtype != dtype or tuple(x.shape) != tuple(shape):
        raise ValueError(f"tensor {name!r} is {x.dtype} {reprlib.repr(tuple(x.shape))} and should be {dtype} {tuple(shape)}")


def check_alike(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless two states have the same names, types and shapes."""
    check_names(state, own)
    for name, x in own.items():
        check_like(name, state[name], x.dtype, x.shape)


def _check_memory(state: dict[str, Tensor], own: dict[str, Tensor], memory: Memory) -> None:
    """Refuse what is not the memory of one row."""
    check_alike(state, own)
    _memory_of(memory, state, torch.device("cpu")).check_values()


def _memory_of(like: Memory, state: dict[str, Tensor], device: torch.device) -> Memory:
    """Return the memory of one row, copied from its tensors; others, such as an open segment, are left out."""
    own = {name: state[name].unsqueeze(0).to(device, copy=True) for name in like.state_dict()}
    return type(like).from_state_dict(own)


def open_stream(
    model: LanguageModel,
    batch_size: int,
    *,
    tgt_len: int,
    precision: InferencePrecision = "fp32",
    token_by_token: bool = False,
    execution: Execution = Execution(),
) -> Stream:
    """Return rows that have read nothing, in the way that suits a model; ConfigError for int8 if its keys cannot be kept.

    With `token_by_token` every token sees the `mem_len` tokens before it (with `same_length` the model's window), so it makes
    no difference how a text is cut. Without it, each `read` is one segment, which sees what segments see in training.
    """
    # without a memory, a token sees only its own segment
    if model.keeps_keys and model.ext_len == 0 and not model.is_sharded and (model.mem_len or not token_by_token):
        window = (model.window or model.mem_len + 1) if token_by_token else None
        return KeptKeys(cast(TransformerXL, model), batch_size, tgt_len=tgt_len, precision=precision, window=window)
    if precision == "int8":
        why = model.described
        if model.keeps_keys:
            why = f"ext_len ({model.ext_len})" if model.ext_len else f"mem_len ({model.mem_len}) or sharding"
        raise ConfigError(f"precision int8 needs keys that stay the same, which {why} does not allow; use bf16 or fp32")
    if token_by_token and not model.carries_state:
        return ReadAgain(model, batch_size, tgt_len=tgt_len, precision=precision)
    return CarriedState(model, batch_size, tgt_len=tgt_len, precision=precision, execution=execution)
