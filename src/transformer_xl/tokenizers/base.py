"""The base classes of all tokenizers, and the checks that they share."""

import codecs
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError, shown
from transformer_xl.files import json_sha256, whole_file
from transformer_xl.untrusted import not_utf8

FORMAT = 1
"""Version of the JSON files."""

BYTES = [bytes([value]) for value in range(256)]

LEARNING_BYTES = 16 << 20
"""BPE and Unigram learn their pieces from this many bytes at the beginning of the text."""

_DEFAULT_SIZE = 8192
_MOST_PIECES = 300_000  # the largest published vocabularies have 262,144

_ERRORS = "transformer_xl.keep_surrogates"


def _keep_surrogates(error: UnicodeError) -> tuple[str, int]:
    """Decode what 'surrogatepass' accepts and replace any other invalid bytes by U+FFFD."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    try:
        return error.object[error.start : error.start + 3].decode("utf-8", "surrogatepass"), error.start + 3
    except UnicodeDecodeError:
        return "\ufffd", error.end


codecs.register_error(_ERRORS, _keep_surrogates)


class StreamDecoder(ABC):
    """Decodes ids one at a time, so that text can be printed while it is generated.

    All texts from `push`, followed by the text from `finish`, equal `decode` of the same ids.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._refuse, self._vocab_size = tokenizer._checked, tokenizer.vocab_size

    def push(self, token_id: int) -> str:
        """Take one more id and return the characters that it completes, possibly none."""
        if not 0 <= token_id < self._vocab_size:
            self._refuse([token_id])
        return self.push_known(token_id)

    @abstractmethod
    def push_known(self, token_id: int) -> str:
        """Do the same for an id that is known to be in the vocabulary."""

    def finish(self) -> str:
        """Return the rest: U+FFFD if the ids ended inside a character, else nothing."""
        return ""


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        kind: the kind's name in configurations and files.
        reads_bytes: whether `encode_bytes` takes bytes that are not UTF-8.
    """

    kind: ClassVar[str]
    reads_bytes: bool = False

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids; they are 0 … vocab_size - 1."""

    @property
    def loses(self) -> str:
        """What `decode(encode(text))` loses, as a sentence; empty if nothing."""
        return ""

    @cached_property
    def counts(self) -> str:
        """What a score counts besides tokens: characters, but ids where these are the text, or words that are lines."""
        return "character"

    @property
    def unknown_id(self) -> int | None:
        """The id of text that has none of its own; None: there is no such id."""
        return None

    def n_unknown(self, text: str, ids: np.ndarray) -> int:
        """Return how many of the ids of a text stand for what the vocabulary lacks, where the text itself does not say so."""
        if self.unknown_id is None:
            return 0
        return max(0, int(np.count_nonzero(ids == self.unknown_id)) - text.count(self.decode([self.unknown_id])))

    @cached_property
    def separator(self) -> str:
        """What separates lines in this vocabulary: a line end, a space, or nothing."""
        for text in ("\n", " "):
            with suppress(TokenizerError):
                if len(self.encode(text)):
                    return text
        return ""

    @cached_property
    def tab(self) -> int:
        """The id of a tab, after which a document's answer begins.

        Raises:
            TokenizerError: a tab has no id of its own.
        """
        ids: list[int] = []
        with suppress(TokenizerError):
            ids = self.encode("\t").tolist()
        if len(ids) != 1 or self.piece(ids[0]) != b"\t":
            raise TokenizerError(f"a tokenizer of kind {self.kind} has no id for a tab, after which answers begin; use bpe")
        return ids[0]

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, shape (n,), int64.

        Raises:
            TokenizerError: the text has a character or word that the tokenizer cannot represent, or the tokenizer needs a
                package that is missing.
        """

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids, and the place in `text` from which each comes.

        The place of a piece begins after the space before it, if more than space belongs to the piece. Pieces made of one
        character have the same place.

        Returns:
            ids, starts and ends (exclusive, in characters), each of shape (n,), int64; `starts <= ends`, and both ascend.

        Raises:
            TokenizerError: the tokenizer changes text in a way in which places are lost, or cannot represent it.
        """
        if self.loses:
            raise TokenizerError(
                f"this tokenizer (kind {self.kind}) does not keep the place of its tokens ({self.loses.rstrip('.')}); use "
                "one of kind unigram, bpe, char, byte, or word without Moses"
            )
        ids = self.encode(text)
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        character = np.cumsum((data & 0xC0) != 0x80) - 1  # of each byte
        different, which = np.unique(ids, return_inverse=True)
        stops = np.cumsum(np.array([len(self.piece(each)) for each in different.tolist()], np.int64)[which])
        starts, ends = character[np.append(0, stops)[:-1]], character[stops - 1] + 1
        for i in np.flatnonzero(ends - starts > 1):
            while text[starts[i]].isspace() and starts[i] < ends[i] - 1:
                starts[i] += 1
        return ids, starts, ends

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Return the ids of UTF-8 `data`, shape (n,), int64; if `reads_bytes`, of any data.

        Raises:
            TokenizerError: `data` is not UTF-8, or has a character that the tokenizer cannot represent.
        """
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{not_utf8(error)}, or use tokenizer.kind=byte") from None
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        decoder = self.stream()
        return "".join([*map(decoder.push_known, self._checked(ids)), decoder.finish()])

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for, which need not be whole characters."""
        return self.decode([token_id]).encode("utf-8", "surrogatepass")

    def begins_word(self) -> np.ndarray:
        """Return for each id whether the word before it is over when it comes, bool (vocab_size,).

        That is so if its piece begins with white space, as a line end does, or stands for no text at all.
        """
        pieces = (self.piece(token_id).decode("utf-8", "replace") for token_id in range(self.vocab_size))
        return np.array([not piece[:1].strip() for piece in pieces])

    @abstractmethod
    def stream(self) -> StreamDecoder:
        """Return a decoder that takes ids one at a time."""

    def to_dict(self) -> dict[str, Any]:
        """Return the tokenizer's kind and arguments as plain JSON values, for `tokenizer_from_dict`."""
        values: dict[str, Any] = {"kind": self.kind, "format": FORMAT}
        for name in inspect.signature(type(self)).parameters:
            value = getattr(self, name)
            values[name] = list(value) if isinstance(value, tuple) else value
        return values

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON; `path` holds the old or the new file, never a part of one."""
        with whole_file(Path(path)) as stray:
            stray.write_bytes(self.to_json())

    def to_json(self) -> bytes:
        """Return what `save` writes."""
        return json.dumps(self.to_dict()).encode()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's kind and arguments, as hex."""
        return json_sha256(self.to_dict())

    def _checked(self, ids: Iterable[int]) -> list[int]:
        """Return `ids` as a list of ints; refuse ids outside the vocabulary."""
        array = np.asarray(ids if hasattr(ids, "__array__") else list(ids))
        if array.size == 0:
            return []
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TokenizerError(f"ids must be one row of integers, not {array.dtype} of shape {array.shape}")
        outside = array[(array < 0) | (array >= self.vocab_size)]
        if outside.size:
            raise TokenizerError(
                f"token id {outside[0]} is outside the vocabulary (0 … {self.vocab_size - 1}); "
                "decode with the tokenizer that belongs to the model"
            )
        return array.tolist()


