"""Texts as rows of ids for a model with a head: what stands between them, what is cut off, and rows padded to a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from transformer_xl.batch import Batch, Rows, TaskRows
from transformer_xl.config.model import ModelConfig, XLNetConfig
from transformer_xl.data.labels import Example
from transformer_xl.data.pairs import shortened
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError, shown
from transformer_xl.tokenizers.kinds import SentencePieceTokenizer, Tokenizer
from transformer_xl.tokenizers.spaceless import join_words

CHOICE_LEN = 128
"""Of a choice, the last so many tokens are read: the end of a question and its answer. XLNet's `run_race.py` has the same."""


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
        first, *others = [self.encode_at(text, example.place) for text in texts_of(example)]
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


def texts_of(example: Example) -> tuple[str, ...]:
    """Return the texts of an example: one, or two, or what is common to all choices and each of these."""
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
