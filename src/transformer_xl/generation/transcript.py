"""Tokens to text as they are written: complete characters only, up to a stop string."""

from collections.abc import Sequence

import numpy as np

from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.generation.stopping import Stopping

_CONTEXT = 512
"""Tokens before a text that may decide how it begins: with a space or without, or within a character."""


class Transcript:
    r"""The text of tokens that come one by one.

    Args:
        tokenizer: decodes.
        before: the tokens before the text; only the last few matter.
        stopping: what ends it.

    Example:
        >>> from transformer_xl.data.tokenizers import ByteTokenizer
        >>> text = Transcript(ByteTokenizer(), [195], Stopping(strings=["."]))
        >>> [text.push(token) for token in b"\xa9t. No"[:4]], text.stopped_by
        (['é', 't', '', ''], '.')
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] | np.ndarray, stopping: Stopping | None = None) -> None:
        self._decoder = tokenizer.stream()
        for token in before[max(0, len(before) - _CONTEXT) :]:
            self._decoder.push(int(token))
        self._stop = (stopping or Stopping()).stream()

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None as long as there is none."""
        return self._stop.stopped_by

    def push(self, token: int) -> str:
        """Take one more token, and return what of the text is certain now."""
        return self._stop.push(self._decoder.push(token))

    def finish(self) -> str:
        """Return the rest: what looked like the beginning of a stop string, or U+FFFD for a part of a character."""
        rest = self._stop.push(self._decoder.finish())
        return rest + self._stop.finish()
