"""Cut a text into the segments that a model reads, and say which of their tokens are scored.

Every token but the first is predicted once. A model reads the segments in `Lanes` side by side with memory, several segments
at once without memory (`segments`), or in `blocks`, each of which begins without memory.

Shapes: B rows, W tokens that each reads.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer_xl.batch import NOT_SCORED
from transformer_xl.world import World, parts


@dataclass(frozen=True)
class Cut:
    """What one forward pass reads, on the CPU.

    Attributes:
        ids: int64 (B, W), the tokens read.
        labels: int64 (B, W), the tokens that follow them; -100 where they are not scored.
        places: int64 (B, W), places in the text of the tokens read, from 0 on; `labels` stand one place later.
        n_pad: int64 (B,), how many tokens at the left of each row are padding; None: no row has any.
    """

    ids: Tensor
    labels: Tensor
    places: Tensor
    n_pad: Tensor | None = None

    @property
    def is_scored(self) -> Tensor:
        """Which tokens have a label that is scored, bool (B, W)."""
        return self.labels >= 0

    @property
    def n_context(self) -> int:
        """Columns before the first one in which a row has a scored label."""
        return int(self.is_scored.any(dim=0).int().argmax())


def cut(ids: np.ndarray, begin: Tensor, end: Tensor, *, scored: Tensor, pad_left: bool = True) -> Cut:
    """Cut one segment for each row out of a text.

    Args:
        ids: integers (N,); may be memory-mapped.
        begin: int64 (B,), place of the first token that each row reads.
        end: int64 (B,), place after the last one, at most N - 1.
        scored: int64 (B,), place of the first token whose successor is scored.
        pad_left: shorter rows end with the others, because some models count positions from the end of a segment. False:
            they begin with the others, and what they read after their end is not scored.

    Example:
        >>> text = np.arange(10, 16)
        >>> one = cut(text, torch.tensor([0, 1]), torch.tensor([2, 4]), scored=torch.tensor([0, 3]))
        >>> one.ids.tolist(), one.labels.tolist(), one.n_pad.tolist()
        ([[10, 10, 11], [11, 12, 13]], [[-100, 11, 12], [-100, -100, 14]], [1, 0])
    """
    last, width = len(ids) - 1, int((end - begin).max())
    places = end[:, None] + torch.arange(-width, 0) if pad_left else begin[:, None] + torch.arange(width)
    n_pad = width - (end - begin)
    inputs = ids[places.clamp(min=0, max=last).numpy()].astype(np.int64)
    targets = ids[(places + 1).clamp(min=0, max=last).numpy()].astype(np.int64)
    is_scored = (places >= scored[:, None]) & (places < end[:, None])
    labels = torch.from_numpy(targets).masked_fill(~is_scored, NOT_SCORED)
    return Cut(torch.from_numpy(inputs), labels, places, n_pad if pad_left and n_pad.any() else None)


class Lanes:
    """A text (N,), N ≥ 2, cut into contiguous lanes; lane b predicts tokens b·n + 1 … (b + 1)·n, so together they miss none.

    Several processes divide the lanes. There are fewer than `n_lane` if rounding up to whole segments leaves some empty.

    Attributes:
        length: n, predicted tokens of a lane, a multiple of `tgt_len`; the last lane may have fewer.
        n_lane: lanes of this process.
        n_cold: how many of them (0 or 1) begin with the text, and so without memory.
    """

    def __init__(self, ids: np.ndarray, n_lane: int, *, tgt_len: int, ext_len: int = 0, world: World | None = None) -> None:
        self._ids, self._tgt_len, self._ext_len = ids, tgt_len, ext_len
        self.length = math.ceil((len(ids) - 1) / n_lane / tgt_len) * tgt_len  # lanes begin where segments of one lane would
        n_all = math.ceil((len(ids) - 1) / self.length)
        self._own = parts(range(n_all), world or World())
        self.n_lane = len(self._own)
        self.n_cold = int(0 in self._own)

    def segments(self, *, pad_left: bool) -> Iterator[Cut]:
        """Yield what all lanes read, segment by segment: the extended context and `tgt_len` tokens to score.

        A lane has fewer at the beginning and the end of the text; see `cut` for `pad_left`.
        """
        last = len(self._ids) - 1
        for at in range(0, self.length, self._tgt_len):
            first = torch.tensor(self._own) * self.length + at
            end = (first + self._tgt_len).clamp(max=last)
            if (end <= first).all():  # the last lane is shorter, and may be this process's only one
                return
            begin = torch.minimum((first - self._ext_len).clamp(min=0), end)
            yield cut(self._ids, begin, end, scored=first, pad_left=pad_left)

    def before(self, n: int) -> Iterator[Cut]:
        """Yield segments (n_lane - n_cold, ext_len + tgt_len) of the last `n` tokens before each lane but the text's first.

        `n` is a multiple of `tgt_len` and at most the length of a lane less `ext_len`.
        """
        begins = torch.tensor([b * self.length for b in self._own if b > 0])
        for first in range(-n, 0, self._tgt_len):
            scored = begins + first
            yield cut(self._ids, scored - self._ext_len, scored + self._tgt_len, scored=scored)


def segments_in_parts(parts: Iterable[np.ndarray], *, tgt_len: int, ext_len: int = 0) -> Iterator[Cut]:
    """Yield the segments of one text that comes in parts (n,), as one lane reads them, each as soon as its labels are there.

    No more of the text is held than a part and a segment; places count from where that begins.

    Example:
        >>> [each.labels.tolist() for each in segments_in_parts(np.split(np.arange(6), [1, 5]), tgt_len=3)]
        [[[1, 2, 3]], [[4, 5]]]
    """
    held, first = np.empty(0, np.int64), 0
    for part in itertools.chain(parts, [None]):
        if part is not None:
            held, first = np.concatenate([held[max(first - ext_len, 0) :], part]), min(first, ext_len)
        least = 1 if part is None else tgt_len
        while len(held) - 1 - first >= least:
            begin, end = max(first - ext_len, 0), min(first + tgt_len, len(held) - 1)
            yield cut(held, torch.tensor([begin]), torch.tensor([end]), scored=torch.tensor([first]))
            first = end


def segments(ids: np.ndarray, *, tgt_len: int, ext_len: int = 0, rows: int = 1) -> Iterator[Cut]:
    """Yield the segments of a text (N,), N ≥ 2, in order, as one lane reads them.

    Up to `rows` segments of equal length come side by side, for reading without memory.

    Example:
        >>> [(each.places + 1).tolist() for each in segments(np.arange(6), tgt_len=2, rows=2)]
        [[[1, 2], [3, 4]], [[5]]]
    """
    last = len(ids) - 1
    spans = ((max(at - ext_len, 0), at, min(at + tgt_len, last)) for at in range(0, last, tgt_len))
    for _, alike in itertools.groupby(spans, lambda span: (span[1] - span[0], span[2] - span[1])):
        while together := list(itertools.islice(alike, rows)):
            begin, scored, end = torch.tensor(together).unbind(1)
            yield cut(ids, begin, end, scored=scored)


def blocks(ids: np.ndarray, starts: np.ndarray, *, size: int, context: int, tgt_len: int) -> Iterator[Cut]:
    """Yield what is read to score blocks of `size` tokens side by side, each from only the `context` ≥ 1 tokens before it.

    `starts` (B,) are the places of the first scored tokens. Segments end with the blocks and only the first one is short, so
    the scored tokens stand at the end of a segment whatever the context.

    Example:
        >>> cuts = blocks(np.arange(9), np.array([5]), size=2, context=3, tgt_len=3)
        >>> [(each.ids.tolist(), each.labels.tolist()) for each in cuts]
        [([[2]], [[-100]]), ([[3, 4, 5]], [[-100, 5, 6]])]
    """
    first = torch.from_numpy(starts)
    n_read = context + size - 1
    for begin, end in itertools.pairwise(sorted({0, *range(n_read, 0, -tgt_len)})):
        yield cut(ids, first - context + begin, first - context + end, scored=first - 1)
