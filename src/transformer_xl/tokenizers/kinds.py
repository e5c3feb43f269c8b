"""Tokenizers trained, saved and loaded: bytes, characters, words, byte-level BPE, Unigram, ids.

A tokenizer is trained once (`train_tokenizer`), saved as JSON, and never changes. Byte, BPE and character tokenizers are exact:
`decode(encode(text)) == text`. The others say in `loses` what they drop. Converted models use the same classes
(`transformer_xl.conversion.vocabulary`).

Text may be encoded in pieces: `encode(a + b)` is `encode(a)` followed by `encode(b)` when `a` ends with a line end and `b` does
not begin with one. (Bytes and characters: at any code point. Words: at any white space.) A text without line ends is cut at
other white space, where BPE may form one token more than without the cut.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError, did_you_mean, one_line, shown
from transformer_xl.manifest import Manifest
from transformer_xl.tokenizers.base import FORMAT, Tokenizer, require
from transformer_xl.tokenizers.bpe import BPETokenizer, train_bpe
from transformer_xl.tokenizers.characters import ByteTokenizer, CharTokenizer, SymbolTokenizer, train_characters
from transformer_xl.tokenizers.ids import IdTokenizer
from transformer_xl.tokenizers.unigram import SentencePieceTokenizer, train_unigram
from transformer_xl.tokenizers.unigram_files import unigram_model
from transformer_xl.tokenizers.words import WordTokenizer, train_words
from transformer_xl.untrusted import parse_json

_CLASSES = (ByteTokenizer, CharTokenizer, WordTokenizer, BPETokenizer, SentencePieceTokenizer, SymbolTokenizer, IdTokenizer)
_KINDS: dict[str, Any] = {cls.kind: cls for cls in _CLASSES}


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Learn a tokenizer from a stream of texts; only counts are kept in memory, and BPE and Unigram read only 16 MiB.

    Raises:
        TokenizerError: a vocabulary size that cannot work, or no text to learn from.
    """
    if config.kind == "byte":
        return ByteTokenizer()
    if config.kind == "ids":
        if config.vocab_size is None:
            raise TokenizerError("tokenizer.vocab_size is missing, the number of ids; only a corpus of ids tells it")
        return IdTokenizer(config.vocab_size, config.pad_id)
    train = {"char": train_characters, "word": train_words, "bpe": train_bpe, "unigram": train_unigram}[config.kind]
    return train(config, texts)


def load_tokenizer(path: Path, *, manifest: Manifest | None = None) -> Tokenizer:
    """Read a tokenizer that `Tokenizer.save` wrote.

    Raises:
        TokenizerError: it is inconsistent or of an unknown kind.
        CheckpointError: it is another than the manifest says.
    """
    data = Path(path).read_bytes()
    if manifest:
        manifest.check(Path(path), hashlib.sha256(data).hexdigest())
    return read_tokenizer(data, Path(path))


def read_tokenizer(data: bytes, path: Path) -> Tokenizer:
    """Return the tokenizer that a file of this content holds; `path` is named in errors, see `load_tokenizer`."""
    try:
        values = parse_json(data)
        require(isinstance(values, dict), "it is not a JSON object")
        return tokenizer_from_dict(values)
    except ValueError as error:  # of JSON, or a TokenizerError
        raise TokenizerError(f"tokenizer '{path}': {one_line(error)}") from None


def tokenizer_from_dict(values: dict[str, Any]) -> Tokenizer:
    """Make a tokenizer from what `Tokenizer.to_dict` returned.

    Raises:
        TokenizerError: unknown kind or format, or values that do not fit together.
    """
    try:
        values = _of_0_2(values)
        fields = dict(values)
        kind, file_format = fields.pop("kind", None), fields.pop("format", None)
        if not isinstance(kind, str) or kind not in _KINDS:
            raise TokenizerError(f"unknown tokenizer kind {shown(kind)}; {did_you_mean(str(kind)[:100], _KINDS)}")
        if type(file_format) is not int or file_format != FORMAT:
            raise TokenizerError(f"tokenizer format {shown(file_format)} is not {FORMAT}; use the version of txl that wrote it")
        tokenizer = _KINDS[kind](**fields)
        require(tokenizer.to_dict() == values, "it is not in the form in which tokenizers are saved")
    except TokenizerError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        # a field is missing, unknown, or of another type
        raise TokenizerError(f"damaged tokenizer: {one_line(error)}; restore it from a copy") from None
    return tokenizer


def _of_0_2(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without what only 0.2 wrote: a checksum, what ids mean in music, and an option that nothing set."""
    values = {name: value for name, value in values.items() if name not in ("checksum", "events")}
    if values.get("kind") == "symbols" and values.get("line_end", "") is None:
        del values["line_end"]
    if values.get("kind") == "unigram" and "pieces" in values:
        kept = ("kind", "format", "normalization", "lower_case", "keep_accents", "line_end")
        kept = {name: values.pop(name) for name in kept}
        values = {**kept, "model": unigram_model(**values)}
    return values
