"""Tokenizers that hold somebody else's vocabulary exactly: its words, in its order of ids, found in text by its rules.

`VocabularyTokenizer` has words; `SymbolTokenizer` has bytes written as numbers (enwik8), or characters (text8), and takes
ordinary text. Both are made from foreign files by `transformer_xl.conversion.vocabulary_state`.

Reference: kimiyoung/transformer-xl `pytorch/utils/vocabulary.py` and `data_utils.py`, `prep_text8.py`, and the script by which
they prepare enwik8, salesforce/awd-lstm-lm `data/enwik8/prep_enwik8.py`.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from transformer_xl.data.moses import LineWriter, moses_splitter
from transformer_xl.data.tokenizer_base import FORMAT, PieceTokenizer, StreamDecoder, Tokenizer
from transformer_xl.errors import TokenizerError

MAX_WORDS = 1 << 23
"""A vocabulary has at most so many words; the largest that was published with a model has 793,471."""

MAX_WORD_LENGTH = 1 << 16
"""A word has at most so many characters."""

_SHOWN = 40  # characters of a word in an error message


class _WordDecoder(StreamDecoder):
    def __init__(self, tokenizer: "VocabularyTokenizer") -> None:
        self._tokenizer = tokenizer
        self._writer = tokenizer._writer()

    def push(self, token_id: int) -> str:
        (token_id,) = self._tokenizer._checked([token_id])
        return self._writer.push(self._tokenizer.words[token_id])

    def finish(self) -> str:
        return ""


class VocabularyTokenizer(Tokenizer):
    r"""One id per word of a given list; words are what lies between spaces, or what Moses makes of running text.

    Lines end at `\n`, `\r\n` and `\r`. A last line without line end gets no `line_end` (the authors' code gives it one), so
    that a model can continue it.

    Args:
        words: the vocabulary in order of id.
        lower_case: fold case before looking words up.
        line_start: the word put before each line, such as `<S>`; None: no word.
        line_end: the word put after each line, such as `<eos>` or `<S>`; None: no word.
        unknown: the word that others become, such as `<unk>`; None: others are an error.
        moses: the language whose Moses rules split running text, such as "en", which needs sacremoses; None: words are
            separated by spaces already, as in the published corpora.
        never_split: words that Moses finds anywhere and leaves whole.

    Raises:
        TokenizerError: arguments that do not fit together.

    Example:
        >>> tokenizer = VocabularyTokenizer(["<eos>", "the", "<unk>", "1", "@,@", "000"], line_end="<eos>", unknown="<unk>")
        >>> tokenizer.encode("the  cat\n1 @,@ 000\n").tolist()
        [1, 2, 0, 3, 4, 5, 0]
        >>> tokenizer.decode([1, 2, 0, 3, 4, 5, 0])
        'the <unk>\n1,000\n'
    """

    kind = "vocabulary"

    def __init__(
        self,
        words: Sequence[str],
        *,
        lower_case: bool = False,
        line_start: str | None = None,
        line_end: str | None = None,
        unknown: str | None = None,
        moses: str | None = None,
        never_split: Sequence[str] = (),
    ) -> None:
        self._ids = _checked_ids(words)
        self.words = tuple(words)
        _require(_separate(words), "a word is empty or contains space")
        _require(isinstance(lower_case, bool), "lower_case is neither true nor false")
        _require(moses is None or (isinstance(moses, str) and re.fullmatch("[a-z]{2,3}", moses)), "moses is no language code")
        _require(isinstance(never_split, list | tuple) and len(never_split) <= 1000, "never_split is no list of words")
        _require(all(isinstance(word, str) for word in never_split), "never_split has what is not text")
        _require(_separate(never_split), "a word of never_split is empty or contains space")
        self.lower_case = lower_case
        self.line_start, self.line_end, self.unknown = line_start, line_end, unknown
        self.moses, self.never_split = moses, tuple(never_split)
        _require_members(self._ids, line_start=line_start, line_end=line_end, unknown=unknown)

    @property
    def vocab_size(self) -> int:
        """Number of words, special ones included."""
        return len(self.words)

    @property
    def loses(self) -> str:
        """What `decode(encode(text))` loses, as a sentence."""
        lost = [f"words outside the vocabulary (they become {self.unknown})"] if self.unknown is not None else []
        lost += ["line ends"] if self.line_end is None else []
        lost += ["case"] if self.lower_case else []
        lost.append("the amount and kind of space and the typography of punctuation" if self.moses else "the kind of space")
        return f"{_sentence(lost)}; @-@, @,@ and @.@ are written as -, comma and dot without space."

    def encode(self, text: str) -> np.ndarray:
        """Return one id per word, line starts and line ends included.

        Raises:
            TokenizerError: a word outside a vocabulary without word for unknown ones, or sacremoses is needed and missing.
        """
        words = self._words(text)
        if self.unknown is None:
            ids = list(map(self._ids.get, words))
            if None in ids:
                raise TokenizerError(
                    f"word {words[ids.index(None)][:_SHOWN]!a} is not in the vocabulary of {len(self.words):,} words, which "
                    "has none for unknown ones; leave it out, or set unknown to a word of the vocabulary"
                )
            return np.array(ids, np.int64)
        find, unknown = self._ids.get, self._ids[self.unknown]
        return np.array([find(word, unknown) for word in words], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words as lines of text, joins undone and, if Moses split them, punctuation moved to its word."""
        writer = self._writer()
        return "".join([writer.push(self.words[i]) for i in self._checked(ids)])

    def stream(self) -> StreamDecoder:
        """Return a decoder that takes ids one at a time."""
        return _WordDecoder(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of this class."""
        return {
            "kind": self.kind,
            "format": FORMAT,
            "words": list(self.words),
            "lower_case": self.lower_case,
            "line_start": self.line_start,
            "line_end": self.line_end,
            "unknown": self.unknown,
            "moses": self.moses,
            "never_split": list(self.never_split),
        }

    @classmethod
    def _from_fields(
        cls,
        words: list[str],
        lower_case: bool,
        line_start: str | None,
        line_end: str | None,
        unknown: str | None,
        moses: str | None,
        never_split: list[str],
    ) -> "VocabularyTokenizer":
        return cls(
            words,
            lower_case=lower_case,
            line_start=line_start,
            line_end=line_end,
            unknown=unknown,
            moses=moses,
            never_split=never_split,
        )

    @cached_property
    def _split_line(self):
        assert self.moses is not None
        return moses_splitter(self.moses, self.never_split, lower_case=self.lower_case)

    def _writer(self) -> LineWriter:
        return LineWriter(self.line_start, self.line_end, self.moses)

    def _words(self, text: str) -> list[str]:
        if not text:
            return []
        text = _line_feeds(text)
        start, end = self.line_start or "", self.line_end or ""
        ended = text.endswith("\n")
        if self.moses is not None:
            lines = [" ".join(self._split_line(line)) for line in text.removesuffix("\n").split("\n")]
            text = "\n".join(lines)
        else:
            text = text.removesuffix("\n")
            text = text.lower() if self.lower_case else text
        return f"{start} {text.replace(chr(10), f' {end} {start} ')} {end if ended else ''}".split()


class SymbolTokenizer(PieceTokenizer):
    r"""One id per byte or character, by a given list of symbols.

    A line end becomes the symbol for it ("10", or a line feed) if there is one, else `line_end`, else nothing: the authors'
    enwik8 and text8 have no line ends, for their encoding takes the prepared files line by line.

    Args:
        symbols: the symbols in order of id. Bytes: decimal numbers, "0" to "255"; characters: themselves. Any other symbol
            can be decoded, but no text becomes it.
        unit: "byte" or "char".
        lower_case: fold the case of characters.
        blank: the symbol that stands for a space between characters, `_` in text8; other white space is left out. None: white
            space stands for itself, but is removed at both ends of each line.
        line_end: the symbol put after each line, if a line end has none of its own.
        unknown: the symbol that others become; None: others are an error.

    Raises:
        TokenizerError: arguments that do not fit together.

    Example:
        >>> tokenizer = SymbolTokenizer(["110", "98", "97"], unit="byte")
        >>> tokenizer.encode("ban\nana").tolist(), tokenizer.decode([1, 2, 0])
        ([1, 2, 0, 2, 0, 2], 'ban')
    """

    kind = "symbols"

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        unit: str,
        lower_case: bool = False,
        blank: str | None = None,
        line_end: str | None = None,
        unknown: str | None = None,
    ) -> None:
        self._ids = _checked_ids(symbols)
        self.symbols = tuple(symbols)
        _require(unit in ("byte", "char"), f"unit {unit!r} is neither 'byte' nor 'char'")
        _require(isinstance(lower_case, bool), "lower_case is neither true nor false")
        _require(unit == "char" or (blank is None and not lower_case), "bytes have neither case nor a symbol for blanks")
        self.unit, self.lower_case, self.blank, self.line_end, self.unknown = unit, lower_case, blank, line_end, unknown
        _require_members(self._ids, blank=blank, line_end=line_end, unknown=unknown)
        super().__init__([self._piece(symbol) for symbol in self.symbols])
        line_feed = self._ids.get("10" if unit == "byte" else "\n", self._ids.get(line_end) if line_end is not None else None)
        self._line_feed = _LEFT_OUT if line_feed is None else line_feed
        self._other = _UNSEEN if unknown is None else self._ids[unknown]
        if unit == "byte":
            self._of_byte = np.array([self._ids.get(str(value), self._other) for value in range(256)], np.int64)
            self._of_byte[10] = self._line_feed

    @property
    def reads_bytes(self) -> bool:
        """Whether any bytes can be encoded, UTF-8 or not."""
        return self.unit == "byte"

    @property
    def loses(self) -> str:
        """What `decode(encode(text))` loses, as a sentence; empty if nothing."""
        of_unit = {"byte": "bytes", "char": "characters"}[self.unit]
        lost = [f"{of_unit} outside the vocabulary (they become {self.unknown})"] if self.unknown is not None else []
        lost += ["line ends"] if self._line_feed == _LEFT_OUT else []
        if self.unit == "char":
            lost += ["case"] if self.lower_case else []
            lost += ["space at the ends of lines"] if self.blank is None else []
            lost += ["white space other than blanks", f"{self.blank} (it becomes a blank)"] if self.blank is not None else []
        return f"{_sentence(lost)}." if lost else ""

    def encode(self, text: str) -> np.ndarray:
        """Return one id per byte of UTF-8 or per character.

        Raises:
            TokenizerError: a byte or character outside a vocabulary without symbol for unknown ones.
        """
        if self.unit == "byte":
            return self.encode_bytes(text.encode("utf-8", "surrogatepass"))
        text = _line_feeds(text)
        if self.blank is None:
            text = "\n".join([line.strip() for line in text.split("\n")])
            text = text.lower() if self.lower_case else text
        table = {character: self._of_character(character) for character in set(text)}
        unseen = [character for character, index in table.items() if index == _UNSEEN]
        if unseen:
            first = min(unseen, key=text.index)
            raise TokenizerError(f"character {first!a} (U+{ord(first):04X}) {self._not_there()}")
        return _present(np.fromiter(map(table.__getitem__, text), np.int64, len(text)))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Return one id per byte of `data`, which characters need to be UTF-8.

        Raises:
            TokenizerError: as `encode`, or characters that are not UTF-8.
        """
        if self.unit == "char":
            return super().encode_bytes(data)
        ids = self._of_byte[np.frombuffer(data, np.uint8)]
        unseen = np.flatnonzero(ids == _UNSEEN)
        if unseen.size:
            raise TokenizerError(f"byte {data[unseen[0]]} (0x{data[unseen[0]]:02x}) {self._not_there()}")
        return _present(ids)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of this class."""
        return {
            "kind": self.kind,
            "format": FORMAT,
            "symbols": list(self.symbols),
            "unit": self.unit,
            "lower_case": self.lower_case,
            "blank": self.blank,
            "line_end": self.line_end,
            "unknown": self.unknown,
        }

    @classmethod
    def _from_fields(
        cls, symbols: list[str], unit: str, lower_case: bool, blank: str | None, line_end: str | None, unknown: str | None
    ) -> "SymbolTokenizer":
        return cls(symbols, unit=unit, lower_case=lower_case, blank=blank, line_end=line_end, unknown=unknown)

    def _piece(self, symbol: str) -> bytes:
        if symbol == self.line_end:
            return b"\n"
        if symbol == self.blank:
            return b" "
        return bytes([int(symbol)]) if self.unit == "byte" and is_byte(symbol) else symbol.encode("utf-8", "surrogatepass")

    def _of_character(self, character: str) -> int:
        if character == "\n":
            return self._line_feed
        if self.blank is not None:
            if character.isspace():
                return self._ids[self.blank] if character == " " else _LEFT_OUT
            character = character.lower() if self.lower_case else character
        return self._ids.get(character, self._other)

    def _not_there(self) -> str:
        return (
            f"is not among the vocabulary's {len(self.symbols)} symbols, and none stands for unknown ones; "
            "leave it out, or set unknown to one of them"
        )


_LEFT_OUT, _UNSEEN = -1, -2


def is_byte(symbol: str) -> bool:
    """Tell whether a symbol is a byte written as a decimal number.

    Example:
        >>> is_byte("255"), is_byte("256"), is_byte("07")
        (True, False, False)
    """
    return symbol in _BYTE_SYMBOLS


_BYTE_SYMBOLS = frozenset(map(str, range(256)))


def _sentence(parts: list[str]) -> str:
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def _present(ids: np.ndarray) -> np.ndarray:
    return ids[ids != _LEFT_OUT]


def _line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _checked_ids(words: Sequence[str]) -> dict[str, int]:
    """Return the id of each word, in order; one dictionary, for a second one would take as long as all other checks."""
    _require(isinstance(words, list | tuple), "its words are no list")
    _require(0 < len(words) <= MAX_WORDS, f"{len(words):,} words are not between 1 and {MAX_WORDS:,}")
    _require(set(map(type, words)) == {str}, "a word is not text")
    _require(max(map(len, words)) <= MAX_WORD_LENGTH, f"a word has more than {MAX_WORD_LENGTH:,} characters")
    ids = dict(zip(words, range(len(words)), strict=True))
    _require(len(ids) == len(words), "a word occurs twice")
    return ids


def _separate(words: Sequence[str]) -> bool:
    """Tell whether no word is empty or contains white space."""
    return " ".join(words).split() == list(words)


def _require_members(ids: dict[str, int], **special: str | None) -> None:
    for name, word in special.items():
        fits = word is None or (isinstance(word, str) and word in ids)
        _require(fits, f"{name} ({str(word)[:_SHOWN]!a}) is not one of its words")


def _require(condition: object, complaint: str) -> None:
    if not condition:
        raise TokenizerError(f"unusable vocabulary: {complaint}; convert or restore the file it comes from")
