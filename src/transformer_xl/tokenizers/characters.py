"""Bytes and characters: tokenizers whose ids stand for one byte or one character each.

`ByteTokenizer` and `CharTokenizer` are exact. `SymbolTokenizer` keeps the vocabulary of a converted model in its order, with
bytes written as numbers (enwik8) or with characters (text8), and encodes ordinary text.

Reference: kimiyoung/transformer-xl `data_utils.py` and `prep_text8.py`, and the script that prepares their enwik8,
salesforce/awd-lstm-lm `data/enwik8/prep_enwik8.py`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError, named
from transformer_xl.tokenizers.base import (
    BYTES,
    PieceTokenizer,
    ids_of,
    join_as_sentence,
    require,
    require_members,
    with_line_feeds,
)

_LEFT_OUT, _UNSEEN = -1, -2
"""Used in place of an id, for text that is dropped and for text that is an error."""

_BYTE_SYMBOLS = frozenset(map(str, range(256)))


class ByteTokenizer(PieceTokenizer):
    """One id per byte; represents any text and any file."""

    kind = "byte"
    reads_bytes = True

    def __init__(self) -> None:
        super().__init__(BYTES)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes(text.encode("utf-8", "surrogatepass"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.int64)


class CharTokenizer(PieceTokenizer):
    """One id per character of a fixed alphabet, ids in order of code point.

    Args:
        alphabet: the characters, in any order.
        byte_fallback: add 256 ids for bytes after the alphabet, and encode a character outside the alphabet as its UTF-8 bytes;
            without it such a character is an error.

    Example:
        >>> tokenizer = CharTokenizer("banana")
        >>> tokenizer.encode("nab").tolist(), tokenizer.vocab_size
        ([2, 0, 1], 3)
    """

    kind = "char"

    def __init__(self, alphabet: Iterable[str], *, byte_fallback: bool = False) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        require(self.alphabet or byte_fallback, "its alphabet is empty")
        self.byte_fallback = byte_fallback
        pieces = [character.encode("utf-8", "surrogatepass") for character in self.alphabet]
        super().__init__(pieces + BYTES if byte_fallback else pieces)
        self._ids = np.full(ord(self.alphabet[-1]) + 2 if self.alphabet else 1, -1, np.int64)  # the last entry stays -1
        self._ids[_code_points(self.alphabet)] = np.arange(len(self.alphabet))

    def encode(self, text: str) -> np.ndarray:
        ids = self._ids[np.minimum(_code_points(text), len(self._ids) - 1)]
        unseen = np.flatnonzero(ids < 0)
        if not unseen.size:
            return ids
        if not self.byte_fallback:
            raise TokenizerError(
                f"character {named(text[unseen[0]])} is not in the tokenizer's alphabet of "
                f"{len(self.alphabet)} characters; add it by txl train TEXT --from RUN --grow, or train with "
                "tokenizer.byte_fallback=true or tokenizer.kind=byte"
            )
        encoded = [text[i].encode("utf-8", "surrogatepass") for i in unseen]
        widths = np.ones(len(ids), np.int64)
        widths[unseen] = [len(piece) for piece in encoded]
        ids = np.repeat(ids, widths)
        ids[ids < 0] = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int64) + len(self.alphabet)
        return ids


def _code_points(text: str) -> np.ndarray:
    """Return the code points of `text`, shape (n,), int64, lone surrogates included."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)


def train_characters(config: TokenizerConfig, texts: Iterable[str]) -> CharTokenizer:
    """Collect the characters of texts: see `train_tokenizer`."""
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    if not alphabet:
        raise TokenizerError("no text to learn an alphabet from; give a corpus that is not empty")
    return CharTokenizer(alphabet, byte_fallback=config.byte_fallback)


class SymbolTokenizer(PieceTokenizer):
    r"""One id per byte or character, from a given list of symbols.

    A line end becomes its own symbol ("10", or a line feed) if the list has it, else nothing. The authors' enwik8 and text8
    have no line ends, because their code encodes the prepared files line by line.

    Args:
        symbols: the symbols in order of id: decimal numbers from "0" to "255" for bytes, the characters themselves otherwise.
            Any other symbol can be decoded, but text is never encoded as it.
        unit: "byte" or "char".
        lower_case: fold the case of characters.
        blank: the symbol for a space between characters, `_` in text8; other white space is dropped. None: white space is
            encoded as it is, but removed at both ends of each line.
        unknown: the symbol for bytes or characters outside the list; None: they are an error.

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
        unknown: str | None = None,
    ) -> None:
        self._ids = ids_of(symbols)
        self.symbols = tuple(symbols)
        require(unit in ("byte", "char"), f"unit {unit!r} is neither 'byte' nor 'char'")
        require(unit == "char" or (blank is None and not lower_case), "bytes have neither case nor a symbol for blanks")
        self.unit, self.lower_case, self.blank, self.unknown = unit, lower_case, blank, unknown
        self.reads_bytes = unit == "byte"
        require_members(self._ids, blank=blank, unknown=unknown)
        super().__init__([self._piece(symbol) for symbol in self.symbols])
        self._line_feed = self._ids.get("10" if unit == "byte" else "\n", _LEFT_OUT)
        self._other = _UNSEEN if unknown is None else self._ids[unknown]
        if unit == "byte":
            self._of_byte = np.array([self._ids.get(str(value), self._other) for value in range(256)], np.int64)
            self._of_byte[10] = self._line_feed

    @property
    def loses(self) -> str:
        of_unit = {"byte": "bytes", "char": "characters"}[self.unit]
        lost = [f"{of_unit} outside the vocabulary (they become {self.unknown})"] if self.unknown is not None else []
        lost += ["line ends"] if self._line_feed == _LEFT_OUT else []
        if self.unit == "char":
            lost += ["case"] if self.lower_case else []
            lost += ["the kind of line ends"] if self._line_feed != _LEFT_OUT else []
            lost += ["space at the ends of lines"] if self.blank is None else []
            lost += ["white space other than blanks", f"{self.blank} (it becomes a blank)"] if self.blank is not None else []
        return f"{join_as_sentence(lost)}." if lost else ""

    @property
    def unknown_id(self) -> int | None:
        return None if self.unknown is None else self._other

    def encode(self, text: str) -> np.ndarray:
        if self.unit == "byte":
            return self.encode_bytes(text.encode("utf-8", "surrogatepass"))
        text = with_line_feeds(text)
        if self.blank is None:
            text = "\n".join([line.strip() for line in text.split("\n")])
            text = text.lower() if self.lower_case else text
        table = {character: self._of_character(character) for character in set(text)}
        unseen = [character for character, index in table.items() if index == _UNSEEN]
        if unseen:
            raise TokenizerError(f"character {named(min(unseen, key=text.index))} {self._not_there()}")
        ids = np.fromiter(map(table.__getitem__, text), np.int64, len(text))
        return ids[ids != _LEFT_OUT]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        if self.unit == "char":
            return super().encode_bytes(data)
        ids = self._of_byte[np.frombuffer(data, np.uint8)]
        unseen = np.flatnonzero(ids == _UNSEEN)
        if unseen.size:
            raise TokenizerError(f"byte {data[unseen[0]]} (0x{data[unseen[0]]:02x}) {self._not_there()}")
        return ids[ids != _LEFT_OUT]

    def _piece(self, symbol: str) -> bytes:
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


def is_byte(symbol: str) -> bool:
    """Return whether a symbol is a byte written as a decimal number.

    Example:
        >>> is_byte("255"), is_byte("256"), is_byte("07")
        (True, False, False)
    """
    return symbol in _BYTE_SYMBOLS
