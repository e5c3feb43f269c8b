"""Tokens to text as they are written: complete characters only, up to a stop string; and what else ends a text."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from transformer_xl.errors import ConfigError
from transformer_xl.tokenizers.base import Tokenizer

_CONTEXT = 512
"""Tokens before a text that may decide how it begins: with or without a space, or within a character."""


@dataclass(frozen=True, kw_only=True)
class Stopping:
    r"""What ends a text.

    Attributes:
        tokens: ids that end it; they are not part of the text.
        strings: strings that end it; they are not part of it either. A single string needs no list.

    Example:
        >>> stream = Stopping(strings=["\n\n"]).stream()
        >>> [stream.push(text) for text in ("one\n", "two\n", "\nthree")]
        ['one', '\ntwo', '']
        >>> stream.stopped_by
        '\n\n'
    """

    tokens: Collection[int] = frozenset()
    strings: Collection[str] = ()

    def __post_init__(self) -> None:
        strings = (self.strings,) if isinstance(self.strings, str) else tuple(self.strings)
        object.__setattr__(self, "tokens", frozenset(self.tokens))
        object.__setattr__(self, "strings", strings)
        if "" in strings:
            raise ConfigError("a stop string ('') is empty, so every text would stop at once; leave it out to stop nowhere")
        if negative := sorted(token for token in self.tokens if token < 0):
            raise ConfigError(f"stop token id {negative[0]} must be at least 0")

    def check(self, vocab_size: int) -> None:
        """Raise a ConfigError for a stop token outside the vocabulary, because it would never come."""
        if outside := sorted(token for token in self.tokens if token >= vocab_size):
            raise ConfigError(f"stop token id {outside[0]} is outside the vocabulary ({vocab_size}); leave it out")

    def stream(self) -> "StopStream":
        """Return a filter for one text, which takes it piece by piece."""
        return StopStream(tuple(self.strings))


class StopStream:
    """Passes text on up to the first stop string (`stopped_by`), and holds back what may be the beginning of one.

    The first stop string is the one that is complete first, and of several complete at the same character, the longest. So the
    result does not depend on the pieces in which the text comes.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.stopped_by: str | None = None
        self._strings = sorted(strings, key=len, reverse=True)
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text, and return what can be passed on now; nothing after a stop string."""
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        found = [(place + len(stop), stop) for stop in self._strings if (place := text.find(stop)) >= 0]
        if found:
            end, self.stopped_by = min(found, key=lambda pair: pair[0])  # of equal ends the first, which is the longest
            begin = end - len(self.stopped_by)
            self._held = ""
            return text[:begin]
        n_held = self._n_begun(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def finish(self) -> str:
        """Return what was held back, because the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _n_begun(self, text: str) -> int:
        """Return how many characters at the end of a text may be the beginning of a stop string."""
        longest = len(self._strings[0]) - 1 if self._strings else 0
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._strings):
                return n
        return 0


class Transcript:
    r"""The text of tokens that come one by one after the tokens `before`; only the last few of these matter.

    Example:
        >>> from transformer_xl.tokenizers.kinds import ByteTokenizer
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
        """The stop string that ended the text, or None."""
        return self._stop.stopped_by

    def push(self, token: int) -> str:
        """Take one more token, and return the text that is certain now."""
        return self._stop.push(self._decoder.push(token))

    def finish(self) -> str:
        """Return the rest: a beginning of a stop string, or U+FFFD for a part of a character."""
        rest = self._stop.push(self._decoder.finish())
        return rest + self._stop.finish()
