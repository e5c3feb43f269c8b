"""Text to token ids and back: bytes, characters, words, byte-level BPE.

A tokenizer is a value: it is trained once (`train_tokenizer`), saved as JSON, and never changes. Byte, BPE and character
tokenizers are exact: `decode(encode(text)) == text`; the others say in `loses` what they drop. Those here are trained on a
corpus; those of `transformer_xl.data.vocabulary` hold the vocabulary of a model that others trained.

Encoding is concatenative where the preparer cuts: `encode(a + b)` is `encode(a)` followed by `encode(b)` when `a` ends
with a line end and `b` does not begin with one. (Bytes and characters: at any code point. Words: at any whitespace.) A text
without line ends is cut at other whitespace, where BPE may form one token more than it would have without the cut.

Reference: the word vocabulary counts as the authors' `utils/vocabulary.py` does (every line ends in `<eos>`), with ids by
descending frequency and then, unlike theirs, by spelling.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.config import TokenizerConfig
from transformer_xl.data.tokenizer_base import (
    FORMAT,
    PieceTokenizer,
    StreamDecoder,
    Tokenizer,
    code_points,
    one_line,
    require,
)
from transformer_xl.data.vocabulary import SymbolTokenizer, VocabularyTokenizer
from transformer_xl.errors import TokenizerError, did_you_mean

__all__ = [
    "BPE_TRAINING_BYTES",
    "DEFAULT_BPE_SIZE",
    "FORMAT",
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "StreamDecoder",
    "SymbolTokenizer",
    "Tokenizer",
    "VocabularyTokenizer",
    "WordTokenizer",
    "load_tokenizer",
    "tokenizer_from_dict",
    "train_tokenizer",
]

MAX_FILE_BYTES = 512 << 20
"""A tokenizer's file that is larger is refused unread; one of 800,000 words has some 10 MB."""

DEFAULT_BPE_SIZE = 8192
"""Vocabulary size of a BPE tokenizer when the config names none."""

BPE_TRAINING_BYTES = 16 << 20
"""A BPE tokenizer learns its merges from at most so many bytes from the beginning of the text."""

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"

_BYTES = [bytes([value]) for value in range(256)]


