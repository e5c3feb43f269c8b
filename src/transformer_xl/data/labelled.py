"""Labelled texts: examples, the rows of ids that they become, and the batches that a model is taught with.

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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from transformer_xl.batch import NOT_SCORED, Batch, Rows, TaskRows
from transformer_xl.config.model import HeadConfig, ModelConfig, XLNetConfig
from transformer_xl.data.labels import Example, labels_of
from transformer_xl.data.order import ORDER, permutation
from transformer_xl.data.pairs import shortened
from transformer_xl.data.spaceless import join_words
from transformer_xl.data.streams import EndlessStream
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError, shown
from transformer_xl.tokenizers.kinds import SentencePieceTokenizer, Tokenizer

CHOICE_LEN = 128
"""Of a choice, the last so many tokens are read: the end of a question and its answer. XLNet's `run_race.py` has the same."""

WINDOW = 64
"""Batches among which examples are sorted by length."""

_NO_ROW = -1  # of a lane that reads nothing


@dataclass(frozen=True)
class Row:
    """The ids of a text, or of two, with what stands between and after them."""

    ids: np.ndarray  # int32 (n,)
    segments: np.ndarray  # int8 (n,), the text that each token belongs to (XLNet); all zeros for other models
    may_answer: np.ndarray | None = None  # bool (n,), tokens that an answer may consist of; None: all
    words: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # (W,), the token that stands for each word


