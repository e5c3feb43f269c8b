"""`TextSession`: one text read and written in turns, which a file can keep from one program to the next."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError, TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.snapshot import MAX_ABOUT_BYTES
from transformer_xl.generation.writing import EMPTY_PROMPT, Chosen, Finished, Request, write

_TAIL = 512
"""Last tokens that are kept as such: for a repetition penalty, and for how the text goes on (spaces, parts of characters)."""


class TextSession:
    """One text, read and written in turns; what was read stays in the decoder's memory.

    Args:
        decoder: of one row.
        tokenizer: of the model; a session goes on with no other.

    Attributes:
        tail: the last tokens.
        n_tokens: how many tokens were read and written in all.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        assert decoder.batch_size == 1, "a session is one row"
        self.decoder, self.tokenizer = decoder, tokenizer
        self.tail: deque[int] = deque(maxlen=_TAIL)
        self.n_tokens = 0

    def write(
        self,
        request: Request,
        *,
        sampling: Sampling,
        likeliest: int | None = None,
        on_read: Callable[[int], object] | None = None,
    ) -> Iterator[Chosen | Finished]:
        """Read a prompt after all that was read, write on from it, and remember both; see `writing.write`.

        The prompt may be empty where something was read before. A token that ended the text as a stop is not remembered; of a
        stop string in several tokens, the first ones are.
        """
        if len(request.prompt) == 0 and self.n_tokens == 0:
            raise TokenizerError(EMPTY_PROMPT)
        prompt, n_read = np.asarray(request.prompt), 0

        def read(n: int) -> None:
            nonlocal n_read
            self._remember(*prompt[n_read : n_read + n][-_TAIL:].tolist(), n=n)
            n_read += n
            if on_read:
                on_read(n)

        last: Chosen | None = None
        request = replace(request, history=tuple(self.tail))
        for event in write(self.decoder, [request], sampling=sampling, likeliest=likeliest, go_on=True, on_read=read):
            unread = isinstance(event, Finished) and event.reason == "stop" and event.stop_token is None
            if last is not None and not unread:
                self._remember(last.token)
            last = event if isinstance(event, Chosen) else None
            yield event

    def reset(self) -> None:
        """Forget everything."""
        self.decoder.reset()
        self.tail.clear()
        self.n_tokens = 0

    def save(self, path: Path) -> None:
        """Write the session to a file, which holds the old one or the new one at any time.

        Raises:
            CheckpointError: the file cannot be written; what it held before is intact.
        """
        note = {"tokenizer": self.tokenizer.fingerprint, "tokens": str(self.n_tokens), "tail": " ".join(map(str, self.tail))}
        self.decoder.save(path, note=note)

    def load(self, path: Path) -> None:
        """Forget everything, and go on from a file.

        Raises:
            CheckpointError: no such file, a damaged one, or a session of another model, decoder or tokenizer.
        """
        theirs = describe(path).get("note", {}).get("tokenizer", self.tokenizer.fingerprint)
        if theirs != self.tokenizer.fingerprint:
            raise CheckpointError(f"session '{path}' was read with another tokenizer; use that one, or start anew")
        note = self.decoder.load(path)
        tail, n_tokens = note.get("tail", ""), note.get("tokens", "")
        tokens = [int(token) for token in tail.split() if token.isdecimal() and len(token) < 10]
        self.tail = deque((token for token in tokens if token < self.tokenizer.vocab_size), maxlen=_TAIL)
        self.n_tokens = int(n_tokens) if n_tokens.isdecimal() and len(n_tokens) < 19 else max(1, len(self.tail))

    def _remember(self, *tokens: int, n: int = 1) -> None:
        self.tail.extend(tokens)
        self.n_tokens += n


def describe(path: Path) -> dict[str, Any]:
    """Return what a file says that it is, unverified: `decoder`, how it was opened, and `note`; empty if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            if math.prod(file.get_slice("about").get_shape()) > MAX_ABOUT_BYTES:
                return {}
            about = json.loads(file.get_tensor("about").numpy().tobytes())
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError):
        return {}
    return about if isinstance(about, dict) and all(isinstance(about.get(key), dict) for key in ("decoder", "note")) else {}