class ByteTokenizer(PieceTokenizer):
    """The 256 bytes of UTF-8; represents any text, and any file.

    Example:
        >>> ByteTokenizer().encode("né").tolist()
        [110, 195, 169]
    """

    kind = "byte"

    def __init__(self) -> None:
        super().__init__(_BYTES)

    @property
    def reads_bytes(self) -> bool:
        """True: any bytes can be encoded, UTF-8 or not."""
        return True

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of `text` as ids; lone surrogates become three bytes each."""
        return self.encode_bytes(text.encode("utf-8", "surrogatepass"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Return the bytes as ids, whatever they are."""
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"kind": "byte", "format": 1}`."""
        return {"kind": self.kind, "format": FORMAT}

    @classmethod
    def _from_fields(cls) -> "ByteTokenizer":
        return cls()


class CharTokenizer(PieceTokenizer):
    """One id per character of a fixed alphabet, ids in order of code point.

    Args:
        alphabet: the characters, in any order.
        byte_fallback: add 256 ids for bytes, after the alphabet, so that a character outside the alphabet is written as the
            bytes of its UTF-8; without it such a character is an error.

    Example:
        >>> tokenizer = CharTokenizer("banana")
        >>> tokenizer.encode("nab").tolist(), tokenizer.vocab_size
        ([2, 0, 1], 3)
    """

    kind = "char"

    def __init__(self, alphabet: Iterable[str], *, byte_fallback: bool = False) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        self.byte_fallback = byte_fallback
        characters = [character.encode("utf-8", "surrogatepass") for character in self.alphabet]
        super().__init__(characters + _BYTES if byte_fallback else characters)
        self._ids = np.full(ord(self.alphabet[-1]) + 2 if self.alphabet else 1, -1, np.int64)  # the last entry stays -1
        self._ids[code_points(self.alphabet)] = np.arange(len(self.alphabet))

    def encode(self, text: str) -> np.ndarray:
        """Return one id per character, or one per byte of a character outside the alphabet."""
        ids = self._ids[np.minimum(code_points(text), len(self._ids) - 1)]
        unseen = np.flatnonzero(ids < 0)
        return self._with_bytes(ids, unseen, text) if unseen.size else ids

    def _with_bytes(self, ids: np.ndarray, unseen: np.ndarray, text: str) -> np.ndarray:
        if not self.byte_fallback:
            character = text[unseen[0]]
            raise TokenizerError(
                f"character {character!a} (U+{ord(character):04X}) is not in the tokenizer's alphabet of "
                f"{len(self.alphabet)} characters; train with tokenizer.byte_fallback=true or tokenizer.kind=byte"
            )
        encoded = [text[i].encode("utf-8", "surrogatepass") for i in unseen]
        widths = np.ones(len(ids), np.int64)
        widths[unseen] = [len(piece) for piece in encoded]
        ids = np.repeat(ids, widths)
        ids[ids < 0] = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int64) + len(self.alphabet)
        return ids

    def to_dict(self) -> dict[str, Any]:
        """Return the alphabet and whether bytes stand in for other characters."""
        return {
            "kind": self.kind,
            "format": FORMAT,
            "alphabet": self.alphabet,
            "byte_fallback": self.byte_fallback,
        }

    @classmethod
    def _from_fields(cls, alphabet: str, byte_fallback: bool) -> "CharTokenizer":
        require(isinstance(alphabet, str) and isinstance(byte_fallback, bool), "a field has the wrong type")
        require(list(alphabet) == sorted(set(alphabet)), "the alphabet is not sorted or has duplicates")
        require(bool(alphabet) or byte_fallback, "the alphabet is empty")
        return cls(alphabet, byte_fallback=byte_fallback)


class _WordDecoder(StreamDecoder):
    def __init__(self, tokenizer: "WordTokenizer") -> None:
        self._tokenizer = tokenizer
        self._in_line = False

    def push(self, token_id: int) -> str:
        (token_id,) = self._tokenizer._checked([token_id])
        word = self._tokenizer.words[token_id]
        space = " " if self._in_line else ""
        self._in_line = word != END_OF_LINE
        return space + word if self._in_line else "\n"

    def finish(self) -> str:
        return ""


class WordTokenizer(Tokenizer):
    r"""One id per whitespace-separated word; every line end is the word `<eos>`, every other word outside the list `<unk>`.

    Args:
        words: the vocabulary in order of id, beginning with `<unk>`, `<eos>`.
        lower_case: fold case before looking words up.

    Example:
        >>> tokenizer = WordTokenizer(["<unk>", "<eos>", "the", "cat"])
        >>> tokenizer.decode(tokenizer.encode("the  cat\nthe dog\n"))
        'the cat\nthe <unk>\n'
    """

    kind = "word"

    def __init__(self, words: Sequence[str], *, lower_case: bool = False) -> None:
        self.words = tuple(words)
        self.lower_case = lower_case
        self._ids = {word: index for index, word in enumerate(self.words)}

    @property
    def vocab_size(self) -> int:
        """Number of words, the two special ones included."""
        return len(self.words)

    @property
    def loses(self) -> str:
        """What `decode(encode(text))` loses, as a sentence."""
        case = ", case" if self.lower_case else ""
        return f"Words outside the vocabulary (they become {UNKNOWN}), the amount and kind of space between words{case}."

    def encode(self, text: str) -> np.ndarray:
        """Return one id per word and one per line end (`<eos>`)."""
        find, unknown = self._ids.get, self._ids[UNKNOWN]
        return np.array([find(word, unknown) for word in _words(text, self.lower_case)], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words joined by spaces, with `<eos>` as line end."""
        words = [self.words[i] for i in self._checked(ids)]
        lines = " ".join("\n" if word == END_OF_LINE else word for word in words)
        return lines.replace(" \n", "\n").replace("\n ", "\n")

    def stream(self) -> StreamDecoder:
        """Return a decoder that takes ids one at a time."""
        return _WordDecoder(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the words in order of id and whether case is folded."""
        return {"kind": self.kind, "format": FORMAT, "words": list(self.words), "lower_case": self.lower_case}

    @classmethod
    def _from_fields(cls, words: list[str], lower_case: bool) -> "WordTokenizer":
        require(isinstance(words, list) and isinstance(lower_case, bool), "a field has the wrong type")
        require(all(isinstance(word, str) for word in words), "a word is not text")
        require(words[:2] == [UNKNOWN, END_OF_LINE], f"the words do not begin with {UNKNOWN}, {END_OF_LINE}")
        require(len(set(words)) == len(words), "a word occurs twice")
        require(all(word.split() == [word] for word in words), "a word is empty or contains space")
        return cls(words, lower_case=lower_case)


# Like GPT-2's, but a run of line ends is a unit of its own, so that no unit reaches across a cut after it.
_BPE_UNITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"


# Words with the space before them. No unit of BPE reaches from non-space to a following space or line end (other kinds of space
# may be space for one regex library and not for the other), so these can be encoded one by one, and mostly need not be.
_BPE_SEGMENTS = re.compile(r"\s*+\S++(?:[^\S \n]\s*+\S*+)*+|\s++")
_BPE_CACHE_SIZE = 1 << 16
_BPE_BATCH = 4096  # what the library returns for a segment is some kilobytes


class BPETokenizer(PieceTokenizer):
    """Byte-level byte-pair encoding by the `tokenizers` library; represents any Unicode text.

    Args:
        library: the library's JSON. It must have all 256 bytes, no normalizer and no special tokens, or text would not survive.
    """

    kind = "bpe"

    def __init__(self, library: dict[str, Any]) -> None:
        import tokenizers

        require(isinstance(library, dict), "a field has the wrong type")
        for part in ("normalizer", "post_processor", "truncation", "padding", "added_tokens"):
            require(not library.get(part), f"it has a {part.replace('_', ' ')}, so text would not survive")
        try:
            self._model = tokenizers.Tokenizer.from_str(json.dumps(library))
        except Exception as error:  # the library raises nothing more specific
            raise TokenizerError(f"damaged tokenizer: {one_line(error)}; train it again") from None
        self._library = library
        self._known: dict[str, list[int]] = {}  # ids of segments seen lately; the library is some ten times slower
        super().__init__(_bpe_pieces(self._model.get_vocab(with_added_tokens=False)))

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`; lone surrogates, which are not Unicode text, are an error."""
        segments = _BPE_SEGMENTS.findall(text)
        if len(self._known) > _BPE_CACHE_SIZE:
            self._known.clear()
        unknown = [segment for segment in set(segments) if segment not in self._known]
        for first in range(0, len(unknown), _BPE_BATCH):
            batch = unknown[first : first + _BPE_BATCH]
            try:
                encodings = self._model.encode_batch_fast(batch, add_special_tokens=False)
            except (TypeError, UnicodeEncodeError):
                raise TokenizerError("text with a lone surrogate is not Unicode; use tokenizer.kind=byte") from None
            self._known.update((segment, encoding.ids) for segment, encoding in zip(batch, encodings, strict=True))
        return np.fromiter(chain.from_iterable(map(self._known.__getitem__, segments)), np.int64)

    def to_dict(self) -> dict[str, Any]:
        """Return the library's own JSON inside ours."""
        return {"kind": self.kind, "format": FORMAT, "library": self._library}

    @classmethod
    def _from_fields(cls, library: dict[str, Any]) -> "BPETokenizer":
        return cls(library)


