"""Sources in, targets out: what a model that learned pairs with a tab between them writes after the tab.

A source is read once. What the model keeps of it is its memory while several beams write from it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from transformer_xl.errors import CorpusError, TokenizerError
from transformer_xl.generation.beam import beam_search
from transformer_xl.generation.decoder import Decoder
from transformer_xl.reading.texts import windows
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.untrusted import not_utf8

_LONGER, _MORE = 2, 20  # a target has at most so many times the tokens of the longest source beside it, and so many more


class Source(NamedTuple):
    """A line to translate: its text, and its ids with the tab (n,)."""

    text: str
    ids: np.ndarray


@dataclass(frozen=True)
class Translation:
    """What was written after a source."""

    source: str  # the text that was read
    text: str  # the likeliest target that was found; nothing after a blank source
    log_probability: float  # nats that the model gives to it, 0 or less
    is_whole: bool  # whether it ended by itself


def read_sources(lines: Iterable[bytes], place: str, tokenizer: Tokenizer) -> Iterator[Source]:
    """Encode lines of UTF-8, each a source. White space at both ends does not count."""
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8").strip()
            if "\t" in text:
                raise CorpusError(f"{place}, line {number} has a tab, where its translation would begin; give sources alone")
            yield Source(text, np.append(tokenizer.encode(text), tokenizer.tab))
        except UnicodeDecodeError as error:
            raise CorpusError(f"{place}, line {number}: {not_utf8(error)}") from None
        except TokenizerError as error:
            raise CorpusError(f"{place}, line {number}: {error}") from None


def translations(
    decoder: Decoder,
    tokenizer: Tokenizer,
    sources: Iterable[Source],
    *,
    beams: int = 4,
    length_penalty: float = 1.0,
    reach: int | None = None,
    skip: int = 0,
    is_ready: Callable[[], bool] | None = None,
) -> Iterator[Translation]:
    """Yield the translation of each source but the first `skip`, in order. A line end ends it.

    Args:
        decoder: has `beams` rows for each of the sources that are translated side by side.
        tokenizer: of the model.
        sources: see `read_sources`.
        beams: how many texts are kept at each step.
        length_penalty: see `beam_search`.
        reach: how far back the model looks. No target is longer, because its end would not see its source; None: without end.
        skip: how many are there already. Those that are translated side by side do not depend on it, so neither do their bits.
        is_ready: says whether the next source is there; None: it always is.
    """
    pieces = [tokenizer.piece(each) for each in range(tokenizer.vocab_size)]
    ends = {each for each, piece in enumerate(pieces) if b"\n" in piece}
    how = {"beams": beams, "length_penalty": length_penalty, "stop_tokens": ends}
    how["banned_tokens"] = {each for each, piece in enumerate(pieces) if b"\t" in piece}
    for window in windows(sources, decoder.batch_size // beams, is_ready, size=lambda source: len(source.text)):
        n_kept = min(skip, len(window))
        skip -= n_kept
        if n_kept == len(window):
            continue
        # the longest first, so that texts that are written side by side end at about the same time
        order = sorted((i for i, source in enumerate(window) if source.text), key=lambda i: -len(window[i].ids))
        most = min(_LONGER * max(len(source.ids) for source in window) + _MORE, reach or sys.maxsize)
        written = beam_search(decoder, [window[i].ids for i in order], max_new_tokens=most, **how)
        found = [Translation(source.text, "", 0.0, True) for source in window]
        for i, (best, *_) in zip(order, written, strict=True):
            text = tokenizer.decode(best.tokens).strip()
            found[i] = Translation(window[i].text, text, best.log_probability, best.stop_token is not None)
        yield from found[n_kept:]


def against_references(found: list[str], references: list[str]) -> dict[str, Any]:
    """Return BLEU and chrF of translations by sacreBLEU, with their signatures (Post 2018; Popović 2015)."""
    from sacrebleu.metrics import BLEU, CHRF  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

    if len(found) != len(references):
        raise CorpusError(f"there are {len(found):,} translations and {len(references):,} references; give one for each")
    figures: dict[str, Any] = {"sentences": len(found)}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        score = metric.corpus_score(found, [references])
        figures |= {name: round(score.score, 2), f"{name}_signature": str(metric.get_signature())}
    return figures