class Layout:
    r"""How texts become rows of ids.

    For an XLNet: `A <sep> <cls>` or `A <sep> B <sep> <cls>`, with segments 0 for A and its <sep>, 1 for B and its <sep>, and 2
    for <cls>. Line ends become spaces, as in the original. For other models: A, a line end, B, a line end; a vocabulary without
    line ends has a space instead, or nothing.

    A row that is too long loses tokens at the end of its longer text until both fit, as the original does it. Of a choice the
    last `CHOICE_LEN` tokens are kept, or half of the room, and the text before it is shortened.

    Args:
        tokenizer: the model's.
        kind: the model's kind, such as "xlnet".
        max_len: the most tokens of a row, special ones included; None: any number.
        of_words: whether words have labels, so that rows say which token stands for each.

    Example:
        >>> from transformer_xl.tokenizers.kinds import ByteTokenizer
        >>> layout = Layout(ByteTokenizer(), "transformer_xl", max_len=8)
        >>> bytes(layout.row(layout.encode("a text"), layout.encode("four")).ids.tolist())
        b'a t\nfou\n'
    """

    def __init__(self, tokenizer: Tokenizer, kind: str, *, max_len: int | None = None, of_words: bool = False) -> None:
        self.tokenizer, self.max_len, self.of_words = tokenizer, max_len, of_words
        self.is_xlnet = kind == XLNetConfig.kind
        if self.is_xlnet:
            self.sep, self.end = _special_pieces(tokenizer)
        else:
            self.sep, self.end = tokenizer.encode(tokenizer.separator).astype(np.int32), np.empty(0, np.int32)
        if max_len is not None and max_len < (least := self.n_special(2) + 2):
            raise ConfigError(f"task.max_len ({max_len}) must be at least {least}, so that two texts fit; raise it")

    @classmethod
    def of(cls, config: ModelConfig, tokenizer: Tokenizer) -> "Layout":
        """Return the layout that belongs to a model with a head."""
        head = config.head
        return cls(tokenizer, config.kind, max_len=head and head.max_len, of_words=head is not None and head.kind == "tokens")

    def n_special(self, n_text: int) -> int:
        """Return how many tokens of a row belong to none of its texts."""
        return n_text * len(self.sep) + len(self.end)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of one text, int32 (n,), without anything before or after it.

        Raises:
            TokenizerError: the text has a character that the tokenizer cannot represent.
        """
        text = text.strip()
        return self.tokenizer.encode(text.replace("\n", " ") if self.is_xlnet else text).astype(np.int32)

    def row(self, first: np.ndarray, second: np.ndarray | None = None, *, is_choice: bool = False) -> Row:
        """Return one or two encoded texts as a row, shortened if it is too long: `is_choice` keeps the end of `second`."""
        n_first, n_second = self._kept(len(first), None if second is None else len(second), is_choice)
        parts = [first[:n_first], self.sep]
        if second is not None:
            parts += [second[len(second) - n_second :] if is_choice else second[:n_second], self.sep]
        ids = np.concatenate([*parts, self.end]).astype(np.int32, copy=False)
        segments = np.zeros(len(ids), np.int8)
        if self.is_xlnet:
            segments[n_first + len(self.sep) :] = 1
            segments[len(ids) - len(self.end) :] = 2
        return Row(ids, segments)

    def length(self, n_first: int, n_second: int | None = None, *, is_choice: bool = False) -> int:
        """Return the tokens of the row that texts of so many tokens make."""
        return sum(self._kept(n_first, n_second, is_choice)) + self.n_special(1 if n_second is None else 2)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids of one text as it is, and the characters from which each comes; see the tokenizer's method."""
        return self.tokenizer.encode_with_offsets(text.replace("\n", " ") if self.is_xlnet else text)

    def row_of_words(self, example: Example) -> Row:
        r"""Return the row of an example's words, joined as text is written, and the token that stands for each.

        That is the first piece of a word for an XLNet, and for other models, which see only what is before, the last one. A
        word that has no piece of its own, such as one of characters that a vocabulary drops, or the second word of a piece that
        spans two, has the piece beside it.

        Example:
            >>> from transformer_xl.tokenizers.kinds import ByteTokenizer
            >>> row = Layout(ByteTokenizer(), "lstm").row_of_words(Example("to be", words=("to", "be")))
            >>> bytes(row.ids.tolist()), row.words.tolist()
            (b'to be\n', [1, 4])

        Raises:
            CorpusError: the text is longer than what is read, or nothing of it can be encoded.
            TokenizerError: it has a character that the tokenizer cannot represent, or the tokenizer loses places.
        """
        joined = replace(example, text=join_words(example.words, self._space))
        try:
            ids, starts, ends = self.encode_with_offsets(joined.text)
        except TokenizerError as error:
            raise TokenizerError(f"{example.where}{error}") from None
        if not len(ids):
            raise CorpusError(f"{example.where}nothing of {shown(joined.text)} can be encoded; leave it out")
        if self.max_len is not None and (n := len(ids) + self.n_special(1)) > self.max_len:
            raise CorpusError(
                f"{example.where}this sentence of {len(joined.words):,} words has {n:,} tokens, but {self.max_len:,} are "
                "read at most (max_len); divide it, or read on with memory: model.mem_len above 0, and max_len none"
            )
        if self.is_xlnet:
            words = np.searchsorted(ends, joined.word_starts, "right")
        else:
            word_ends = [start + len(word) for start, word in zip(joined.word_starts, joined.words, strict=True)]
            words = np.searchsorted(starts, word_ends, "left") - 1
        return replace(self.row(ids.astype(np.int32)), words=words.clip(0, len(ids) - 1))

    @cached_property
    def _space(self) -> str:
        """What divides words: nothing if the vocabulary has no space."""
        try:
            self.tokenizer.encode(" ")
        except TokenizerError:
            return ""
        return " "

    def rows(self, example: Example) -> tuple[Row, ...]:
        """Return an example as one row, or as one for each choice."""
        if self.of_words and example.words:
            return (self.row_of_words(example),)
        first, *others = [self.encode_at(text, example.place) for text in _texts_of(example)]
        return tuple(self.row(first, other, is_choice=bool(example.choices)) for other in others or [None])

    def encode_at(self, text: str, place: str) -> np.ndarray:
        """Return the ids of one text; an error names its place."""
        try:
            return self.encode(text)
        except TokenizerError as error:
            raise TokenizerError(f"{place}: {error}" if place else str(error)) from None

    def _kept(self, n_first: int, n_second: int | None, is_choice: bool) -> tuple[int, int]:
        """Return how many tokens of both texts are read."""
        if self.max_len is None or n_first + (n_second or 0) + self.n_special(1 if n_second is None else 2) <= self.max_len:
            return n_first, n_second or 0
        if n_second is None:
            return self.max_len - self.n_special(1), 0
        room = self.max_len - self.n_special(2)
        if not is_choice:
            return shortened(n_first, n_second, room)
        n_second = min(n_second, CHOICE_LEN, room // 2)
        return min(n_first, room - n_second), n_second


def _special_pieces(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise ConfigError(
            f"an XLNet reads texts with <sep> and <cls>, which a vocabulary of kind '{tokenizer.kind}' lacks; give the run or "
            "model with its own tokenizer"
        )
    try:
        return np.array([tokenizer.id_of("<sep>")], np.int32), np.array([tokenizer.id_of("<cls>")], np.int32)
    except TokenizerError as error:
        raise ConfigError(
            f"an XLNet reads texts with <sep> and <cls>: {error}; use the vocabulary it was trained with"
        ) from None


def _texts_of(example: Example) -> tuple[str, ...]:
    return (example.text, *(example.choices or (() if example.pair is None else (example.pair,))))


def batch_of(rows: Sequence[tuple[Row, ...]], labels: Tensor, *, length: int | None = None) -> Batch:
    """Return rows with padding at their left.

    Args:
        rows: one tuple per example, of a row, or of equally many for each of its C choices.
        labels: classification and choice int64 (B,), multilabel float32 (B, n_label) of 0 and 1, regression float32 (B,),
            span int64 (B, 3): first and last token of the answer, counted from the row's left end with its padding, and whether
            there is none (1), words int64 (B, W). -100, or NaN where they are floats, is not scored.
        length: tokens of a row, L; None: those of the longest one.

    Returns:
        ids (B, L), or (B, C, L) of choices, with segments and `may_answer` alike. A row has one loss, or one for each word.
    """
    n_choice = len(rows[0])
    flat = [row for choices in rows for row in choices]
    length = max(len(row.ids) for row in flat) if length is None else length
    ids = np.zeros((len(flat), length), np.int64)
    segments = np.zeros((len(flat), length), np.int64)
    may_answer = np.zeros((len(flat), length), bool)
    for i, row in enumerate(flat):
        begin = length - len(row.ids)
        ids[i, begin:], segments[i, begin:] = row.ids, row.segments
        may_answer[i, begin:] = True if row.may_answer is None else row.may_answer
    n_pad = np.array([length - len(row.ids) for row in flat], np.int64)
    shape = (len(rows), n_choice) if n_choice > 1 else (len(rows),)

    def shaped(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).reshape(*shape, *array.shape[1:])

    n_word = max(len(row.words) for row in flat)
    words = np.zeros((len(flat), n_word), np.int64)
    for row, pad, places in zip(flat, n_pad, words, strict=True):
        places[: len(row.words)] = pad + row.words
    extra = TaskRows(shaped(segments), shaped(may_answer), words=torch.from_numpy(words) if n_word else None)
    return Batch(shaped(ids), labels, Rows(n_pad=shaped(n_pad)), extra, per_row=not n_word)


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
        n_text, last = len(_texts_of(examples[0])), ("", -1)
        for example in examples:
            texts = _texts_of(example)
            if len(texts) != n_text:
                raise ConfigError(
                    f"{example.place}: {len(texts)} texts, but {n_text} in {examples[0].place}; give all examples equally many"
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
