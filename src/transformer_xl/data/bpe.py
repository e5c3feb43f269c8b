"""Byte-level byte-pair encoding by the `tokenizers` library."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.data.tokenizer_base import BYTES, PieceTokenizer, require
from transformer_xl.errors import TokenizerError, one_line, shown

DEFAULT_BPE_SIZE = 8192
"""Vocabulary size of a BPE tokenizer if the configuration has none."""

BPE_TRAINING_BYTES = 16 << 20
"""A BPE tokenizer learns its merges from this many bytes at the beginning of the text."""

_MOST_PIECES = 300_000  # the largest published vocabularies have 262,144; a million merges take 600 MB and seconds to load

# Like GPT-2's, but a run of line ends is a unit of its own, so that no unit reaches across a cut after it.
_UNITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"

# Words with the space before them. No such unit reaches from non-space to a following space or line end, so segments can be
# encoded one by one, and most are in the cache. Other kinds of space do not end a segment, because the two regex libraries may
# not agree on them.
_SEGMENTS = re.compile(r"\s*+\S++(?:[^\S \n]\s*+\S*+)*+|\s++")
_LINES = re.compile(r"[^\n]*+\n++|[^\n]++")  # for units of other programs; some reach across line ends and are cut there
_CACHE_SIZE = 1 << 16
_BATCH = 4096  # the library returns some kilobytes per segment

_KEEPING = ("Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext")  # what may become of what a pattern finds

# every pair of kinds of characters, so that all borders between them are there
_KINDS = "aZéßΣſ東あ한ع0²१_'’.-@🙂 \n\r\t\x0b\x1c\x85\xa0\u2028\u3000\x00\x7f\u0301\u200d\ufeff\ufffd\ue000\U0010ffff"
_PROBE = "".join(one + other for one in _KINDS for other in _KINDS) + "isn't it? They'll  see\n\n\n   12,345.67 \r\n"


class BPETokenizer(PieceTokenizer):
    """Byte-level byte-pair encoding by the `tokenizers` library; represents any Unicode text.

    Args:
        library: the library's JSON. Text must survive: it has all 256 bytes, no special tokens, nothing that changes or drops
            characters, and nothing random.

    Raises:
        TokenizerError: it has something else, or the library cannot read it.
    """

    kind = "bpe"

    def __init__(self, library: dict[str, Any]) -> None:
        import tokenizers

        self._cut = _SEGMENTS if _check(library) else _LINES
        with _library_works("damaged tokenizer: {}; train it again"):
            self._model = tokenizers.Tokenizer.from_str(json.dumps(library))
        self.library = library
        self._known: dict[str, list[int]] = {}  # ids of recent segments; the library is some ten times slower
        super().__init__(_pieces(self._model.get_vocab(with_added_tokens=False)))
        require(self.decode(self.encode(_PROBE)) == _PROBE, "text does not survive it")

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`.

        Raises:
            TokenizerError: the text has lone surrogates, which are not Unicode text, or the library fails at it.
        """
        segments = self._cut.findall(text)
        if len(self._known) > _CACHE_SIZE:
            self._known.clear()
        unknown = [segment for segment in set(segments) if segment not in self._known]
        for first in range(0, len(unknown), _BATCH):
            batch = unknown[first : first + _BATCH]
            self._known.update(zip(batch, self._encoded(batch), strict=True))
        return np.fromiter(chain.from_iterable(map(self._known.__getitem__, segments)), np.int64)

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        with _library_works("the tokenizer fails at a part of the text ({}); leave that part out, or train another tokenizer"):
            try:
                encodings = self._model.encode_batch_fast(texts, add_special_tokens=False)
            except (TypeError, UnicodeEncodeError):
                raise TokenizerError("text with a lone surrogate is not Unicode; use tokenizer.kind=byte") from None
        return [encoding.ids for encoding in encodings]


