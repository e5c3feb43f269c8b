"""Score texts as data: their lines for `rows`, pairs of sentences, and last words.

A text that is scored alone follows a line end (a space if the vocabulary has none), so that its first token counts, too. An
XLNet fills each token of such a text as a gap (`gaps.py`).
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat, tee
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.data.corpora import CHUNK_BYTES
from transformer_xl.data.labels import Example
from transformer_xl.data.text_files import Chunk, cut_chunks, numbered_lines
from transformer_xl.errors import CorpusError, TokenizerError
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.gaps import gap_nats
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.rows import Borders, Line, ScoredLine, Sum, sum_of
from transformer_xl.reading.texts import Ending, Nats, nats
from transformer_xl.tokenizers.base import Tokenizer

_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_NO_LINE = Line(0, "", *np.zeros((3, 0), np.int64))
_ANY_TOKEN = np.zeros(1, np.int64)  # after a text, so that the model is asked what follows


def carried(
    blocks: Iterable[bytes],
    path: Path,
    model: LanguageModel,
    tokenizer: Tokenizer,
    reading: Reading,
    *,
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

    event = borders and borders.event
    for own in nats(model, parts(), reading, carried=True, event=event, asks_after=borders is not None):
        line = waiting.popleft() if waiting else _NO_LINE
        yield ScoredLine(line, own.tokens[: len(line.ids)], _ends(borders, own.event, len(own.tokens)))


def alone(
    blocks: Iterable[bytes],
    path: Path,
    model: LanguageModel | XLNet,
    tokenizer: Tokenizer,
    reading: Reading,
    *,
    skip: int = 0,
    is_ready: Callable[[], bool] | None = None,
    borders: Borders | None = None,
) -> Iterator[ScoredLine]:
    """Yield the lines of a text, named by `path`, with the nats of their tokens after nothing but a line end.

    Lines among the first `skip` may get NaN, unread. `is_ready` tells whether the next line is there without waiting. With
    `borders` of words also the nats of their ends, before each token and after the last, for which lines are read
    twice by models in which one more token in a segment changes the others.
    """
    waiting: deque[Line] = deque()

    def texts() -> Iterator[np.ndarray]:
        for line in _lines((line for _, line in numbered_lines(blocks, f"'{path}'")), path, tokenizer):
            waiting.append(line)
            yield line.ids

    for of_line in _after_line_end(texts(), model, tokenizer, reading, borders, skip=skip, is_ready=is_ready):
        yield ScoredLine(waiting.popleft(), *of_line)


def _ends(borders: Borders | None, nats: np.ndarray | None, n: int) -> np.ndarray | None:
    """Return the nats of a word's end at `n` places; 0 where every token begins a word, so that nothing was scored."""
    return np.zeros(n, np.float32) if borders and nats is None else nats


