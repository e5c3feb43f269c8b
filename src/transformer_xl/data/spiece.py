"""`spiece.model`: the file of a Unigram model of SentencePiece, read without the library.

The file is a message of protocol buffers (google/sentencepiece `src/sentencepiece_model.proto`). Of its fields, those are read
that decide ids. Whatever a field claims is compared with the bytes that are there; nothing refers to anything else.
"""

import struct
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from transformer_xl.data.unigram import BYTE_PIECES, UnigramTokenizer
from transformer_xl.errors import CheckpointError, TokenizerError, one_line
from transformer_xl.untrusted import read_small

MAX_BYTES = 16 << 20
"""The largest file that is read; XLNet's have 0.8 MB."""

MAX_FIELDS = 300_000
"""The most fields of a message; a file has one for each piece."""

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # how a field is written
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of pieces
_UNIGRAM = 1
_NAMES = {2: "BPE", 3: "word", 4: "character"}


def read_spiece(
    path: Path,
    *,
    normalization: Literal["none", "xlnet"] = "xlnet",
    lower_case: bool = False,
    keep_accents: bool = False,
    line_end: str | None = None,
) -> UnigramTokenizer:
    """Read a model that SentencePiece trained, such as XLNet's `spiece.model`.

    Args:
        path: of the file.
        normalization: "xlnet": as XLNet reads text, with its way of writing commas after digits; "none": as SentencePiece does.
        lower_case: fold case; XLNet's published models do not.
        keep_accents: leave accents; these models do not.
        line_end: the piece put after each line; None: nothing is.

    Raises:
        TokenizerError: the file cannot be read, is damaged or too large, or holds another kind of model, or one that could not
            be reproduced.
    """
    path = Path(path)
    try:
        data = read_small(path, most_bytes=MAX_BYTES)
        fields = _model(data)
        return UnigramTokenizer(
            **fields, normalization=normalization, lower_case=lower_case, keep_accents=keep_accents, line_end=line_end
        )
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None
    except (ValueError, UnicodeDecodeError) as error:
        reason = one_line(error).removeprefix("unusable tokenizer: ").partition("; restore the file")[0]
        raise TokenizerError(f"'{path}' is no usable spiece.model: {reason}; restore it from a copy") from None


def _model(data: bytes) -> dict[str, Any]:
    """Return the arguments of a `UnigramTokenizer`."""
    pieces: list[tuple[str, float, int]] = []
    training: dict[int, Any] = {}
    spacing: dict[int, Any] = {}
    found: set[int] = set()
    for number, value in list(_fields(data)):  # of too many, none is looked at
        found.add(number)
        if number == 1:
            pieces.append(_piece(_bytes(value)))
        elif number == 2:
            training |= dict(_fields(_bytes(value)))
        elif number == 3:
            spacing |= dict(_fields(_bytes(value)))
        elif number == 5 and any(content for _, content in _fields(_bytes(value)) if isinstance(content, bytes)):
            raise ValueError("it changes text when decoding (denormalizer_spec)")
    if not pieces:
        raise ValueError("it has no pieces")
    kind = _integer(training.get(3, _UNIGRAM))
    if kind != _UNIGRAM:
        raise ValueError(f"its model is {_NAMES.get(kind, f'number {kind}')}, not unigram")
    if _integer(training.get(24, 0)) or not _integer(spacing.get(5, 1)):
        raise ValueError("it writes spaces after words, or as spaces; only models with a mark before words are read")

    def of(kind: int) -> list[str]:
        return [piece for piece, _, each in pieces if each == kind]

    unknown = of(_UNKNOWN)
    if len(unknown) != 1:
        raise ValueError(f"it has {len(unknown)} pieces for unknown text, not one")
    if not {2, 3} <= found:
        raise ValueError("it ends before its settings")
    byte_fallback = bool(_integer(training.get(35, 0)))
    if set(of(_BYTE)) != set(BYTE_PIECES if byte_fallback else ()):
        raise ValueError("its pieces for bytes do not fit to its settings")
    return {
        "pieces": [piece for piece, *_ in pieces],
        "scores": [score for _, score, _ in pieces],
        "unknown": unknown[0],
        "control": of(_CONTROL),
        "user_defined": of(_USER_DEFINED),
        "unused": of(_UNUSED),
        "byte_fallback": byte_fallback,
        "rules": b64encode(_bytes(spacing.get(2, b""))).decode(),
        "add_dummy_prefix": bool(_integer(spacing.get(3, 1))),
        "remove_extra_whitespaces": bool(_integer(spacing.get(4, 1))),
        "unknown_text": _bytes(training[44]).decode() if 44 in training else " \u2047 ",
    }


def _piece(data: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(data, most=16))
    score = fields.get(2, 0.0)
    if not isinstance(score, float):
        raise ValueError("the score of a piece is no number")
    return _bytes(fields.get(1, b"")).decode(), score, _integer(fields.get(3, _NORMAL))


def _fields(data: bytes, *, most: int = MAX_FIELDS) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield number and value of every field of a message; what a value holds is not looked at."""
    at, n_fields = 0, 0
    while at < len(data):
        n_fields += 1
        if n_fields > most:
            raise ValueError(f"it has more than {most:,} fields")
        key, at = _varint(data, at)
        number, form = key >> 3, key & 7
        if form == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        length, at = _varint(data, at) if form == _BYTES else ({_FOUR: 4, _EIGHT: 8}.get(form, -1), at)
        if not 0 <= length <= len(data) - at or number == 0:
            raise ValueError(f"the field at byte {at} is cut short, or no field")
        content, at = data[at : at + length], at + length
        yield number, struct.unpack("<f", content)[0] if form == _FOUR else content


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"the number before byte {at} has no end")


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError("a field that should be an integer is none")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field that should be text or a message is none")
    return value
