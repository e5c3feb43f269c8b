"""Labelled texts: examples encoded once, and the batches in which a model is taught with them.

A batch is a function of the seed, the epoch and the position. Each epoch draws a new order of the examples and cuts it into
windows of 64 batches. In a window, examples of like length share a batch, so that padding is short, and the batches come in a
random order. The last batch of an epoch is filled up with rows that are not scored, so every batch has B rows.

Rows of documents are read side by side instead, so that a memory of each lane is the document before its row. A lane goes on
with the next document of the epoch's order as soon as it is free, until all are read:

    step     0   1   2   3   4        documents a (2 rows), b (3), c (1), d (2); 2 lanes
    lane 0:  a0  a1  c0  d0  d1       memory is emptied before a0, c0 and d0
    lane 1:  b0  b1  b2  -   -        -: a row that is not scored
"""

import heapq
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from transformer_xl.batch import NOT_SCORED, Batch, Rows
from transformer_xl.config.model import HeadConfig
from transformer_xl.data.labels import Example, labels_of
from transformer_xl.data.layout import Layout, Row, batch_of, texts_of
from transformer_xl.data.order import ORDER, permutation
from transformer_xl.data.streams import EndlessStream
from transformer_xl.errors import ConfigError, CorpusError, counted

WINDOW = 64
"""Batches among which examples are sorted by length."""

_NO_ROW = -1  # of a lane that reads nothing


class LabelledRows(Protocol):
    """Examples that a `LabelledStream` deals out."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example's longest row, integers (n,)."""
        ...

    @property
    def checksum(self) -> int:
        """A number that other examples do not have; a saved position belongs to it."""
        ...

    def batch(self, chosen: np.ndarray, is_scored: np.ndarray, length: int) -> Batch:
        """Return a batch.

        Args:
            chosen: indices of examples, int64 (B,).
            is_scored: bool (B,), False: the label of that row is replaced by -100 or NaN.
            length: tokens of a row, padding included.
        """
        ...


class LabelledTexts:
    """Examples encoded once and held: 4 bytes a token; a text that follows on itself, as in RACE, is held once."""

    def __init__(self, examples: Sequence[Example], layout: Layout, head: HeadConfig) -> None:
        if not examples:
            raise CorpusError("there are no texts to learn from; give a file with some")
        self._layout, self._is_choice = layout, head.kind == "choice"
        self._encode(examples, head)

    def _encode(self, examples: Sequence[Example], head: HeadConfig) -> None:
        self._labels = labels_of(head, examples)
        ids, borders, parts, lengths = array("i"), array("q", [0]), array("q"), array("q")
        n_text, last = len(texts_of(examples[0])), ("", -1)
        for example in examples:
            texts = texts_of(example)
            if len(texts) != n_text:
                raise ConfigError(
                    f"{example.place}: {counted(len(texts), 'text')}, but {n_text} in {examples[0].place}; "
                    f"give all examples equally many"
                )
            for i, text in enumerate(texts):
                if i or last[0] != text or last[1] < 0:
                    encoded = self._layout.encode_at(text, example.place)
                    ids.frombytes(self._clipped(encoded, from_end=self._is_choice and i > 0).tobytes())
                    borders.append(len(ids))
                    number = len(borders) - 2
                    last = last if i else (text, number)
                else:
                    number = last[1]
                parts.append(number)
            sizes = [borders[number + 1] - borders[number] for number in parts[-n_text:]]
            lengths.append(max(self._layout.length(sizes[0], size, is_choice=self._is_choice) for size in sizes[1:] or [None]))
        self._ids, self._borders = np.frombuffer(ids, np.int32), np.frombuffer(borders, np.int64)
        self._parts = np.frombuffer(parts, np.int64).reshape(-1, n_text)
        self.lengths = np.frombuffer(lengths, np.int64)
        self.checksum = 0
        for held in (self._ids, self._borders, self._parts, self._labels.numpy()):
            self.checksum = zlib.crc32(held.tobytes(), self.checksum)

    def _clipped(self, ids: np.ndarray, *, from_end: bool) -> np.ndarray:
        """Return what no row can lose of a text."""
        most = self._layout.max_len
        return ids if most is None else ids[-most:] if from_end else ids[:most]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, index: int) -> tuple[Row, ...]:
        """Return the rows of an example."""
        first, *others = [self._ids[self._borders[part] : self._borders[part + 1]] for part in self._parts[index]]
        return tuple(self._layout.row(first, other, is_choice=self._is_choice) for other in others or [None])

    def batch(self, chosen: np.ndarray, is_scored: np.ndarray, length: int) -> Batch:
        """Return a batch; see `LabelledRows.batch`."""
        labels = self._labels[torch.from_numpy(chosen)]
        labels[torch.from_numpy(~is_scored)] = torch.nan if labels.is_floating_point() else NOT_SCORED
        return batch_of([self.rows(index) for index in chosen.tolist()], labels, length=length)


