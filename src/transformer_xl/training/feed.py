"""What a step reads: the lengths of its segments, and the segments, which are cut from a stream.

Every token of the stream is read once and in order, whatever the lengths are. On a GPU, the next segment is read while the GPU
computes, and its copy from pinned memory waits for that work. The saved state is the place of the next token to train on, so
segments that were read ahead do not matter.
"""

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config.run import TrainConfig
from transformer_xl.data.labelled import LabelledStream
from transformer_xl.data.pairs import PairStream
from transformer_xl.data.streams import Segment, SegmentStream
from transformer_xl.errors import ConfigError
from transformer_xl.training.segments import AnySegment, kind_of, tensors_of

AnyStream = SegmentStream | PairStream | LabelledStream

_MOST_ABOVE = 15  # three standard deviations


class SegmentLengths:
    """The length of each segment of a run: always the same, or random.

    With `varlen`, 95 % of the lengths are drawn around `tgt_len`, with a deviation of 5 tokens, and 5 % around half of it. All
    are at least 5, and at most 15 more than `tgt_len`. The authors' `get_varlen_iter` draws like this.

    A random length depends only on seed and step. So all processes and a resumed run draw the same lengths, and other random
    numbers do not change.

    Example:
        >>> lengths = SegmentLengths(TrainConfig(tgt_len=32, varlen=True, max_steps=8))
        >>> [lengths.at(step, 0) for step in range(4)]
        [24, 27, 29, 32]
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    @property
    def longest(self) -> int:
        """The most tokens that a segment can have."""
        return self._config.tgt_len + (_MOST_ABOVE if self._config.varlen else 0)

    def at(self, step: int, index: int) -> int:
        """Return the length of segment `index` of a step."""
        config = self._config
        if not config.varlen:
            return config.tgt_len
        draw = random.Random(f"varlen {config.seed} {step} {index}")
        mean = config.tgt_len / 2 if draw.random() < 0.05 else config.tgt_len
        return min(max(int(draw.gauss(mean, 5)), 5), self.longest)


@dataclass(frozen=True)
class Place:
    """A place in a stream."""

    epoch: int  # passes completed
    position: int  # index of the stream's segment within the epoch
    starts_epoch: bool
    state: dict[str, Any]  # the stream's state, to return to this place

    @classmethod
    def of(cls, stream: AnyStream) -> "Place":
        """Return the present place of a stream."""
        return cls(stream.epoch, stream.position, stream.starts_epoch, stream.state_dict())


class Feed:
    """Reads a stream in segments of the lengths asked for.

    If `ahead`, `prefetch` reads ahead; None: only on a GPU, which computes meanwhile.

    Example:
        >>> import numpy as np
        >>> stream = SegmentStream(np.arange(21), batch_size=2, tgt_len=5)
        >>> feed = Feed(stream, torch.device("cpu"))
        >>> feed.read(3).ids.tolist(), feed.read(4).ids.tolist(), feed.read(9).ids.tolist()  # an epoch ends there
        ([[0, 1, 2], [10, 11, 12]], [[3, 4, 5, 6], [13, 14, 15, 16]], [[7, 8, 9], [17, 18, 19]])
    """

    def __init__(self, stream: AnyStream, device: torch.device, *, ahead: bool | None = None) -> None:
        self._stream, self._device = stream, device
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._waiting: deque[tuple[Place, AnySegment]] = deque()  # read from the stream, but not fully returned
        self._labels: deque[Tensor | None] = deque()  # of these, on the host, if the segments are on a GPU
        self.labels: Tensor | None = None  # of the segment returned last
        self._offset = 0  # tokens of the first of them that were returned

    @property
    def place(self) -> Place:
        """The place of the stream's segment that holds the next token."""
        return self._waiting[0][0] if self._waiting else Place.of(self._stream)

    @property
    def starts_epoch(self) -> bool:
        """Whether the next token is the first of an epoch, where memory begins anew."""
        return self._offset == 0 and self.place.starts_epoch

    @property
    def epochs(self) -> float:
        """Passes through the stream, with a fraction for the present one."""
        place = self.place
        begun = self._offset / self._waiting[0][1].ids.shape[1] if self._offset else 0
        return place.epoch + (place.position + begun) / self._stream.segments_per_epoch

    def read(self, tgt_len: int) -> AnySegment:
        """Return the next `tgt_len` tokens of each lane; fewer where an epoch ends. Only segments of a stream are cut."""
        if not self._offset:
            if not self._waiting:
                self._fetch()
            segment = self._waiting[0][1]
            if kind_of(segment).length != "cut" or segment.ids.shape[1] == tgt_len:
                self.labels = self._labels.popleft()
                return self._waiting.popleft()[1]
        parts: list[Segment] = []
        labels: list[Tensor] = []
        missing = tgt_len
        while missing and not (parts and self.starts_epoch):
            if not self._waiting:
                self._fetch()
            segment = self._waiting[0][1]
            assert isinstance(segment, Segment)
            end = min(self._offset + missing, segment.ids.shape[1])
            parts.append(Segment(*(tensor[:, self._offset : end].contiguous() for tensor in tensors_of(segment))))
            if (known := self._labels[0]) is not None:
                labels.append(known[:, self._offset : end])
            missing -= end - self._offset
            self._offset = end
            if end == segment.ids.shape[1]:
                self._waiting.popleft()
                self._labels.popleft()
                self._offset = 0
        self.labels = torch.cat(labels, 1) if labels else None
        return (
            parts[0]
            if len(parts) == 1
            else Segment(*(torch.cat(same, 1) for same in zip(*map(tensors_of, parts), strict=True)))
        )

    def prefetch(self, n_token: int) -> None:
        """Start to copy the next `n_token` tokens of each lane, or the next texts. Call it when the device has its work."""
        while self._ahead and self._n_waiting < n_token:
            self._fetch()

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next token as JSON values."""
        return {"stream": self.place.state, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that `state_dict` returned.

        Raises:
            ConfigError: the place belongs to another text or layout, or is damaged.
        """
        self._waiting.clear()
        self._labels.clear()
        self._offset = 0
        self._stream.load_state_dict(state["stream"])
        if state["offset"]:
            self._fetch()
            length = self._waiting[0][1].ids.shape[1]
            if not 0 < state["offset"] < length:
                raise ConfigError(
                    f"saved position (token {state['offset']} of a segment of {length}) is damaged; restore an older checkpoint"
                )
            self._offset = state["offset"]

    @property
    def _n_waiting(self) -> float:
        """How many tokens of each lane were read ahead; of texts, which have lengths of their own, one batch is enough."""
        segments = [segment for _, segment in self._waiting]
        if segments and kind_of(segments[0]).length == "own":
            return math.inf
        return sum(segment.ids.shape[1] for segment in segments) - self._offset

    def _fetch(self) -> None:
        place, segment = Place.of(self._stream), next(self._stream)
        self._labels.append(segment.labels if isinstance(segment, Segment) and self._keeps_labels() else None)
        if self._device.type == "cuda":
            segment = type(segment)(*(t.pin_memory().to(self._device, non_blocking=True) for t in tensors_of(segment)))
        self._waiting.append((place, segment))

    def _keeps_labels(self) -> bool:
        return self._device.type != "cpu"