@contextmanager
def _library_works(complaint: str) -> Iterator[None]:
    """Turn what the library raises into a `TokenizerError`; its panics are no `Exception`, nor is Ctrl-C."""
    try:
        yield
    except (TokenizerError, MemoryError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(complaint.format(one_line(error))) from None
        raise


def _check(library: Any) -> bool:
    """Return whether units of text are those of `train_bpe`; refuse a library's JSON with which text would not survive.

    What remains cuts text into units, writes each as bytes, and joins bytes to tokens; nothing is dropped, changed or random.
    """
    require(isinstance(library, dict), "a field has the wrong type")
    for part in ("normalizer", "post_processor", "truncation", "padding", "added_tokens"):
        require(not library.get(part), f"it has a {part.replace('_', ' ')}, so text would not survive")
    model, decoder, outer = (library.get(part) for part in ("model", "decoder", "pre_tokenizer"))
    require(_type(model) == "BPE", "its model is not BPE")
    for name, entries in (("vocab", "tokens"), ("merges", "merges")):
        found = model.get(name)
        require(isinstance(found, dict | list), f"its model has no {name}")
        require(len(found) <= _MOST_PIECES, f"it has {len(found):,} {entries}; {_MOST_PIECES:,} is the most accepted")
    require(not model.get("dropout"), "its model has dropout, so encoding would be random")
    for option in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        require(not model.get(option), f"its model has {option}, so text would not survive")
    require(decoder is None or _type(decoder) == "ByteLevel", "its decoder is not ByteLevel")
    inner = outer.get("pretokenizers") if _type(outer) == "Sequence" else [outer]
    require(isinstance(inner, list) and inner, "it has no pre-tokenizer")
    *cutting, last = inner
    for part in cutting:
        require(_only_cuts(part), f"its pre-tokenizer {shown(part)} may drop text, or never end")
    require(_type(last) == "ByteLevel", "its last pre-tokenizer is not ByteLevel, so text would not survive")
    require(last.get("add_prefix_space") is False, "it puts a space before text (add_prefix_space)")
    own = {"type": "Split", "pattern": {"Regex": _UNITS}, "behavior": "Isolated", "invert": False}
    return cutting == [own] and last.get("use_regex") is False


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _only_cuts(part: Any) -> bool:
    """Return whether a pre-tokenizer keeps all text.

    Of regular expressions, only our own is accepted: on others, such as (a+)+$, the library may work for hours, or panic.
    """
    if _type(part) == "Digits":
        return True
    if _type(part) not in ("Split", "Punctuation") or part.get("behavior") not in _KEEPING:
        return False
    pattern = part.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    return _type(part) == "Punctuation" or bool(literal) or pattern == {"Regex": _UNITS}


def _pieces(vocabulary: dict[str, int]) -> list[bytes]:
    """Return the bytes of each id; the library writes every byte as one printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # these are written as they are,
    others = [value for value in range(256) if value not in printable]  # and these as the characters from U+0100 on
    byte_of = {chr(value): value for value in printable} | {chr(0x100 + i): value for i, value in enumerate(others)}
    pieces: list[bytes | None] = [None] * len(vocabulary)
    for token, index in vocabulary.items():
        require(0 <= index < len(pieces) and pieces[index] is None, f"its ids are not 0 … {len(pieces) - 1}, each once")
        try:
            pieces[index] = bytes(byte_of[character] for character in token)
        except KeyError:
            raise TokenizerError(f"damaged tokenizer: token {token!r} is not made of bytes; train it again") from None
    complete = [piece for piece in pieces if piece is not None]
    require(set(BYTES) <= set(complete), "it lacks some of the 256 bytes")
    return complete


def train_bpe(config: TokenizerConfig, texts: Iterable[str]) -> BPETokenizer:
    """Learn merges from texts: see `train_tokenizer`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    size = DEFAULT_BPE_SIZE if config.vocab_size is None else config.vocab_size
    if size < 256:
        raise TokenizerError(f"tokenizer.vocab_size ({size}) must be at least 256 for bpe, one id per byte; raise it")
    if size > _MOST_PIECES:  # the library allots what it is told, and panics
        raise TokenizerError(f"tokenizer.vocab_size ({size}) must be at most {_MOST_PIECES:,} for bpe; lower it")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_UNITS), behavior="isolated"),
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
    model.train_from_iterator(first_bytes(texts, BPE_TRAINING_BYTES), trainer)
    return BPETokenizer(json.loads(model.to_str()))


def first_bytes(texts: Iterable[str], n_bytes: int) -> Iterator[str]:
    """Yield the texts as far as they have `n_bytes` bytes together."""
    left = n_bytes
    for text in texts:
        yield text[:left]  # counts characters, so the last text may be a little too long
        left -= len(text.encode("utf-8", "surrogatepass"))
        if left <= 0:
            return
