"""Rows of the surprisal of a text: of its lines, words, characters and tokens, or of spans of it.

The probability of a word is not that of its tokens, which is the probability that a word begins so: "th" would be likelier than
"the", and all words together likelier than 1. It needs the end, too. Where a new word begins with a space, the space after a
word ends it, and that before it was known when the word before ended:

    -log p(word) = Σ_t -log p(token t | all before) + e(after the word) - e(before the word)
    e(place)     = -log Σ_w p(w | all before the place), over the tokens w that begin a word or end a line

After a line end a word begins in any case, and so e is 0. The words of a text have the sum of its tokens.

Reference: Oh and Schuler 2024, "Leading Whitespaces of Language Models' Subword Vocabulary Pose a Confound for Calculating Word
Probabilities" (arXiv 2406.10851); Pimentel and Meister 2024, "How to Compute the Probability of a Word" (arXiv 2406.14561).

Shapes: n tokens of a line, V vocabulary.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from transformer_xl.data.text_files import FileRange, read_lines
from transformer_xl.errors import ConfigError, CorpusError, shown
from transformer_xl.tokenizers.base import Tokenizer

Per = Literal["line", "word", "char", "token"]
"""What has a row."""

_COUNTED = 1 << 22  # tokens
_BEGINNING = -1
"""In place of the id before the first token of a text."""


class Line(NamedTuple):
    """A line with its line end, or a part of a very long one; bytes that are not UTF-8 are lone surrogates in `text`."""

    number: int  # from 1
    text: str
    ids: np.ndarray  # int64 (n,)
    starts: np.ndarray  # place in `text` where each token begins, int64 (n,), ascending
    stops: np.ndarray  # and where it ends


class ScoredLine(NamedTuple):
    """A line with the nats of its tokens and, for words, of a word's end before each; after the last, too, if the text ends."""

    line: Line
    nats: np.ndarray  # fp32 (n,); NaN where nothing predicts a token
    ends: np.ndarray | None = None  # fp32 (n,), or (n + 1,) where a text ends


@dataclass
class Sum:
    """Nats of the tokens that something is made of, as far as they were predicted."""

    nats: float = 0.0
    tokens: int = 0

    def add(self, nats: np.ndarray) -> None:
        """Add tokens; NaN means that nothing predicted one."""
        known = nats[~np.isnan(nats)]
        self.nats += float(known.sum(dtype=np.float64))
        self.tokens += len(known)

    def row(self, more: float = 0.0) -> dict[str, Any]:
        """Return the columns that all rows have; `more` nats belong to it. Nothing is known of what has no tokens."""
        total = self.nats + more if self.tokens else None
        return {"nats": total, "bits": None if total is None else total / math.log(2), "tokens": self.tokens}


def sum_of(nats: np.ndarray) -> Sum:
    """Return the sum of some tokens."""
    total = Sum()
    total.add(nats)
    return total


def whole_characters(text: str) -> str:
    """Return a text with ? for bytes that are not UTF-8, because lone surrogates are no valid JSON."""
    return text.encode("utf-8", "replace").decode()


