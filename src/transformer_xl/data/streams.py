"""Token ids as parallel lanes of consecutive segments.

The ids are cut into `batch_size` contiguous lanes of equal length. In each step, every lane moves on by `tgt_len` tokens, so
that a model's memory of a lane is exactly the text before its next segment:

    ids   0 1 2 3 4 5 6 7 8 9 10 11 12        batch_size 2, tgt_len 3
    lane 0:  segment 0 = 0 1 2   labels 1 2 3      segment 1 = 3 4 5     labels 4 5 6
    lane 1:  segment 0 = 6 7 8   labels 7 8 9      segment 1 = 9 10 11   labels 10 11 12

Each lane has n = (len(ids) - 1) // batch_size tokens. The last n % tgt_len tokens of each lane, and fewer than batch_size
tokens at the very end, are not read.

A stream may leave out questions: then a label is -100 unless a separator stands before it in its document, so that only answers
are learned from. Whether one does is looked up in the text, so that every place can be gone to.

If documents are shuffled, each epoch cuts another text into lanes: the documents one after another in a new random order.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch

from transformer_xl.batch import NOT_SCORED, Batch, Rows
from transformer_xl.data.order import ORDER, PlainText, Shuffle, ShuffledText
from transformer_xl.errors import ConfigError, CorpusError, counted

_LOOK_BACK = 64  # tokens; a sentence usually has fewer


class EndlessStream(ABC):
    """The place of an endless stream, epoch after epoch; a subclass says what a step reads there.

    Places are counted in units: tokens of a lane, where a segment may be cut, and else whole segments.

    With W processes, rank r reads rows r·B/W … (r+1)·B/W - 1 of the B rows of a step. So all processes together read the same
    rows in the same order for every W.
    """

    _resumed_with = "the same corpus, train.batch_size, train.tgt_len, train.seed and data.shuffle"
    _unit = 1
    """Units of a segment."""

    is_even = False
    """Whether all processes read equally many tokens in a step and learn from equally many, and these numbers follow from the
    lengths of the segments alone. Then they need not ask each other."""

    def __init__(self, *, batch_size: int, rank: int, world_size: int) -> None:
        if batch_size % world_size:
            above = -(-batch_size // world_size) * world_size
            near = f"{above - world_size} or {above}" if above > world_size else str(above)
            raise ConfigError(
                f"world_size ({world_size}) must divide train.batch_size ({batch_size}), because all processes read equally "
                f"many lanes; use train.batch_size={near}"
            )
        self._batch_size = batch_size
        n_rows = batch_size // world_size
        self._rows = range(rank * n_rows, (rank + 1) * n_rows)  # of this process
        self._epoch = self._n_read = 0

    @property
    @abstractmethod
    def segments_per_epoch(self) -> int:
        """Steps of one epoch."""

    @property
    def epoch(self) -> int:
        """Epochs completed before the next segment."""
        return self._epoch

    @property
    def position(self) -> int:
        """Index in its epoch of the segment that comes next, or is read in part."""
        return self._n_read // self._unit

    @property
    def starts_epoch(self) -> bool:
        """True if the next segment is the first of an epoch, so that memory of earlier text does not belong to it."""
        return self._n_read == 0

    @property
    def epochs(self) -> float:
        """Passes through the text, with a fraction for the present one."""
        segments, rest = divmod(self._n_read, self._unit)
        return self._epoch + (segments + rest / self._unit) / self.segments_per_epoch

    @abstractmethod
    def read(self, tgt_len: int | None = None) -> Batch:
        """Return the next segment; of `tgt_len` tokens, where segments may be cut, or fewer where an epoch ends."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self.read()

    def _move_on(self, n_unit: int = 1) -> None:
        n_read = self._n_read + n_unit
        self._go_to(*((self._epoch, n_read) if n_read < self._units else (self._epoch + 1, 0)))

    def _go_to(self, epoch: int, n_read: int) -> None:
        self._epoch, self._n_read = epoch, n_read

    @property
    def _units(self) -> int:
        """Units of an epoch."""
        return self.segments_per_epoch * self._unit

    def state_dict(self) -> dict[str, int | str]:
        """Return the position and its layout as plain values."""
        return {"epoch": self._epoch, "read": self._n_read, **self._layout()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state_dict` returned, for any world size.

        Raises:
            ConfigError: the state belongs to another text or layout, or is damaged.
        """
        layout = self._layout()
        for name in layout | dict(state):
            if name not in ("epoch", "read") and state.get(name) != layout.get(name):
                raise ConfigError(
                    f"saved position belongs to {name} {state.get(name)}, not {layout.get(name)}; "
                    f"resume with {'that version of numpy' if name == 'order' else self._resumed_with}"
                )
        epoch, n_read = state.get("epoch", -1), state.get("read", -1)
        if epoch >= 0:
            self._go_to(epoch, n_read)  # first, because epochs may have different numbers of units
        if epoch < 0 or not 0 <= n_read < self._units:
            raise ConfigError(
                f"saved position (epoch {epoch}, segment {n_read / self._unit:g}) lies outside the text of "
                f"{self.segments_per_epoch} segments; restore an older checkpoint"
            )

    @abstractmethod
    def _layout(self) -> dict[str, int | str]:
        """Return what a saved position must fit."""


class LaneStream(EndlessStream):
    """A stream over the lanes of a text."""

    def __init__(
        self,
        ids: np.ndarray,
        *,
        batch_size: int,
        tgt_len: int,
        document_starts: np.ndarray | None,
        rank: int,
        world_size: int,
        shuffle: Shuffle,
        seed: int,
    ) -> None:
        super().__init__(batch_size=batch_size, rank=rank, world_size=world_size)
        self._ids = ids
        self._starts = np.asarray([] if document_starts is None else document_starts, np.int64)
        self._tgt_len = tgt_len
        self._shuffle: Shuffle = shuffle
        self._seed = seed
        self._text: PlainText | ShuffledText | None = None  # of this epoch, made by its first step

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, in all lanes of all processes together."""
        return self._batch_size * self._tgt_len

    def _epoch_text(self) -> PlainText | ShuffledText:
        if self._text is None:
            if self._shuffle == "none":
                self._text = PlainText(self._ids, self._starts)
            else:
                self._text = ShuffledText(self._ids, self._starts, key=(self._seed, self._epoch))
        return self._text

    def _go_to(self, epoch: int, n_read: int) -> None:
        if epoch != self._epoch and self._shuffle != "none":
            self._text = None
        super()._go_to(epoch, n_read)

    def _layout(self) -> dict[str, int | str]:
        layout: dict[str, int | str] = {
            "batch_size": self._batch_size,
            "tgt_len": self._tgt_len,
            "n_tokens": len(self._ids),
            "shuffle": self._shuffle,
        }
        if self._shuffle == "none":
            return layout
        return layout | {"seed": self._seed, "n_documents": len(self._starts), "order": ORDER}


class SegmentStream(LaneStream):
    """Endless iterator over the segments of a text, epoch after epoch.

    Args:
        ids: shape (n_tokens,), any integer type; may be memory-mapped, because only one segment at a time is copied.
        batch_size: lanes in all processes together, B.
        tgt_len: tokens per segment and lane, T.
        document_starts: token offsets in `ids` at which documents start, increasing.
        rank: index of this process.
        world_size: number of processes, W.
        shuffle: none: the text as stored; documents: documents in a new random order in each epoch.
        seed: seed of the random orders.
        separator: id after which a document's answer begins, which alone is learned from; None: all is.
        later_half: only the later half of each segment is learned from.
        resets: the rows say where documents begin, so that a document sees nothing from before it.

    Example:
        >>> stream = SegmentStream(np.arange(13), batch_size=2, tgt_len=3)
        >>> next(stream).ids.tolist()
        [[0, 1, 2], [6, 7, 8]]
        >>> next(stream).labels.tolist()
        [[4, 5, 6], [10, 11, 12]]
        >>> stream.epoch, stream.starts_epoch
        (1, True)
    """

    def __init__(
        self,
        ids: np.ndarray,
        *,
        batch_size: int,
        tgt_len: int,
        document_starts: np.ndarray | None = None,
        rank: int = 0,
        world_size: int = 1,
        shuffle: Shuffle = "none",
        seed: int = 0,
        separator: int | None = None,
        later_half: bool = False,
        resets: bool = False,
    ) -> None:
        super().__init__(
            ids,
            batch_size=batch_size,
            tgt_len=tgt_len,
            document_starts=document_starts,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=seed,
        )
        self._separator, self._later_half, self._resets = separator, later_half, resets
        self._unit, self.is_even = tgt_len, separator is None
        self._lane_len = (len(ids) - 1) // batch_size
        if self._lane_len < tgt_len:
            raise CorpusError(
                f"text too short: the training split has {counted(len(ids), 'token')}, and "
                f"{batch_size * tgt_len + 1:,} are needed, for train.batch_size ({batch_size}) pieces of train.tgt_len "
                f"({tgt_len}); give more text, or lower these two"
            )

    @property
    def segments_per_epoch(self) -> int:
        return self._lane_len // self._tgt_len

    def read(self, tgt_len: int | None = None) -> Batch:
        n_token = min(tgt_len or self._tgt_len, self._units - self._n_read)
        tokens = np.empty((len(self._rows), n_token + 1), np.int64)
        documents = np.zeros((len(self._rows), n_token), bool)
        learned = np.ones((len(self._rows), n_token), bool)
        text = self._epoch_text()
        for lane, row in enumerate(self._rows):
            begin = row * self._lane_len + self._n_read
            tokens[lane], places = text.read(begin, begin + n_token + 1)
            documents[lane, places[places < n_token]] = True
            if self._separator is not None:
                learned[lane] = _in_answers(text, begin, begin + n_token, self._separator)
        if self._later_half:
            learned[:, : n_token // 2] = False
        self._move_on(n_token)
        both = torch.from_numpy(tokens)
        labels = both[:, 1:].where(torch.from_numpy(learned), NOT_SCORED)
        document_starts = torch.from_numpy(documents) if self._resets else None
        return Batch(both[:, :-1].contiguous(), labels, Rows(document_starts=document_starts))


def _in_answers(text: PlainText | ShuffledText, begin: int, end: int, separator: int) -> np.ndarray:
    """Return for each place from `begin` on whether the token after it belongs to an answer, bool (end - begin,).

    As much of the text before them is read as tells what the first place belongs to.
    """
    n_before = _LOOK_BACK
    while True:
        first = max(0, begin - n_before)
        ids, starts = text.read(first, end + 1)
        tells = np.append(starts, np.flatnonzero(ids == separator)) <= begin - first
        if first == 0 or tells.any():
            break
        n_before *= 2
    is_start = np.zeros(len(ids), bool)
    is_start[starts] = True
    places = np.arange(len(ids))
    last_start = np.maximum.accumulate(np.where(is_start, places, 0))
    last_separator = np.maximum.accumulate(np.where(ids == separator, places, -1))
    answered = (last_separator >= last_start)[:-1] & ~is_start[1:]
    return answered[begin - first :]
