"""Unigram tokenizers that releases before 0.3 saved: their pieces and scores become a model of SentencePiece.

A model is a message of protocol buffers: google/sentencepiece `src/sentencepiece_model.proto`.
"""

import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of pieces
_UNIGRAM = 1


def unigram_model(
    *,
    pieces: Sequence[str],
    scores: Sequence[float],
    unknown: str,
    control: Sequence[str],
    user_defined: Sequence[str],
    unused: Sequence[str],
    byte_fallback: bool,
    rules: str,  # for characters: the table of the model, in base 64
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    unknown_text: str,
) -> str:
    """Return the model, in base 64, of what a file of 0.2 holds."""
    types = {f"<0x{byte:02X}>": _BYTE for byte in range(256)} if byte_fallback else {}
    types |= dict.fromkeys(unused, _UNUSED) | dict.fromkeys(user_defined, _USER_DEFINED)
    types |= dict.fromkeys(control, _CONTROL) | {unknown: _UNKNOWN}
    model = b"".join(
        _field(1, _field(1, piece) + _field(2, float(score)) + _field(3, types.get(piece, _NORMAL)))
        for piece, score in zip(pieces, scores, strict=True)
    )
    model += _field(2, _field(3, _UNIGRAM) + _field(35, bool(byte_fallback)) + _field(44, unknown_text))
    spacing = _field(3, bool(add_dummy_prefix)) + _field(4, bool(remove_extra_whitespaces))
    return b64encode(model + _field(3, spacing + _field(2, b64decode(rules, validate=True)))).decode()


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
