"""Segments of any length, on the model's device, from a stream of segments of one length.

Lanes stay consecutive: every token that the stream gives is read once, in order, however it is cut. On a GPU the next segment
is read while the GPU computes, and its copy from pinned memory waits in line behind that, so that nobody waits for either; what
has been read ahead is not part of the state, which is the place of the next token to be trained on.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_xl.data.streams import Segment, SegmentStream
from transformer_xl.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Where a stream is.

    Attributes:
        epoch: passes completed.
        position: index, within the epoch, of the stream's segment.
        starts_epoch: that segment is the first of an epoch.
        state: of the stream, to go there again.
    """

    epoch: int
    position: int
    starts_epoch: bool
    state: dict[str, Any]


class Feed:
    """Reads a stream in segments of the lengths asked for.

    Args:
        stream: of the training split.
        device: of the model.
        ahead: read ahead when `prefetch` is called; None: on a GPU, which computes meanwhile.

    Example:
        >>> import numpy as np
        >>> stream = SegmentStream(np.arange(21), batch_size=2, tgt_len=5)
        >>> feed = Feed(stream, torch.device("cpu"))
        >>> feed.read(3).ids.tolist(), feed.read(4).ids.tolist(), feed.read(9).ids.tolist()  # an epoch ends there
        ([[0, 1, 2], [10, 11, 12]], [[3, 4, 5, 6], [13, 14, 15, 16]], [[7, 8, 9], [17, 18, 19]])
    """

    def __init__(self, stream: SegmentStream, device: torch.device, *, ahead: bool | None = None) -> None:
        self._stream, self._device = stream, device
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._waiting: deque[tuple[Place, Segment]] = deque()  # read from the stream, and not or not wholly given yet
        self._offset = 0  # tokens of the first of them that were given

    @property
    def place(self) -> Place:
        """Where the stream's segment is that holds the next token."""
        if self._waiting:
            return self._waiting[0][0]
        stream = self._stream
        return Place(stream.epoch, stream.position, stream.starts_epoch, stream.state_dict())

    @property
    def starts_epoch(self) -> bool:
        """True if the next token is the first of an epoch: memory of the text before does not belong to it."""
        return self._offset == 0 and self.place.starts_epoch

    @property
    def epochs(self) -> float:
        """Passes done, and the share of the present one."""
        place = self.place
        begun = self._offset / self._waiting[0][1].ids.shape[1] if self._offset else 0
        return place.epoch + (place.position + begun) / self._stream.segments_per_epoch

    def read(self, tgt_len: int) -> Segment:
        """Return the next `tgt_len` tokens of each lane; fewer where an epoch ends."""
        parts: list[Segment] = []
        missing = tgt_len
        while missing and not (parts and self.starts_epoch):
            if not self._waiting:
                self._fetch()
            segment = self._waiting[0][1]
            end = min(self._offset + missing, segment.ids.shape[1])
            parts.append(_columns(segment, self._offset, end))
            missing -= end - self._offset
            self._offset = end
            if end == segment.ids.shape[1]:
                self._waiting.popleft()
                self._offset = 0
        return _joined(parts)

    def prefetch(self, n_token: int) -> None:
        """Start to copy the next `n_token` tokens of each lane; call it when the device has been given its work."""
        while self._ahead and sum(segment.ids.shape[1] for _, segment in self._waiting) - self._offset < n_token:
            self._fetch()

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next token as plain values: the stream's state, and the tokens given of its segment."""
        return {"stream": self.place.state, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that `state_dict` returned.

        Raises:
            ConfigError: it belongs to another text or layout, or is damaged.
        """
        self._waiting.clear()
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

    def _fetch(self) -> None:
        stream = self._stream
        place = Place(stream.epoch, stream.position, stream.starts_epoch, stream.state_dict())
        segment = next(stream)
        self._waiting.append((place, Segment(*map(self._moved, (segment.ids, segment.labels, segment.document_starts)))))

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def _columns(segment: Segment, begin: int, end: int) -> Segment:
    return _combined(lambda parts: parts[0][:, begin:end].contiguous(), [segment])


def _joined(parts: list[Segment]) -> Segment:
    return parts[0] if len(parts) == 1 else _combined(lambda tensors: torch.cat(tensors, dim=1), parts)


def _combined(combine: Callable[[list[Tensor]], Tensor], parts: list[Segment]) -> Segment:
    names = ("ids", "labels", "document_starts")
    return Segment(*(combine([getattr(part, name) for part in parts]) for name in names))
