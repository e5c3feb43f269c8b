"""Score texts as data: their lines for `rows`, pairs of sentences, and last words.

A text that is scored alone follows a line end (a space if the vocabulary has none), so that its first token counts, too.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.data.corpora import CHUNK_BYTES
from transformer_xl.data.labels import Example
from transformer_xl.data.text_files import Chunk, cut_chunks, numbered_lines
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CorpusError, TokenizerError
from transformer_xl.kernels.device import InferencePrecision
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.evaluation import Reading
from transformer_xl.reading.rows import Borders, Line, ScoredLine, sum_of
from transformer_xl.reading.texts import windows
from transformer_xl.reading.token_nats import SideBySide, nats_in_parts

_LINES = re.compile(r"[^\n]*\n|[^\n]+")


def carried(
    blocks: Iterable[bytes],
    path: Path,
    model: LanguageModel,
    tokenizer: Tokenizer,
    reading: Reading,
    *,
    precision: InferencePrecision,
    borders: Borders | None = None,
) -> Iterator[ScoredLine]:
    """Yield the lines of a text, named by `path`, with the nats that `txl eval --file` gives their tokens.

    With `borders` of words also those of their ends, at last of a line without tokens.
    """
    waiting: deque[Line] = deque()

    def parts() -> Iterator[np.ndarray]:
        for line in _lines(cut_chunks(blocks, CHUNK_BYTES), path, tokenizer):  # so tokens are those of `txl eval`
            waiting.append(line)
            yield line.ids
        if borders:
            waiting.append(Line(0, "", *np.zeros((3, 0), np.int64)))
            yield np.zeros(1, np.int64)  # any token: the model is asked what follows the text

    for nats in nats_in_parts(model, parts(), reading, precision=precision, event=borders and borders.event):
        line = waiting.popleft()
        yield ScoredLine(line, nats.tokens[: len(line.ids)], _ends(borders, nats.event, len(nats.tokens)))


def alone(
    blocks: Iterable[bytes],
    path: Path,
    scorer: SideBySide,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    skip: int = 0,
    is_ready: Callable[[], bool] | None = None,
    borders: Borders | None = None,
) -> Iterator[ScoredLine]:
    """Yield the lines of a text, named by `path`, with the nats of their tokens after nothing but a line end.

    Lines among the first `skip` may get NaN, unread. `is_ready` tells whether the next line is there without waiting. With
    `borders` of words also the nats of their ends, before each token and after the last.
    """
    n_done = 0
    lines = _lines((line for _, line in numbered_lines(blocks, f"'{path}'")), path, tokenizer)
    for window in windows(lines, batch_size, is_ready, size=lambda line: len(line.text)):
        n_done += len(window)
        if n_done > skip:
            nats = _after_line_end([line.ids for line in window], scorer, tokenizer, borders)
            yield from (ScoredLine(line, *of_line) for line, of_line in zip(window, nats, strict=True))
        else:
            yield from (ScoredLine(line, np.full(len(line.ids), np.nan, np.float32)) for line in window)


def _ends(borders: Borders | None, nats: np.ndarray | None, n: int) -> np.ndarray | None:
    """Return the nats of a word's end at `n` places; 0 where every token begins a word, so that nothing was scored."""
    return np.zeros(n, np.float32) if borders and nats is None else nats


