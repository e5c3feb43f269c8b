"""Token ids as parallel lanes of consecutive segments, the order in which memory makes sense.

The ids are cut into `batch_size` contiguous lanes of equal length. Step by step, every lane moves on by `tgt_len` tokens,
so that what a model remembers of a lane is exactly what comes before its next segment:

    ids   0 1 2 3 4 5 6 7 8 9 10 11 12        batch_size 2, tgt_len 3
    lane 0:  segment 0 = 0 1 2   labels 1 2 3      segment 1 = 3 4 5     labels 4 5 6
    lane 1:  segment 0 = 6 7 8   labels 7 8 9      segment 1 = 9 10 11   labels 10 11 12

With n = (len(ids) - 1) // batch_size tokens per lane, the n % tgt_len last tokens of each lane, and fewer than batch_size
tokens at the very end, are not read.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from transformer_xl.errors import ConfigError, CorpusError


@dataclass(frozen=True)
class Segment:
    """What one step reads; B lanes of T tokens.

    Attributes:
        ids: (B, T) int64.
        labels: (B, T) int64, the token after each of `ids`.
        document_starts: (B, T) bool, True where a new document begins at that token of `ids`.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    document_starts: torch.Tensor


class SegmentStream:
    """Endless iterator over the segments of a text, epoch after epoch.

    With several processes, rank r of W reads lanes r·B/W … (r+1)·B/W - 1 of the same B lanes, so that all together read the
    same segments in the same order whatever W is.

    Args:
        ids: shape (n_tokens,), any integer type; may be a memory map, only one segment at a time is copied.
        batch_size: lanes in all processes together, B.
        tgt_len: tokens per segment and lane, T.
        document_starts: token offsets in `ids` at which documents start, increasing.
        rank: index of this process.
        world_size: number of processes.

    Raises:
        ConfigError: world_size does not divide batch_size, or sizes that are not positive.
        CorpusError: fewer ids than one segment per lane needs.

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
    ) -> None:
        if batch_size < 1 or tgt_len < 1:
            raise ConfigError(f"train.batch_size ({batch_size}) and train.tgt_len ({tgt_len}) must be at least 1; raise them")
        if not 0 <= rank < world_size or batch_size % world_size:
            raise ConfigError(
                f"world_size ({world_size}) must divide train.batch_size ({batch_size}) and exceed rank ({rank}); "
                "change train.batch_size"
            )
        self._lane_len = (len(ids) - 1) // batch_size
        if self._lane_len < tgt_len:
            raise CorpusError(
                f"text too short: {len(ids):,} tokens, but {batch_size} lanes of {tgt_len} tokens need "
                f"{batch_size * tgt_len + 1:,}; use a smaller train.batch_size or train.tgt_len"
            )
        self._ids = ids
        self._starts = np.asarray([] if document_starts is None else document_starts, np.int64)
        self._batch_size, self._tgt_len = batch_size, tgt_len
        n_lanes = batch_size // world_size
        self._lanes = np.arange(rank * n_lanes, (rank + 1) * n_lanes) * self._lane_len  # where the lanes begin in ids
        self._epoch = self._position = 0

    @property
    def segments_per_epoch(self) -> int:
        """Segments of each lane that make up one pass."""
        return self._lane_len // self._tgt_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step reads, all lanes of all processes together."""
        return self._batch_size * self._tgt_len

    @property
    def epoch(self) -> int:
        """Passes completed before the next segment."""
        return self._epoch

    @property
    def position(self) -> int:
        """Index, within the epoch, of the segment about to be read."""
        return self._position

    @property
    def starts_epoch(self) -> bool:
        """True if the segment about to be read is the first of an epoch: memory of the text before does not belong to it."""
        return self._position == 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Segment:
        begins = self._lanes + self._position * self._tgt_len
        tokens = np.stack([self._ids[begin : begin + self._tgt_len + 1] for begin in begins.tolist()]).astype(np.int64)
        documents = self._documents(begins)
        self._position += 1
        if self._position == self.segments_per_epoch:
            self._epoch, self._position = self._epoch + 1, 0
        both = torch.from_numpy(tokens)
        return Segment(both[:, :-1].contiguous(), both[:, 1:].contiguous(), torch.from_numpy(documents))

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the layout it belongs to, as plain numbers."""
        return {"epoch": self._epoch, "segment": self._position, **self._layout()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position that `state_dict` returned, whatever the world size was.

        Raises:
            ConfigError: it belongs to another text or layout, or is damaged.
        """
        for name, value in self._layout().items():
            if state.get(name) != value:
                raise ConfigError(
                    f"saved position belongs to {name} {state.get(name)}, not {value}; "
                    "resume with the same corpus, train.batch_size and train.tgt_len"
                )
        epoch, segment = state.get("epoch", -1), state.get("segment", -1)
        if epoch < 0 or not 0 <= segment < self.segments_per_epoch:
            raise ConfigError(
                f"saved position (epoch {epoch}, segment {segment}) lies outside the text of {self.segments_per_epoch} "
                "segments; restore an older checkpoint"
            )
        self._epoch, self._position = epoch, segment

    def _layout(self) -> dict[str, int]:
        return {"batch_size": self._batch_size, "tgt_len": self._tgt_len, "n_tokens": len(self._ids)}

    def _documents(self, begins: np.ndarray) -> np.ndarray:
        """Mark the document starts in [begin, begin + tgt_len) of each lane."""
        marks = np.zeros((len(begins), self._tgt_len), bool)
        first, last = np.searchsorted(self._starts, begins), np.searchsorted(self._starts, begins + self._tgt_len)
        for lane in np.flatnonzero(last > first).tolist():
            marks[lane, self._starts[first[lane] : last[lane]] - begins[lane]] = True
        return marks