class LabelledWords(LabelledTexts):
    """Sentences encoded once and held: 5 bytes a token, and 16 a word."""

    def _encode(self, examples: Sequence[Example], head: HeadConfig) -> None:
        self._sentences = [self._layout.row_of_words(example) for example in examples]
        self._word_labels = [labels_of(head, [example])[0].numpy() for example in examples]
        self.lengths = np.array([len(row.ids) for row in self._sentences], np.int64)
        self.checksum = 0
        for row, labels in zip(self._sentences, self._word_labels, strict=True):
            for held in (row.ids, row.words, labels):
                self.checksum = zlib.crc32(held.tobytes(), self.checksum)

    def rows(self, index: int) -> tuple[Row, ...]:
        return (self._sentences[index],)

    def batch(self, chosen: np.ndarray, is_scored: np.ndarray, length: int) -> Batch:
        own = [self._word_labels[index] for index in chosen]
        labels = torch.full((len(chosen), max(map(len, own))), NOT_SCORED)
        for row, numbers, is_known in zip(labels, own, is_scored, strict=True):
            if is_known:
                row[: len(numbers)] = torch.from_numpy(numbers)
        return batch_of([self.rows(index) for index in chosen], labels, length=length)


@dataclass(frozen=True)
class WeightedRows(LabelledRows):
    """Examples whose classes count as `weights` (n_class,) say; see `LabelledRows`."""

    texts: LabelledRows
    weights: Tensor

    @property
    def lengths(self) -> np.ndarray:
        return self.texts.lengths

    @property
    def checksum(self) -> int:
        return self.texts.checksum

    def batch(self, chosen: np.ndarray, is_scored: np.ndarray, length: int) -> Batch:
        batch = self.texts.batch(chosen, is_scored, length)
        return replace(batch, extra=replace(batch.texts, weights=self.weights[batch.labels.clamp(min=0)]))