def keeps_places(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer tells where in a text its tokens begin, as rows of words, characters and spans need."""
    try:
        tokenizer.encode_with_offsets("")
    except TokenizerError:
        return False
    return True


def _lines(parts: Iterable[bytes], path: Path, tokenizer: Tokenizer) -> Iterator[Line]:
    """Encode each part of a text as a whole, and divide it into lines."""
    number, offset, keeps = 1, 0, keeps_places(tokenizer)
    for data in parts:
        try:
            text, *columns = _encoded(Chunk(data, offset == 0, path, offset), tokenizer, keeps=keeps)
        except TokenizerError as error:
            raise CorpusError(f"'{path}', from byte {offset} on: {error}") from None
        offset += len(data)
        ids, starts, stops = columns
        begin = first = 0
        for line in _LINES.findall(text):
            end = begin + len(line)
            last = int(np.searchsorted(starts, end))
            yield Line(number, line, ids[first:last], starts[first:last] - begin, stops[first:last] - begin)
            begin, first, number = end, last, number + line.endswith("\n")


def _encoded(chunk: Chunk, tokenizer: Tokenizer, *, keeps: bool) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Return text, ids, and the place in the text where each begins and ends, or where its line begins if no more is known."""
    text = chunk.data.decode("utf-8", "surrogateescape") if tokenizer.reads_bytes else chunk.text()
    if keeps and tokenizer.reads_bytes:  # each byte is a token
        widths = [len(character.encode("utf-8", "surrogateescape")) for character in text]
        starts = np.repeat(np.arange(len(text)), widths)
        return text, tokenizer.encode_bytes(chunk.data), starts, starts + 1
    if keeps:
        return text, *tokenizer.encode_with_offsets(text)
    lines = _LINES.findall(text)
    ids = [tokenizer.encode_bytes(line.encode("utf-8", "surrogateescape")) for line in lines]
    starts = np.repeat(np.cumsum([0, *map(len, lines[:-1])]), list(map(len, ids)))
    return text, np.concatenate(ids), starts, starts


def line_end(tokenizer: Tokenizer) -> np.ndarray:
    """Return the token that a text follows when it is scored alone, (1,); (0,) if there is neither line end nor space."""
    return tokenizer.encode(tokenizer.separator)[-1:]


def _after_line_end(
    texts: Sequence[np.ndarray], scorer: SideBySide, tokenizer: Tokenizer, borders: Borders | None = None
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Return the nats (n,) of all tokens of texts; NaN where nothing stands before them. With `borders` also of word ends."""
    before, after = line_end(tokenizer), np.zeros(1 if borders else 0, np.int64)  # any token, to be asked what follows
    missing = np.full(1 - len(before), np.nan, np.float32)
    filled = [np.concatenate([before, ids, after]) for ids in texts if len(ids)]
    scores = iter(scorer.score(filled, event=borders and borders.event))
    found: list[tuple[np.ndarray, np.ndarray | None]] = []
    for ids in texts:
        nats, event = missing[:0], None
        if len(ids):
            score = next(scores)
            nats = np.concatenate([missing, score.nats])[: len(ids)]
            event = None if score.event is None else np.concatenate([missing, score.event])
        found.append((nats, _ends(borders, event, len(ids) + 1)))
    return found


def pair_rows(examples: Iterable[Example], scorer: SideBySide, tokenizer: Tokenizer, *, n: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each pair of sentences of `read_pairs`, scored alone, `n` side by side.

    `credit` is 1 if the first one is more probable, 0.5 if both are equally so, as two of the same tokens are.
    """
    for window in windows(examples, n):
        ids = [[_encode(text, each, tokenizer) for text in (each.text, each.pair or "")] for each in window]
        nats = iter([sum_of(own).nats for own, _ in _after_line_end(list(chain(*ids)), scorer, tokenizer)])
        for example, (good_ids, bad_ids) in zip(window, ids, strict=True):
            good, bad = next(nats), next(nats)
            bad = good if np.array_equal(good_ids, bad_ids) else bad  # neighbors may round differently
            credit = 0.5 if good == bad else float(good < bad)
            yield {"nats_good": good, "nats_bad": bad, "credit": credit, "good": example.text, "bad": example.pair}


def last_word_rows(
    examples: Iterable[Example], scorer: SideBySide, tokenizer: Tokenizer, *, n: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for the last word of each text, with the space before it.

    `credit` is 1 if each of its tokens is the likeliest one.
    """
    for window in windows(examples, n):
        ids = [_encode(each.text, each, tokenizer) for each in window]
        n_before = [len(_encode(each.text.rpartition(" ")[0], each, tokenizer)) for each in window]
        if one := next((each for each, own, k in zip(window, ids, n_before, strict=True) if not 0 < k < len(own)), None):
            raise CorpusError(f"{one.place}: the text has one word; give one with words before the last")
        texts = [np.concatenate([line_end(tokenizer), own]) for own in ids]
        asked = [len(own) - k for own, k in zip(ids, n_before, strict=True)]
        for example, own in zip(window, scorer.score(texts, n_asked=asked, likeliest=True), strict=True):
            yield {**sum_of(own.nats).row(), "credit": float(own.likeliest.all()), "text": example.text.rpartition(" ")[2]}


def _encode(text: str, example: Example, tokenizer: Tokenizer) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except TokenizerError as error:
        raise CorpusError(f"{example.place}: {error}") from None
