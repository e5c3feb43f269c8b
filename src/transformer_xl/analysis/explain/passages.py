"""The passages of a text that gain most from memory: pieces of equal length inside segments, so that all begin alike."""

from dataclasses import dataclass

import numpy as np

_LONGEST = 64
"""Tokens of a passage, at most."""


@dataclass(frozen=True)
class Passage:
    """A few tokens in a row.

    Attributes:
        begin: place of its first token in the text.
        end: place after its last one.
        score: what memory saved on them, in nats; without memory, how surprising they are.
        best: place of the token that this is most due to.
    """

    begin: int
    end: int
    score: float
    best: int


def best_passages(values: np.ndarray, *, tgt_len: int, n: int = 50) -> list[Passage]:
    """Return the passages with the highest sums, the highest first, of those above zero.

    Args:
        values: float (n,), of the tokens from the second of the text on.
        tgt_len: tokens per segment; no passage reaches over a border.
        n: passages, at most.

    Example:
        >>> best_passages(np.array([0.0, 1.0, 5.0, 0.0]), tgt_len=2)
        [Passage(begin=3, end=5, score=5.0, best=3), Passage(begin=1, end=3, score=1.0, best=2)]
    """
    length = -(-tgt_len // -(-tgt_len // _LONGEST))  # as long as can be, and equal
    segment_starts = np.arange(0, len(values), tgt_len)
    starts = np.concatenate([np.arange(start, min(start + tgt_len, len(values)), length) for start in segment_starts])
    sums = np.add.reduceat(values.astype(np.float64), starts)
    ends = np.append(starts[1:], len(values))
    order = np.argsort(-sums, kind="stable")[:n]
    chosen = [(int(starts[i]), int(ends[i]), float(sums[i])) for i in order if sums[i] > 0]
    return [Passage(a + 1, b + 1, score, int(a + values[a:b].argmax()) + 1) for a, b, score in chosen]