class Borders:
    """Where words begin and end in a vocabulary: its pieces begin with white space, or are line ends or whole words.

    Raises:
        ConfigError: no piece of the vocabulary begins a word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = [tokenizer.piece(i).decode("utf-8", "replace") for i in range(tokenizer.vocab_size)]
        self._begins_word = tokenizer.begins_word()
        if not self._begins_word.any():
            why = "no token of this vocabulary begins a word or ends a line"
            raise ConfigError(f"--per word: {why}; use --per line, char or token")
        ends_line = np.array([text.endswith("\n") for text in texts])
        is_space = np.array([not text.strip() for text in texts]) & ~ends_line
        # by the id before a place, which may be _BEGINNING
        self._after_line = np.append(ends_line, True)
        self._in_space = np.append(is_space, False)
        self._is_certain = self._after_line | self._in_space | self._begins_word.all()

    @property
    def event(self) -> np.ndarray | None:
        """The ids that begin a word or end a line, int64 (E,); None if all do, and so nothing is to be scored."""
        return None if self._begins_word.all() else np.flatnonzero(self._begins_word)

    def firsts(self, ids: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Return which of the tokens `ids` (n,) begin a word, by those before them, bool (n,).

        All white space before a word belongs to it, whether as a part of its first token or as tokens of its own.
        """
        return self._after_line[before] | (self._begins_word[ids] & ~self._in_space[before])

    def ends(self, nats: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Return what it costs that a word ends at each place, (n,); nothing where that is known from the token before it."""
        return np.where(self._is_certain[before], 0.0, nats)


@dataclass
class _Word:
    line: int
    index: int
    end_before: float
    text: str = ""
    sum: Sum = field(default_factory=Sum)

    def add(self, nats: np.ndarray, text: str) -> None:
        self.sum.add(nats)
        self.text += text

    def row(self, end_after: float) -> dict[str, Any]:
        row = self.sum.row(end_after - self.end_before)
        tokens, text = row.pop("tokens"), whole_characters(self.text.strip() or self.text[-1:])
        prefix = self.sum.row()["nats"]
        return {"line": self.line, "word": self.index, **row, "nats_prefix": prefix, "tokens": tokens, "text": text}


def word_rows(scored: Iterable[ScoredLine], borders: Borders) -> Iterator[dict[str, Any]]:
    """Yield a row for each word, with the space before it; a line end is a word of its own.

    `nats_prefix` are those of its tokens alone.
    """
    word: _Word | None = None
    last, index, begins_line = _BEGINNING, 0, True
    for line, nats, ends in scored:
        assert ends is not None
        n, before = len(line.ids), np.append(last, line.ids)
        costs = borders.ends(ends, before[: len(ends)]).tolist()
        is_first = borders.firsts(line.ids, before[:n])
        is_first[:1] |= begins_line  # even if the vocabulary has no piece for line ends
        firsts = np.flatnonzero(is_first)
        places = np.append(line.starts[firsts], len(line.text)).tolist()
        parts = np.split(nats, firsts)
        if word is not None and len(parts[0]):
            word.add(parts[0], line.text[: places[0]])
        for first, part, start, stop in zip(firsts.tolist(), parts[1:], places, places[1:], strict=False):
            if word is not None:
                yield word.row(costs[first])
            index += 1
            word = _Word(line.number, index, costs[first])
            word.add(part, line.text[start:stop])
        last = int(before[-1])
        if len(ends) > n:
            if word is not None:
                yield word.row(costs[n])
            word, last = None, _BEGINNING
        begins_line = line.text.endswith("\n") or (begins_line and not n)
        index = 0 if begins_line else index


def unigram_nats(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the nats of each token by its count in a text: -log (count + 1) / (N + V), so that none is impossible, (V,)."""
    parts = np.array_split(ids, len(ids) // _COUNTED + 1)  # of a mapped file
    counts = np.sum([np.bincount(part, minlength=vocab_size) for part in parts], axis=0) + 1
    return np.log(counts.sum() / counts)


def rows(
    scored: Iterable[ScoredLine], per: Per, tokenizer: Tokenizer, *, unigram: np.ndarray | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each line, character or token, in order; all have the same sums.

    Characters that share a token, or a part of one, have one row. With `unigram`, the `unigram_nats` (V,), lines also have the
    nats of this model for the same tokens.
    """
    parts: list[ScoredLine] = []  # of a line that is not shown yet
    index = 0
    for each in scored:
        if per == "line":
            parts.append(each)
        else:
            for row in _characters(each) if per == "char" else _tokens(each, tokenizer):
                index += 1
                yield {"line": each.line.number, per: index, **row}
        if each.line.text.endswith("\n"):
            yield from _whole(parts, unigram)
            parts, index = [], 0
    yield from _whole(parts, unigram)


def _whole(parts: list[ScoredLine], unigram: np.ndarray | None) -> Iterator[dict[str, Any]]:
    if parts:
        text = "".join(each.line.text for each in parts).removesuffix("\n").removesuffix("\r")
        nats = np.concatenate([each.nats for each in parts])
        row = {"line": parts[0].line.number, **sum_of(nats).row()}
        if unigram is not None:
            costs = np.concatenate([unigram[each.line.ids] for each in parts])
            row["nats_unigram"] = sum_of(np.where(np.isnan(nats), np.nan, costs)).row()["nats"]
        yield {**row, "text": whole_characters(text)}


def _characters(scored: ScoredLine) -> Iterator[dict[str, Any]]:
    """Yield the shortest runs of characters that are made of whole tokens; space that no token has goes to the next run."""
    line, nats, _ = scored
    starts, stops = line.starts[1:], line.stops[:-1]
    borders = np.flatnonzero((starts >= stops) & (stops > line.starts[:-1])) + 1  # what has no place goes to the next run, too
    ends = np.append(line.stops[borders - 1], line.stops[-1:]).tolist()
    begin = 0
    for end, part in zip(ends, np.split(nats, borders), strict=False):
        yield {**sum_of(part).row(), "text": whole_characters(line.text[begin:end])}
        begin = end


def _tokens(scored: ScoredLine, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    for i, token in enumerate(scored.line.ids.tolist()):
        yield {"id": token, **sum_of(scored.nats[i : i + 1]).row(), "text": tokenizer.decode([token])}


@dataclass
class Span:
    """A part of a text, from one character to before another, counted from 0 through the whole text."""

    index: int
    start: int
    end: int
    text: str = ""
    sum: Sum = field(default_factory=Sum)

    def row(self) -> dict[str, Any]:
        """Return its columns."""
        place = {"span": self.index, "start": self.start, "end": self.end}
        return {**place, **self.sum.row(), "text": whole_characters(self.text)}


def read_spans(path: Path) -> Iterator[Span]:
    """Yield the spans of a file, whose lines have two numbers, start and end, in the order of the starts."""
    last = 0
    for index, line in enumerate(read_lines(FileRange(path)), start=1):
        numbers = line.split()
        if len(numbers) != 2 or not all(number.isdigit() and len(number) < 20 for number in numbers):
            what = shown(line.decode("utf-8", "replace"))
            raise CorpusError(f"'{path}' line {index}: {what} is no span; write two numbers, start and end, with space between")
        start, end = map(int, numbers)
        if not last <= start < end:
            why = "an end after the start" if start >= end else "starts in ascending order; sort the lines"
            raise CorpusError(f"'{path}' line {index}: {start} {end}: spans need {why}")
        last = start
        yield Span(index, start, end)


def span_rows(scored: Iterable[ScoredLine], spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Yield a row for each span: the sum of the tokens that begin in it; a space before a piece does not count as its begin."""
    source = iter(spans)
    waiting: deque[Span] = deque()
    following, offset = next(source, None), 0
    for line, nats, _ in scored:
        stop = offset + len(line.text)
        while following and following.start < stop:
            waiting.append(following)
            following = next(source, None)
        for span in waiting:
            begin, end = max(span.start - offset, 0), max(span.end - offset, 0)
            first, last = np.searchsorted(line.starts, [begin, end]).tolist()
            span.sum.add(nats[first:last])
            span.text += line.text[begin:end]
        while waiting and waiting[0].end <= stop:
            yield waiting.popleft().row()
        offset = stop
    if span := waiting[0] if waiting else following:
        raise CorpusError(f"span {span.index} ({span.start} to {span.end}) reaches beyond the text's {offset:,} characters")