class LabelledStream(EndlessStream):
    """Endless iterator over batches of examples, epoch after epoch; see the head of this file.

    All processes pad to the length of the longest row of the whole batch. Where the last batch of an epoch is filled up, a
    process may have no row that is scored.

    Args:
        texts: the examples, such as `LabelledTexts`.
        batch_size: examples of all processes together, B.
        seed: seed of the order, at least 0.
        rank: index of this process.
        world_size: number of processes, W.
    """

    _resumed_with = "the same data, train.batch_size and train.seed"

    def __init__(self, texts: LabelledRows, *, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(batch_size=batch_size, rank=rank, world_size=world_size)
        self._texts, self._seed = texts, seed
        self._n_example = len(texts.lengths)
        self._window: tuple[tuple[int, int], list[np.ndarray]] | None = None  # the batches of an epoch's window

    @property
    def segments_per_epoch(self) -> int:
        return -(-self._n_example // self._batch_size)

    def read(self, tgt_len: int | None = None) -> Batch:
        window, place = divmod(self._n_read, WINDOW)
        if self._window is None or self._window[0] != (self._epoch, window):
            self._window = ((self._epoch, window), self._batches(window))
        chosen = self._window[1][place]
        self._move_on()
        return self._batch(np.append(chosen, np.full(self._batch_size - len(chosen), _NO_ROW)))

    def _batch(self, chosen: np.ndarray) -> Batch:
        """Return this process's rows of a step's examples, (B,); where there is none, the first one, which is not scored."""
        is_scored = chosen != _NO_ROW
        there = chosen[is_scored]
        mine = slice(self._rows.start, self._rows.stop)
        filled = np.where(is_scored, chosen, there[0])
        return self._texts.batch(filled[mine], is_scored[mine], int(self._texts.lengths[there].max()))

    def _batches(self, window: int) -> list[np.ndarray]:
        """Return the indices of each batch's examples, shortest first."""
        size = self._batch_size * WINDOW
        chosen = permutation(self._n_example, self._seed, self._epoch, 0)[window * size : (window + 1) * size]
        n_full = len(chosen) // self._batch_size
        chosen, rest = chosen[: n_full * self._batch_size], chosen[n_full * self._batch_size :]
        by_length = self._by_length(chosen).reshape(n_full, self._batch_size)
        order = permutation(n_full, self._seed, self._epoch, 1 + window)
        return [*by_length[order], *([self._by_length(rest)] if len(rest) else [])]

    def _by_length(self, chosen: np.ndarray) -> np.ndarray:
        return chosen[np.argsort(self._texts.lengths[chosen], kind="stable")]

    def _layout(self) -> dict[str, int | str]:
        return {
            "batch_size": self._batch_size,
            "n_examples": self._n_example,
            "checksum": self._texts.checksum,
            "seed": self._seed,
            "order": ORDER,
        }


class DocumentStream(LabelledStream):
    """Endless iterator over documents side by side, epoch after epoch; see the head of this file.

    Every row of every document is read and scored once in an epoch, and epochs may have different numbers of steps.

    Args:
        texts: the rows of all documents.
        documents: where documents begin among them, and where the last one ends, increasing, (n + 1,).
        batch_size: lanes of all processes together, B.
        seed: seed of the order of documents, at least 0.
        rank: index of this process.
        world_size: number of processes, W.
    """

    def __init__(
        self, texts: LabelledRows, documents: np.ndarray, *, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(texts, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)
        self._documents = documents
        self._lanes: tuple[int, np.ndarray] | None = None  # an epoch, and the rows of its steps

    @property
    def segments_per_epoch(self) -> int:
        return len(self._steps())

    def read(self, tgt_len: int | None = None) -> Batch:
        chosen = self._steps()[self._n_read]
        self._move_on()
        batch = self._batch(chosen)
        begins = torch.from_numpy(np.isin(chosen[self._rows.start : self._rows.stop], self._documents))
        n_pad = cast("Tensor", batch.rows.n_pad)
        starts = begins[:, None] & (torch.arange(batch.ids.shape[1]) == n_pad[:, None])
        return replace(batch, rows=Rows(n_pad, document_starts=starts))

    def _layout(self) -> dict[str, int | str]:
        return super()._layout() | {"documents": zlib.crc32(self._documents.tobytes())}

    def _steps(self) -> np.ndarray:
        """Return the row that each lane reads in each step of this epoch, int64 (n, B)."""
        if self._lanes is None or self._lanes[0] != self._epoch:
            self._lanes = self._epoch, self._dealt(permutation(len(self._documents) - 1, self._seed, self._epoch))
        return self._lanes[1]

    def _dealt(self, order: np.ndarray) -> np.ndarray:
        """Deal out documents, each to the lane that is free first, and return what `_steps` does."""
        free = [(0, lane) for lane in range(self._batch_size)]
        parts = []
        for first, end in zip(self._documents[order].tolist(), self._documents[order + 1].tolist(), strict=True):
            begin, lane = free[0]
            heapq.heapreplace(free, (begin + end - first, lane))
            parts.append((begin, lane, first, end))
        steps = np.full((max(free)[0], self._batch_size), _NO_ROW, np.int64)
        for begin, lane, first, end in parts:
            steps[begin : begin + end - first, lane] = np.arange(first, end)
        return steps
