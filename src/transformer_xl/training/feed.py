"""What a step reads: the lengths of its segments, and the segments, which a stream cuts from its text.

Every token of the stream is read once and in order, whatever the lengths are. While a GPU computes, the next step's segments
are read. The saved state is the place of the next token to train on, so segments that were read ahead do not matter.
"""

import random
from dataclasses import dataclass
from typing import Any

from transformer_xl.batch import Batch
from transformer_xl.config.run import TrainConfig
from transformer_xl.data.streams import EndlessStream

_MOST_ABOVE = 15  # three standard deviations


def longest_segment(config: TrainConfig) -> int:
    """Return the most tokens that a segment of a run can have."""
    return config.tgt_len + (_MOST_ABOVE if config.varlen else 0)


def segment_length(config: TrainConfig, step: int, index: int) -> int:
    """Return the length of segment `index` of a step: always the same, or random.

    With `varlen`, 95 % of the lengths are drawn around `tgt_len`, with a deviation of 5 tokens, and 5 % around half of it. All
    are at least 5, and at most 15 more than `tgt_len`. The authors' `get_varlen_iter` draws like this. A random length depends
    only on seed and step. So all processes and a resumed run draw the same lengths, and other random numbers do not change.

    Example:
        >>> config = TrainConfig(tgt_len=32, varlen=True, max_steps=8)
        >>> [segment_length(config, step, 0) for step in range(4)]
        [24, 27, 29, 32]
    """
    if not config.varlen:
        return config.tgt_len
    draw = random.Random(f"varlen {config.seed} {step} {index}")
    mean = config.tgt_len / 2 if draw.random() < 0.05 else config.tgt_len
    return min(max(int(draw.gauss(mean, 5)), 5), longest_segment(config))


@dataclass(frozen=True)
class Place:
    """A place in a stream."""

    epoch: int  # passes completed
    position: int  # index of the stream's segment within the epoch
    epochs: float  # passes, with a fraction for the present one
    starts_epoch: bool  # memory begins anew
    state: dict[str, Any]  # the stream's state, to return to this place

    @classmethod
    def of(cls, stream: EndlessStream) -> "Place":
        """Return the present place of a stream."""
        return cls(stream.epoch, stream.position, stream.epochs, stream.starts_epoch, stream.state_dict())


class Feed:
    """Reads the segments of each step from a stream.

    Args:
        stream: is read from, in this process's lanes.
        config: how many segments a step has, and their lengths.
        ahead: whether `prefetch` reads ahead, as for a GPU, which computes meanwhile.

    Example:
        >>> import numpy as np
        >>> from transformer_xl.data.streams import SegmentStream
        >>> stream = SegmentStream(np.arange(21), batch_size=2, tgt_len=5)
        >>> feed = Feed(stream, TrainConfig(tgt_len=5, tbptt_segments=2, max_steps=8))
        >>> [batch.ids.tolist() for batch in feed.read(0)]
        [[[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]], [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]]
    """

    def __init__(self, stream: EndlessStream, config: TrainConfig, *, ahead: bool = False) -> None:
        self._stream, self._config, self._ahead = stream, config, ahead
        self._read_ahead: tuple[Place, list[Batch]] | None = None  # read ahead

    @property
    def place(self) -> Place:
        """The place of the next token to train on."""
        return self._read_ahead[0] if self._read_ahead else Place.of(self._stream)

    def read(self, step: int) -> list[Batch]:
        """Return the segments of a step. It ends where an epoch ends, because memory begins anew there."""
        if self._read_ahead:
            (_, batches), self._read_ahead = self._read_ahead, None
            return batches
        batches: list[Batch] = []
        while len(batches) < self._config.tbptt_segments and not (batches and self._stream.starts_epoch):
            batches.append(self._stream.read(segment_length(self._config, step, len(batches))))
        return batches

    def prefetch(self, step: int) -> None:
        """Read the segments of the next step. Call it when the device has its work."""
        if self._ahead and not self._read_ahead:
            self._read_ahead = Place.of(self._stream), self.read(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next token as JSON values."""
        return {"stream": self.place.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that `state_dict` returned.

        Raises:
            ConfigError: the place belongs to another text or layout, or is damaged.
        """
        self._read_ahead = None
        self._stream.load_state_dict(state["stream"])
