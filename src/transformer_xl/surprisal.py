"""Scores as data: rows of the surprisal of lines, words and tokens, of pairs of sentences, and of last words.

A text that is scored alone follows a line end (a space if the vocabulary has none), so that its first token counts, too.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from transformer_xl.data.corpora import CHUNK_BYTES
from transformer_xl.data.labels import Example
from transformer_xl.data.text_files import Chunk, cut_chunks, numbered_lines
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CorpusError, TokenizerError
from transformer_xl.kernels.device import InferencePrecision
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.evaluation import Reading
from transformer_xl.reading.texts import windows
from transformer_xl.reading.token_nats import SideBySide, nats_in_parts

Per = Literal["line", "word", "token"]
"""What has a row."""

_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_WORDS = re.compile(r"[^\S\n]*(?:\S+|\n)|[^\S\n]+")  # a word and the space before it, or a line end


class Line(NamedTuple):
    """A line with its line end, or a part of a very long one; bytes that are not UTF-8 are lone surrogates in `text`."""

    number: int  # from 1
    text: str
    ids: np.ndarray  # int64 (n,)
    starts: np.ndarray  # place in `text` where each token begins, int64 (n,), ascending


def carried(
    blocks: Iterable[bytes],
    path: Path,
    model: LanguageModel,
    tokenizer: Tokenizer,
    reading: Reading,
    *,
    precision: InferencePrecision,
) -> Iterator[tuple[Line, np.ndarray]]:
    """Yield the lines of a text, named by `path`, with the nats that `txl eval --file` gives their tokens."""
    waiting: deque[Line] = deque()

    def parts() -> Iterator[np.ndarray]:
        for line in _lines(cut_chunks(blocks, CHUNK_BYTES), path, tokenizer):  # so tokens are those of `txl eval`
            waiting.append(line)
            yield line.ids

    for nats in nats_in_parts(model, parts(), reading, precision=precision):
        yield waiting.popleft(), nats.tokens


def alone(
    blocks: Iterable[bytes],
    path: Path,
    scorer: SideBySide,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    skip: int = 0,
    is_ready: Callable[[], bool] | None = None,
) -> Iterator[tuple[Line, np.ndarray]]:
    """Yield the lines of a text, named by `path`, with the nats of their tokens after nothing but a line end.

    Lines among the first `skip` may get NaN, unread. `is_ready` tells whether the next line is there without waiting.
    """
    n_done = 0
    lines = _lines((line for _, line in numbered_lines(blocks, f"'{path}'")), path, tokenizer)
    for window in windows(lines, batch_size, is_ready, size=lambda line: len(line.text)):
        n_done += len(window)
        if n_done > skip:
            yield from zip(window, _after_line_end([line.ids for line in window], scorer, tokenizer), strict=True)
        else:
            yield from ((line, np.full(len(line.ids), np.nan, np.float32)) for line in window)


def rows(scored: Iterable[tuple[Line, np.ndarray]], per: Per, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield a row for each line, word or token, in order; lines, words and tokens have the same sums.

    A word has the tokens that begin in it or in the space before it. A line end is a word of its own.
    """
    parts: list[tuple[Line, np.ndarray]] = []  # of a line that is not shown yet
    index = 0
    for line, nats in scored:
        if per == "line":
            parts.append((line, nats))
        else:
            for row in _words(line, nats) if per == "word" else _tokens(line, nats, tokenizer):
                index += 1
                yield {"line": line.number, per: index, **row}
        if line.text.endswith("\n"):
            yield from _whole(parts)
            parts, index = [], 0
    yield from _whole(parts)


def _whole(parts: Sequence[tuple[Line, np.ndarray]]) -> Iterator[dict[str, Any]]:
    if parts:
        text = "".join(line.text for line, _ in parts).removesuffix("\n").removesuffix("\r")
        yield {"line": parts[0][0].number, **_sum(np.concatenate([nats for _, nats in parts])), "text": whole_characters(text)}


def whole_characters(text: str) -> str:
    """Return a text with ? for bytes that are not UTF-8, because lone surrogates are no valid JSON."""
    return text.encode("utf-8", "replace").decode()


