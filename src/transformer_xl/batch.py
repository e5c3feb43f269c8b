"""What a model reads in one call and learns from: made from text by `data`, read by `model`, the same value all the way.

Shapes: B rows, T tokens of a row, K targets.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from transformer_xl.kernels.graphs import sent

NOT_SCORED = -100
"""The label of a token or row that is not scored or learned from, torch's `ignore_index`; where labels are floats, NaN is."""


@dataclass(frozen=True)
class Rows:
    """Padding and document borders of the rows of a call.

    Attributes:
        n_pad: int64 (B,), padding tokens at the left of each row; they are neither seen nor remembered. None: there are none.
        document_starts: bool (B, T), True where a token begins a new document, which sees nothing from before it. None:
            no token does.
    """

    n_pad: Tensor | None = None
    document_starts: Tensor | None = None


@dataclass(frozen=True)
class Order:
    """In what order the targets of a segment are predicted, and so who sees whom.

    A query sees the keys of lower rank. So two numbers per token say what the authors' `perm_mask` (B, T, T) says.

    Attributes:
        rank: int64 (B, T), the rank of each token as a key; every query sees the rank -1.
        sees: int64 (B, T), at least 0: a token sees the keys of lower rank, and itself. A target's is at most its own rank.
        targets: int64 (B, K), the positions of the targets. A row with fewer repeats any position, with the label -100.
    """

    rank: Tensor
    sees: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Pairs:
    """What else is known of rows of two texts, from which an XLNet learns.

    Attributes:
        order: who sees whom.
        segments: int64 (B, T), which text a token belongs to (the paper's word; elsewhere a segment is what is read at once):
            0 up to the <sep> after the first text, 1 for the second and its <sep>, 2 for <cls>.
        backward: bool (B,), rows that hold text from right to left.
        is_random: bool (B,), rows whose second text does not go on where the first one ends.
    """

    order: Order
    segments: Tensor
    backward: Tensor
    is_random: Tensor


@dataclass(frozen=True)
class TaskRows:
    """What else is known of the texts of a task.

    Attributes:
        segments: int64 like the ids, the text that each token belongs to, as in `Pairs` (XLNet); all zeros for other models.
        may_answer: bool like the ids, tokens that an answer may consist of; all True where places are not asked for.
        weights: shaped like the labels; the loss of each label is multiplied by its weight. None: all count the same.
        words: int64 (B, W), the token that stands for each word; where a row has fewer, any with the label -100. None: all
            tokens have labels, if any have.
    """

    segments: Tensor
    may_answer: Tensor
    weights: Tensor | None = None
    words: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """Rows of ids and what is learned from them.

    Attributes:
        ids: int64 (B, T), or (B, C, T) of C choices each.
        labels: what is right; -100, or NaN where they are floats, is not learned from. int64 (B, T) for each token, (B, K) for
            each target, (B, W) for each word, or (B, …) for each row, see `TaskModel.forward`.
        rows: padding and documents; with choices, `n_pad` is (B, C).
        extra: what only some models read; None of a stream of text.
        per_row: a row has one loss, which needs all its labels, such as both ends of an answer.
    """

    ids: Tensor
    labels: Tensor
    rows: Rows = Rows()
    extra: Pairs | TaskRows | None = None
    per_row: bool = False

    @property
    def n_pad(self) -> Tensor:
        """Padding at the left of each row, int64 (B,), or (B, C) of choices."""
        return torch.zeros_like(self.ids[..., 0]) if self.rows.n_pad is None else self.rows.n_pad

    @property
    def pairs(self) -> Pairs:
        """What else is known of rows of two texts."""
        assert isinstance(self.extra, Pairs)
        return self.extra

    @property
    def texts(self) -> TaskRows:
        """What else is known of the texts of a task."""
        assert isinstance(self.extra, TaskRows)
        return self.extra

    @property
    def n_read(self) -> int:
        """How many tokens it has, without padding and rows that only fill it up. Count before `to`: it looks at numbers."""
        lengths = (self.ids.shape[-1] - self.n_pad).view(len(self.ids), -1)
        if isinstance(self.extra, TaskRows):  # all of a task's rows are learned from but those that fill up
            lengths = lengths[~self._is_missing.view(len(self.labels), -1).all(1)]
        return int(lengths.sum())

    @property
    def n_scored(self) -> int:
        """How many losses are learned from. To count is to look at numbers, so do it before `to`."""
        missing = self._is_missing
        return int((~(missing.view(len(missing), -1).any(1) if self.per_row else missing)).sum())

    @property
    def _is_missing(self) -> Tensor:
        return self.labels.isnan() if self.labels.is_floating_point() else self.labels == NOT_SCORED

    @property
    def tensors(self) -> list[Tensor]:
        """All its tensors, in the order of `map`."""
        tensors: list[Tensor] = []
        self.map(lambda tensor: tensors.append(tensor) or tensor)
        return tensors

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a batch with what a function makes of each tensor."""
        return _mapped(self, function)

    def to(self, device: torch.device) -> Self:
        """Return it on a device; the host does not wait for a GPU."""
        return self.map(lambda tensor: sent(tensor, device))

    def at(self, rows: slice) -> Self:
        """Return some of its rows."""
        return self.map(lambda tensor: tensor[rows])

    def split(self, n: int) -> list[Self]:
        """Return n parts of as equally many rows as can be."""
        borders = [i * len(self.ids) // n for i in range(n + 1)]
        return [self.at(slice(*pair)) for pair in itertools.pairwise(borders)]


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: _mapped(getattr(value, field.name), function) for field in fields(value)})
