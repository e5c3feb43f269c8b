"""A text cut into segments as `evaluate` cuts it: which tokens are read at once, and which of them are scored."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from transformer_xl.reading.how import Reading


@dataclass(frozen=True)
class Segment:
    """What one forward pass reads.

    Attributes:
        begin: place of the first scored token's predecessor, of each row; int64 (B,).
        ids: int64 (B, W), the extended context and the segment.
        labels: int64 (B, T), the tokens that follow the last T of `ids`.
    """

    begin: np.ndarray
    ids: torch.Tensor
    labels: torch.Tensor

    @property
    def tgt_len(self) -> int:
        """T, tokens that are scored in each row."""
        return self.labels.shape[1]

    @property
    def places(self) -> np.ndarray:
        """Places in the text of the tokens that are predicted, int64 (B, T)."""
        return self.begin[:, None] + 1 + np.arange(self.tgt_len)


def segments(ids: np.ndarray, reading: Reading, *, rows: int = 1) -> Iterator[Segment]:
    """Yield the segments of a text in order, every token but the first scored once.

    Args:
        ids: integers (N,).
        reading: how long segments are.
        rows: so many segments side by side, at most, where they are equally long; for reading without memory.

    Example:
        >>> [s.places.tolist() for s in segments(np.arange(6), Reading(tgt_len=2, mem_len=0), rows=2)]
        [[[1, 2], [3, 4]], [[5]]]
    """
    last = len(ids) - 1
    waiting: list[tuple[int, int, int]] = []
    for begin in range(0, last, reading.tgt_len):
        span = (max(begin - reading.ext_len, 0), begin, min(begin + reading.tgt_len, last))
        if waiting and (len(waiting) == rows or _widths(span) != _widths(waiting[0])):
            yield _segment(ids, waiting)
            waiting = []
        waiting.append(span)
    if waiting:
        yield _segment(ids, waiting)


def _widths(span: tuple[int, int, int]) -> tuple[int, int]:
    start, begin, end = span
    return begin - start, end - begin


def _segment(ids: np.ndarray, spans: list[tuple[int, int, int]]) -> Segment:
    inputs = np.stack([ids[start:end] for start, _, end in spans]).astype(np.int64)
    labels = np.stack([ids[begin + 1 : end + 1] for _, begin, end in spans]).astype(np.int64)
    return Segment(np.array([begin for _, begin, _ in spans]), torch.from_numpy(inputs), torch.from_numpy(labels))