def _words(line: Line, nats: np.ndarray) -> Iterator[dict[str, Any]]:
    found = [each.group() for each in _WORDS.finditer(line.text)]
    begins = np.cumsum([0, *map(len, found[:-1])])
    for text, own in zip(found, np.split(nats, np.searchsorted(line.starts, begins[1:])), strict=True):
        if len(own):
            yield {**_sum(own), "text": whole_characters(text.strip() or text[-1])}


def _tokens(line: Line, nats: np.ndarray, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    for token, own in zip(line.ids.tolist(), np.split(nats, len(nats)) if len(nats) else (), strict=True):
        yield {"id": token, **_sum(own), "text": tokenizer.decode([token])}


def _sum(nats: np.ndarray) -> dict[str, Any]:
    known = nats[~np.isnan(nats)]
    total = float(known.sum(dtype=np.float64)) if len(known) else None
    return {"nats": total, "bits": None if total is None else total / math.log(2), "tokens": len(known)}


def keeps_places(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer tells where in a text its tokens begin, as rows of words need."""
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
            text, ids, starts = _encoded(Chunk(data, offset == 0, path, offset), tokenizer, keeps=keeps)
        except TokenizerError as error:
            raise CorpusError(f"'{path}', from byte {offset} on: {error}") from None
        offset += len(data)
        begin = first = 0
        for line in _LINES.findall(text):
            end = begin + len(line)
            last = int(np.searchsorted(starts, end))
            yield Line(number, line, ids[first:last], starts[first:last] - begin)
            begin, first, number = end, last, number + line.endswith("\n")


def _encoded(chunk: Chunk, tokenizer: Tokenizer, *, keeps: bool) -> tuple[str, np.ndarray, np.ndarray]:
    """Return text, ids, and the place in the text where each begins, or where its line begins if no more is known."""
    text = chunk.data.decode("utf-8", "surrogateescape") if tokenizer.reads_bytes else chunk.text()
    if keeps and tokenizer.reads_bytes:  # each byte is a token
        widths = [len(character.encode("utf-8", "surrogateescape")) for character in text]
        return text, tokenizer.encode_bytes(chunk.data), np.repeat(np.arange(len(text)), widths)
    if keeps:
        return text, *tokenizer.encode_with_offsets(text)[:2]
    lines = _LINES.findall(text)
    ids = [tokenizer.encode_bytes(line.encode("utf-8", "surrogateescape")) for line in lines]
    return text, np.concatenate(ids), np.repeat(np.cumsum([0, *map(len, lines[:-1])]), list(map(len, ids)))


def line_end(tokenizer: Tokenizer) -> np.ndarray:
    """Return the token that a text follows when it is scored alone, (1,); (0,) if there is neither line end nor space."""
    return tokenizer.encode(tokenizer.separator)[-1:]


def _after_line_end(texts: Sequence[np.ndarray], scorer: SideBySide, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the nats of all tokens of texts; NaN where nothing stands before them."""
    before = line_end(tokenizer)
    missing = np.full(1 - len(before), np.nan, np.float32)
    filled = iter(scorer.score([np.concatenate([before, ids]) for ids in texts if len(ids)]))
    return [np.concatenate([missing, next(filled).nats]) if len(ids) else missing[:0] for ids in texts]


def pair_rows(examples: Iterable[Example], scorer: SideBySide, tokenizer: Tokenizer, *, n: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each pair of sentences of `read_pairs`, scored alone, `n` side by side.

    `credit` is 1 if the first one is more probable, 0.5 if both are equally so, as two of the same tokens are.
    """
    for window in windows(examples, n):
        ids = [[_encode(text, each, tokenizer) for text in (each.text, each.pair or "")] for each in window]
        nats = iter([_sum(own)["nats"] or 0.0 for own in _after_line_end(list(chain(*ids)), scorer, tokenizer)])
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
            yield {**_sum(own.nats), "credit": float(own.likeliest.all()), "text": example.text.rpartition(" ")[2]}


def _encode(text: str, example: Example, tokenizer: Tokenizer) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except TokenizerError as error:
        raise CorpusError(f"{example.place}: {error}") from None
