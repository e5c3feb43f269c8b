"""A tokenizer for words, whose vocabulary was counted in a corpus or came with a converted model.

Reference: kimiyoung/transformer-xl `pytorch/utils/vocabulary.py` counts words as `train_words` does, with `<eos>` at every line
end. Both order ids by descending frequency; words of equal frequency are in order of spelling here, unlike there.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError, shown
from transformer_xl.tokenizers.base import (
    StreamDecoder,
    Tokenizer,
    ids_of,
    join_as_sentence,
    require,
    require_members,
    with_line_feeds,
)
from transformer_xl.tokenizers.moses import MosesSpacing, PlainSpacing, moses_splitter
from transformer_xl.tokenizers.spaceless import are_lines

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"

_WORDS_AND_LINE_FEEDS = re.compile(r"\S+|\n")
_WORDS_OF_LINES = re.compile(r"\S+|\r\n|\r|\n")


class _WordDecoder(StreamDecoder):
    """Writes words as lines of text."""

    def __init__(self, tokenizer: "WordTokenizer") -> None:
        super().__init__(tokenizer)
        self._tokenizer, self._words = tokenizer, tokenizer.words
        self._start, self._end = tokenizer.line_start, tokenizer.line_end
        self._begin_line()

    def _begin_line(self) -> None:
        self._in_line = False
        language = self._tokenizer.moses
        self._spacing = MosesSpacing(language) if language else PlainSpacing(undo_joins=self._tokenizer.undo_joins)

    def push_known(self, token_id: int) -> str:
        word = self._words[token_id]
        if word == self._end and (self._in_line or word != self._start):  # one word may both start and end lines
            self._begin_line()
            return "\n"
        at_start, self._in_line = not self._in_line, True
        return "" if at_start and word == self._start else self._spacing.push(word)


class WordTokenizer(Tokenizer):
    r"""One id per word of a list; text is split at spaces, or by the rules of Moses.

    A last line without a line end gets no `line_end`, so that a model can continue it. (The authors' code adds one.)

    Args:
        words: the vocabulary in order of id.
        lower_case: fold case before looking words up.
        line_start: the word put before each line, such as `<S>`; None: no word.
        line_end: the word put after each line; None: no word.
        unknown: the word for words outside the vocabulary; None: they are an error.
        any_line_end: `\r\n` and `\r` end lines too, not only `\n`, as when Python reads a text file.
        undo_joins: write `1 @,@ 000` as `1,000` when decoding.
        moses: the language, such as "en", whose Moses rules split running text (with sacremoses) and attach punctuation to
            words when decoding; None: spaces already separate the words, as in the published corpora.
        never_split: words that Moses finds anywhere and leaves whole.

    Example:
        >>> tokenizer = WordTokenizer(["<unk>", "<eos>", "the", "cat"])
        >>> tokenizer.decode(tokenizer.encode("the  cat\nthe dog\n"))
        'the cat\nthe <unk>\n'
    """

    kind = "word"

    def __init__(
        self,
        words: Sequence[str],
        *,
        lower_case: bool = False,
        line_start: str | None = None,
        line_end: str | None = END_OF_LINE,
        unknown: str | None = UNKNOWN,
        any_line_end: bool = False,
        undo_joins: bool = False,
        moses: str | None = None,
        never_split: Sequence[str] = (),
    ) -> None:
        self._ids = ids_of(words)
        self.words = tuple(words)
        require(_separate(words), "a word is empty or contains space")
        require(moses is None or re.fullmatch("[a-z]{2,3}", moses), "moses is not a language code")
        require(_separate(never_split), "a word of never_split is empty or contains space")
        require_members(self._ids, line_start=line_start, line_end=line_end, unknown=unknown)
        self.lower_case, self.line_start, self.line_end, self.unknown = lower_case, line_start, line_end, unknown
        self.any_line_end, self.undo_joins = any_line_end, undo_joins
        self.moses, self.never_split = moses, tuple(never_split)

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    @property
    def loses(self) -> str:
        lost = [f"words outside the vocabulary (they become {self.unknown})"] if self.unknown is not None else []
        lost += ["line ends"] if self.line_end is None else []
        lost.append("the amount and kind of space between words" + (" and the typography of punctuation" if self.moses else ""))
        lost += ["case"] if self.lower_case else []
        joins = "; @-@, @,@ and @.@ are written as -, comma and dot without space" if self.moses or self.undo_joins else ""
        return f"{join_as_sentence(lost)}{joins}."

    @cached_property
    def counts(self) -> str:
        return "word" if are_lines(self.words) else "character"

    @property
    def unknown_id(self) -> int | None:
        return None if self.unknown is None else self._ids[self.unknown]

    def begins_word(self) -> np.ndarray:
        return np.ones(self.vocab_size, bool)

    def encode(self, text: str) -> np.ndarray:
        return self._ids_of(self.split(text))

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self.moses is not None:
            return super().encode_with_offsets(text)
        places: list[tuple[str, int, int]] = [(self.line_start, 0, 0)] if self.line_start and text else []
        for match in (_WORDS_OF_LINES if self.any_line_end else _WORDS_AND_LINE_FEEDS).finditer(text):
            word, (start, end) = match.group(), match.span()
            if not word.isspace():
                places.append((word.lower() if self.lower_case else word, start, end))
                continue
            places += [(self.line_end, start, end)] if self.line_end else []
            places += [(self.line_start, end, end)] if self.line_start and end < len(text) else []
        words, starts, ends = zip(*places, strict=True) if places else ((), (), ())
        return self._ids_of(words), np.array(starts, np.int64), np.array(ends, np.int64)

    def _ids_of(self, words: Sequence[str]) -> np.ndarray:
        if self.unknown is None:
            ids = list(map(self._ids.get, words))
            if None in ids:
                raise TokenizerError(
                    f"word {shown(words[ids.index(None)])} is not in the vocabulary of {len(self.words):,} words, which "
                    "has none for unknown ones; leave it out, or set unknown to a word of the vocabulary"
                )
            return np.array(ids, np.int64)
        find, unknown = self._ids.get, self._ids[self.unknown]
        return np.array([find(word, unknown) for word in words], np.int64)

    def split(self, text: str) -> list[str]:
        """Return the words of a text, also those that are not in the vocabulary, with those that begin and end its lines."""
        if not text:
            return []
        text = with_line_feeds(text) if self.any_line_end else text
        ended, text = text.endswith("\n"), text.removesuffix("\n")
        if self.moses is not None:
            text = "\n".join(" ".join(self._split_line(line)) for line in text.split("\n"))
        elif self.lower_case:
            text = text.lower()
        start, end = self.line_start or "", self.line_end or ""
        return f"{start} {text.replace(chr(10), f' {end} {start} ')} {end if ended else ''}".split()

    @cached_property
    def _split_line(self):
        assert self.moses is not None
        return moses_splitter(self.moses, self.never_split, lower_case=self.lower_case)

    def stream(self) -> StreamDecoder:
        return _WordDecoder(self)

    def to_dict(self) -> dict[str, Any]:
        arguments = inspect.signature(type(self)).parameters  # those with their defaults are left out, but lower_case is not
        defaults = {name: argument.default for name, argument in arguments.items() if name != "lower_case"}
        values = super().to_dict()
        return {name: value for name, value in values.items() if name not in defaults or getattr(self, name) != defaults[name]}


def _separate(words: Sequence[str]) -> bool:
    return " ".join(words).split() == list(words)


def train_words(config: TokenizerConfig, texts: Iterable[str]) -> WordTokenizer:
    """Count the words of texts: see `train_tokenizer`."""
    specials = [UNKNOWN, END_OF_LINE]
    size = config.vocab_size
    if size is not None and size <= len(specials):
        raise TokenizerError(
            f"tokenizer.vocab_size ({size}) must exceed 2, because {UNKNOWN} and {END_OF_LINE} count; raise it"
        )
    counts: Counter[str] = Counter()
    for text in texts:
        text = text.replace("\n", f" {END_OF_LINE} ")
        counts.update((text.lower() if config.lower_case else text).split())
    if not counts:
        raise TokenizerError("no words to learn a vocabulary from; give a corpus that is not empty")
    for special in specials:
        counts.pop(special, None)
    frequent = [word for word, count in counts.items() if count >= config.min_frequency]
    frequent.sort(key=lambda word: (-counts[word], word))
    return WordTokenizer((specials + frequent)[:size], lower_case=config.lower_case)
