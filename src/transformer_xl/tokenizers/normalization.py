"""How XLNet changes text before SentencePiece cuts it, with the place of every character in the original.

Reference: zihangdai/xlnet `prepro_utils.py`, `preprocess_text`.
"""

import re
import unicodedata
from typing import NamedTuple

import numpy as np

_QUOTES = re.compile("``|''")
_PARTS = re.compile(r"``|''|\s+|\S")


class Aligned(NamedTuple):
    """A changed text, and where each of its characters comes from: the original's characters `starts[i]` to `ends[i]`."""

    text: str
    starts: np.ndarray
    ends: np.ndarray


def xlnet_text(text: str, *, lower_case: bool = False, keep_accents: bool = False) -> str:
    """Return a text as XLNet reads it: single spaces, plain quotes, no accents."""
    text = _QUOTES.sub('"', " ".join(text.split()))
    if not keep_accents and not text.isascii():
        text = _without_accents(text)
    return text.lower() if lower_case else text


def xlnet_aligned(text: str, *, lower_case: bool = False, keep_accents: bool = False) -> Aligned:
    """Return the same as `xlnet_text`, with the place of every character."""
    parts = list(_PARTS.finditer(text, len(text) - len(text.lstrip()), len(text.rstrip())))
    written = [_written(part.group(), keep_accents) for part in parts]
    changed, sizes = "".join(written), np.array([len(each) for each in written], np.int64)
    starts = np.repeat(np.array([part.start() for part in parts], np.int64), sizes)
    ends = np.repeat(np.array([part.end() for part in parts], np.int64), sizes)
    if not lower_case:
        return Aligned(changed, starts, ends)
    # the lower case of a sigma depends on its neighbors, but not how many characters it has
    sizes = np.array([len(character.lower()) for character in changed], np.int64)
    return Aligned(changed.lower(), np.repeat(starts, sizes), np.repeat(ends, sizes))


def _written(part: str, keep_accents: bool) -> str:
    if part.isspace():
        return " "
    if len(part) == 2:
        return '"'
    return part if keep_accents else _without_accents(part)


def _without_accents(text: str) -> str:
    return "".join([character for character in unicodedata.normalize("NFKD", text) if not unicodedata.combining(character)])
