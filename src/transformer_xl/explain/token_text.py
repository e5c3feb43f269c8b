"""Tokens as a person sees them: the text that each adds, and a label for each id.

A token may be a part of a character, such as a byte. Only the token that completes the character adds text.
"""

import re

import numpy as np

from transformer_xl.tokenizers.base import Tokenizer

_LONGEST_LABEL = 80


def without_surrogates(text: str) -> str:
    """Replace lone surrogates by U+FFFD: names of files may have them, and UTF-8 cannot hold them."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def text_of(tokenizer: Tokenizer, ids: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the text of ids (N,), and how many UTF-16 code units each token adds, int64 (N,).

    A token that completes no character adds 0. A lone surrogate becomes U+FFFD.

    Example:
        >>> from transformer_xl.tokenizers.kinds import ByteTokenizer
        >>> text_of(ByteTokenizer(), np.array([110, 195, 169]))
        ('né', array([1, 0, 1]))
    """
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in ids.tolist()]
    if pieces:
        pieces[-1] += stream.finish()
    pieces = [piece if piece.isascii() else without_surrogates(piece) for piece in pieces]
    lengths = np.fromiter((len(piece.encode("utf-16-le")) // 2 for piece in pieces), np.int64, len(pieces))
    return "".join(pieces), lengths


def label(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Return a token's text, or \xNN for each byte if it is not text, or its number if it is empty.

    Example:
        >>> from transformer_xl.tokenizers.kinds import ByteTokenizer
        >>> label(ByteTokenizer(), 65), label(ByteTokenizer(), 0xC3)
        ('A', '\\xc3')
    """
    piece = tokenizer.piece(token_id)
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        text = "".join(f"\\x{byte:02x}" for byte in piece)
    text = text or f"token {token_id}"
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"


def labels(tokenizer: Tokenizer, *arrays: np.ndarray) -> tuple[list[str], list[np.ndarray]]:
    """Return a label for each id that occurs, and the arrays of ids as indices of labels."""
    known = np.unique(np.concatenate([ids.ravel() for ids in arrays]))
    return [label(tokenizer, token_id) for token_id in known.tolist()], [np.searchsorted(known, ids) for ids in arrays]
