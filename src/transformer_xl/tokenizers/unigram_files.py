"""Unigram tokenizers that releases before 0.3 saved: their pieces and scores become a model of SentencePiece.

A model is a message of protocol buffers: google/sentencepiece `src/sentencepiece_model.proto`.
"""

import struct
from base64 import b64decode, b64encode
from typing import Any, Literal

from transformer_xl.config.settings import Settings
from transformer_xl.errors import ConfigError, TokenizerError, one_line
from transformer_xl.tokenizers.unigram import SentencePieceTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of pieces
_UNIGRAM = 1


class _Values(Settings):
    kind: Literal["unigram"]
    format: Literal[1]
    pieces: list[str]
    scores: list[float]
    unknown: str
    control: list[str]
    user_defined: list[str]
    unused: list[str]
    byte_fallback: bool
    rules: str  # for characters: the table of the model, in base 64
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    unknown_text: str
    normalization: Literal["none", "spaces", "xlnet"]
    lower_case: bool
    keep_accents: bool
    line_end: str | None


def read_unigram(values: dict[str, Any]) -> SentencePieceTokenizer:
    """Return the tokenizer of what a file of 0.2 holds."""
    try:
        known = _Values(**values)
        model = b64encode(_model(known)).decode()
    except (ConfigError, ValueError, OverflowError, struct.error) as error:
        raise TokenizerError(f"damaged tokenizer: {one_line(error)}; restore it from a copy") from None
    options = ("normalization", "lower_case", "keep_accents", "line_end")
    return SentencePieceTokenizer(model, **{name: getattr(known, name) for name in options})


def _model(values: _Values) -> bytes:
    kinds = {f"<0x{byte:02X}>": _BYTE for byte in range(256)} if values.byte_fallback else {}
    kinds |= dict.fromkeys(values.unused, _UNUSED) | dict.fromkeys(values.user_defined, _USER_DEFINED)
    kinds |= dict.fromkeys(values.control, _CONTROL) | {values.unknown: _UNKNOWN}
    pieces = [
        _field(1, _field(1, piece) + _field(2, score) + _field(3, kinds.get(piece, _NORMAL)))
        for piece, score in zip(values.pieces, values.scores, strict=True)
    ]
    training = _field(3, _UNIGRAM) + _field(35, values.byte_fallback) + _field(44, values.unknown_text)
    spacing = _field(3, values.add_dummy_prefix) + _field(4, values.remove_extra_whitespaces)
    spacing += _field(2, b64decode(values.rules, validate=True))
    return b"".join(pieces) + _field(2, training) + _field(3, spacing)


def _field(number: int, value: bytes | int | float | str) -> bytes:
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = b""
    while value >= 0x80:
        data, value = data + bytes([value & 0x7F | 0x80]), value >> 7
    return data + bytes([value])