class PieceDecoder(StreamDecoder):
    """Decodes pieces; keeps the bytes of a character that has not ended."""

    def __init__(self, tokenizer: "PieceTokenizer") -> None:
        super().__init__(tokenizer)
        self._pieces = tokenizer._pieces
        self._bytes = codecs.getincrementaldecoder("utf-8")(_ERRORS)

    def push_known(self, token_id: int) -> str:
        return self._bytes.decode(self._pieces[token_id])

    def finish(self) -> str:
        return self._bytes.decode(b"", final=True)


class PieceTokenizer(Tokenizer):
    """A tokenizer whose ids stand for a few bytes of UTF-8 each, not always whole characters."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def piece(self, token_id: int) -> bytes:
        (token_id,) = self._checked([token_id])
        return self._pieces[token_id]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join([self._pieces[i] for i in self._checked(ids)]).decode("utf-8", _ERRORS)

    def stream(self) -> StreamDecoder:
        return PieceDecoder(self)


def first_bytes(texts: Iterable[str], n_bytes: int) -> Iterator[str]:
    """Yield the texts as far as they have `n_bytes` bytes together."""
    left = n_bytes
    for text in texts:
        yield text[:left]  # counts characters, so the last text may be a little too long
        left -= len(text.encode("utf-8", "surrogatepass"))
        if left <= 0:
            return


def learned_size(config: TokenizerConfig) -> int:
    """Return how many pieces to learn; the libraries allot what they are told, and crash."""
    size = _DEFAULT_SIZE if config.vocab_size is None else config.vocab_size
    if size > _MOST_PIECES:
        raise TokenizerError(f"tokenizer.vocab_size ({size}) must be at most {_MOST_PIECES:,} for {config.kind}; lower it")
    return size


def ids_of(words: Sequence[str]) -> dict[str, int]:
    """Return the id of each word; refuse an empty list, and a word that occurs twice."""
    require(len(words) > 0, "it has no words")
    ids = dict(zip(words, range(len(words)), strict=True))
    require(len(ids) == len(words), "a word occurs twice")
    return ids


def require_members(ids: dict[str, int], **special: str | None) -> None:
    """Raise a `TokenizerError` unless each special word is None or has an id."""
    for name, word in special.items():
        require(word is None or word in ids, f"{name} ({shown(word)}) is not one of its words")


def require(condition: object, complaint: str) -> None:
    """Raise a `TokenizerError` with the complaint unless the condition holds."""
    if not condition:
        raise TokenizerError(f"unusable tokenizer: {complaint}; restore the file it comes from, or train or convert it again")


def join_as_sentence(parts: list[str]) -> str:
    """Return the parts, separated by commas, with a capital first letter."""
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def with_line_feeds(text: str) -> str:
    r"""Return a text whose lines all end in `\n`, as Python reads text files."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