def _can_lengthen(model: LanguageModel) -> bool:
    """Return whether a segment's tokens get the same nats if one more follows; not if positions count from its end."""
    return model.keeps_keys or model.carries_state


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
    texts: Iterable[np.ndarray],
    model: LanguageModel | XLNet,
    tokenizer: Tokenizer,
    reading: Reading,
    borders: Borders | None = None,
    **how: Any,
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield the nats (n,) of all tokens of texts; NaN where nothing stands before them. With `borders` also of word ends."""
    if isinstance(model, XLNet):  # which sees where a word ends
        yield from ((own, _ends(borders, None, len(own) + 1)) for own in gap_nats(model, texts, tokenizer, reading, **how))
        return
    before, event = line_end(tokenizer), borders and borders.event
    reads_longer = event is not None and _can_lengthen(model)
    reads_twice = event is not None and not reads_longer
    missing = np.full(1 - len(before), np.nan, np.float32)
    sizes: deque[int] = deque()

    def sized() -> Iterator[np.ndarray]:
        for ids in texts:
            sizes.append(len(ids))
            yield ids

    def read(texts: Iterable[np.ndarray], *, longer: bool, only_end: bool = False) -> Iterator[Nats]:
        after = _ANY_TOKEN[: int(longer)]

        def filled() -> Iterator[np.ndarray | Ending]:
            for ids in texts:
                whole = np.concatenate([before, ids, after])
                yield Ending(_ANY_TOKEN, 0) if not len(ids) else Ending(whole, 1) if only_end else whole

        return nats(model, filled(), reading, event=event, **how)

    once, again = tee(sized()) if reads_twice else (sized(), None)
    ends = repeat(None) if again is None else read(again, longer=True, only_end=True)
    for own, end in zip(read(once, longer=reads_longer), ends, strict=False):
        n = sizes.popleft()
        of_event = [x.event for x in (own, end) if x is not None and x.event is not None]
        costs = np.concatenate([missing, *of_event]) if of_event and n else None
        yield np.concatenate([missing, own.tokens])[:n], _ends(borders, costs, n + 1)


def pair_rows(
    examples: Iterable[Example], model: LanguageModel | XLNet, tokenizer: Tokenizer, reading: Reading
) -> Iterator[dict[str, Any]]:
    """Yield a row for each pair of sentences of `read_pairs`, each scored alone.

    `credit` is 1 if the first one is more probable, 0.5 if both are equally so, as two of the same tokens are.
    """
    pairs = ((example, (example.text, example.pair or "")) for example in examples)
    for example, sums in _sums(pairs, model, tokenizer, reading):
        good, bad = (each.nats for each in sums)
        credit = 0.5 if good == bad else float(good < bad)
        yield {"nats_good": good, "nats_bad": bad, "credit": credit, "good": example.text, "bad": example.pair}


def choice_rows(
    examples: Iterable[Example], model: LanguageModel | XLNet, tokenizer: Tokenizer, reading: Reading
) -> Iterator[dict[str, Any]]:
    """Yield a row for each choice of `read_choices`, scored alone as a whole text; the most probable one has rank 1.

    `credit` of the right choice is 1 if it has rank 1, 1/k if k choices do, and else 0; the others have none.
    """
    choices = ((example, example.choices) for example in examples)
    for item, (example, sums) in enumerate(_sums(choices, model, tokenizer, reading), start=1):
        nats = [each.nats for each in sums]
        ranks = [1 + sum(other < own for other in nats) for own in nats]
        for i, (text, total, rank) in enumerate(zip(example.choices, sums, ranks, strict=True)):
            credit = (rank == 1) / ranks.count(1) if i == example.label else None
            yield {"item": item, "choice": i, **total.row(), "rank": rank, "credit": credit, "text": text}


def _sums(
    examples: Iterable[tuple[Example, Sequence[str]]], model: LanguageModel | XLNet, tokenizer: Tokenizer, reading: Reading
) -> Iterator[tuple[Example, list[Sum]]]:
    """Yield each example with the sums of its texts, each scored alone; they are equal if the tokens are."""
    waiting: deque[tuple[Example, list[np.ndarray]]] = deque()

    def texts() -> Iterator[np.ndarray]:
        for example, written in examples:
            waiting.append((example, [_encode(text, example, tokenizer) for text in written]))
            yield from waiting[-1][1]

    sums = (sum_of(own) for own, _ in _after_line_end(texts(), model, tokenizer, reading))
    for first in sums:
        example, encoded = waiting.popleft()
        known = [first, *islice(sums, len(encoded) - 1)]
        firsts = {ids.tobytes(): i for i, ids in reversed(list(enumerate(encoded)))}  # neighbors may round differently
        yield example, [known[firsts[ids.tobytes()]] for ids in encoded]


def last_word_rows(
    examples: Iterable[Example], model: LanguageModel, tokenizer: Tokenizer, reading: Reading
) -> Iterator[dict[str, Any]]:
    """Yield a row for the last word of each text, with the space before it.

    `credit` is 1 if each of its tokens is the likeliest one.
    """
    words: deque[str] = deque()

    def texts() -> Iterator[Ending]:
        for example in examples:
            start, _, word = example.text.rpartition(" ")
            ids, n_before = _encode(example.text, example, tokenizer), len(_encode(start, example, tokenizer))
            if not 0 < n_before < len(ids):
                raise CorpusError(f"{example.place}: the text has one word; give one with words before the last")
            words.append(word)
            yield Ending(np.concatenate([line_end(tokenizer), ids]), len(ids) - n_before)

    for own in nats(model, texts(), reading, likeliest=True):
        credit = float(own.likeliest is not None and own.likeliest.all())
        yield {**sum_of(own.tokens).row(), "credit": credit, "text": words.popleft()}


def _encode(text: str, example: Example, tokenizer: Tokenizer) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except TokenizerError as error:
        raise CorpusError(f"{example.place}: {error}") from None