_CLASSES = (ByteTokenizer, CharTokenizer, WordTokenizer, BPETokenizer, VocabularyTokenizer, SymbolTokenizer)
_KINDS: dict[str, Any] = {cls.kind: cls for cls in _CLASSES}


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    r"""Learn a tokenizer from a stream of texts; only counts are kept in memory.

    Args:
        config: kind and size.
        texts: pieces of text, each a few MB at most; BPE reads only the first `BPE_TRAINING_BYTES` of them.

    Returns:
        The tokenizer, the same for the same texts.

    Raises:
        TokenizerError: a vocabulary size that cannot work, or no text to learn from.

    Example:
        >>> tokenizer = train_tokenizer(TokenizerConfig(kind="word"), ["a b a\n"])
        >>> tokenizer.words
        ('<unk>', '<eos>', 'a', 'b')
    """
    if config.kind == "byte":
        return ByteTokenizer()
    if config.kind == "char":
        return _train_char(config, texts)
    return _train_word(config, texts) if config.kind == "word" else _train_bpe(config, texts)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer that `Tokenizer.save` wrote.

    Raises:
        TokenizerError: no such file, or one that is too large, damaged, inconsistent or of an unknown kind.
    """
    try:
        return tokenizer_from_dict(json.loads(_bounded_text(Path(path))))
    except OSError as error:
        raise TokenizerError(f"cannot read tokenizer '{path}': {error.strerror}; give the path of a saved one") from None
    except TokenizerError as error:
        raise TokenizerError(f"tokenizer '{path}': {error}") from None
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"tokenizer '{path}' is damaged ({one_line(error)}); train it again or restore the file") from None


def _bounded_text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise TokenizerError(f"it has {size:,} bytes, more than the {MAX_FILE_BYTES:,} of any tokenizer; give the path of one")
    return path.read_text(encoding="utf-8")


def tokenizer_from_dict(values: dict[str, Any]) -> Tokenizer:
    """Make a tokenizer from what `Tokenizer.to_dict` returned.

    Raises:
        TokenizerError: unknown kind or format, or values that do not fit together.

    Example:
        >>> tokenizer_from_dict({"kind": "byte", "format": 1}).vocab_size
        256
    """
    require(isinstance(values, dict), "it is not a JSON object")
    fields = dict(values)
    kind, file_format = fields.pop("kind", None), fields.pop("format", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise TokenizerError(f"unknown tokenizer kind {kind!r}; {did_you_mean(str(kind), _KINDS)}")
    if file_format != FORMAT:
        raise TokenizerError(f"tokenizer format {file_format!r} is not {FORMAT}; use the version of txl that wrote it")
    make = _KINDS[kind]._from_fields
    expected = set(make.__annotations__) - {"return"}
    require(fields.keys() == expected, f"its fields are {sorted(fields)}, not {sorted(expected)}")
    return make(**fields)


def _train_char(config: TokenizerConfig, texts: Iterable[str]) -> CharTokenizer:
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    if not alphabet:
        raise TokenizerError("no text to learn an alphabet from; give a corpus that is not empty")
    return CharTokenizer(alphabet, byte_fallback=config.byte_fallback)


def _train_word(config: TokenizerConfig, texts: Iterable[str]) -> WordTokenizer:
    specials = [UNKNOWN, END_OF_LINE]
    size = config.vocab_size
    if size is not None and size <= len(specials):
        raise TokenizerError(f"tokenizer.vocab_size ({size}) must exceed 2, for {UNKNOWN} and {END_OF_LINE} count; raise it")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_words(text, config.lower_case))
    if not counts:
        raise TokenizerError("no words to learn a vocabulary from; give a corpus that is not empty")
    for special in specials:
        counts.pop(special, None)
    frequent = [word for word, count in counts.items() if count >= config.min_frequency]
    frequent.sort(key=lambda word: (-counts[word], word))
    return WordTokenizer((specials + frequent)[:size], lower_case=config.lower_case)


def _train_bpe(config: TokenizerConfig, texts: Iterable[str]) -> BPETokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    size = DEFAULT_BPE_SIZE if config.vocab_size is None else config.vocab_size
    if size < 256:
        raise TokenizerError(f"tokenizer.vocab_size ({size}) must be at least 256 for bpe, one id per byte; raise it")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_BPE_UNITS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=config.min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    model.train_from_iterator(_first_bytes(texts, BPE_TRAINING_BYTES), trainer)
    return BPETokenizer(json.loads(model.to_str()))


def _first_bytes(texts: Iterable[str], n_bytes: int) -> Iterator[str]:
    left = n_bytes
    for text in texts:
        yield text[:left]  # characters, so a little too much at the end; what matters is that it ends
        left -= len(text.encode("utf-8", "surrogatepass"))
        if left <= 0:
            return


def _words(text: str, lower_case: bool) -> list[str]:
    text = text.replace("\n", f" {END_OF_LINE} ")
    return (text.lower() if lower_case else text).split()


def _bpe_pieces(vocabulary: dict[str, int]) -> list[bytes]:
    """Return the bytes of each id; the library writes each byte as one printable character."""
    pieces: list[bytes | None] = [None] * len(vocabulary)
    for token, index in vocabulary.items():
        require(0 <= index < len(pieces) and pieces[index] is None, f"its ids are not 0 … {len(pieces) - 1}, each once")
        try:
            pieces[index] = bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            raise TokenizerError(f"damaged tokenizer: token {token!r} is not made of bytes; train it again") from None
    complete = [piece for piece in pieces if piece is not None]
    require(set(_BYTES) <= set(complete), "it lacks some of the 256 bytes")
    return complete


def _byte_alphabet() -> dict[str, int]:
    """Return the byte behind each character of byte-level BPE: itself if printable Latin-1, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(0x100 + i): value for i, value in enumerate(others)}


_BYTE_OF = _byte_alphabet()
