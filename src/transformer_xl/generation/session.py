"""`TextSession`: one text read and written in turns, which a file can keep from one program to the next."""

import base64
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CheckpointError, TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.requests import EMPTY_PROMPT, Chosen, Finished, Request, seeded_generator
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.session_file import RowState
from transformer_xl.generation.writing import write

_TAIL = 512
"""Last tokens that are kept as ids: for a repetition penalty, and for how the text goes on (spaces, parts of characters)."""


class Kept(NamedTuple):
    """What a session remembers: the row's state, the last tokens, how many in all, and the state of its generator."""

    memory: RowState
    tail: tuple[int, ...]
    n_tokens: int
    random: tuple[int, str] | None


class TextSession:
    """One text, read and written in turns; what was read stays in the decoder's memory.

    Args:
        decoder: of one row.
        tokenizer: of the model; a session goes on only with the same one.
        keeps_drawing: random numbers go on from turn to turn, and from a file, so that a text does not depend on how it is cut
            into turns; only the seed of the very first request counts. False: each turn begins with its own seed.

    Attributes:
        tail: the last tokens.
        n_tokens: how many tokens were read and written in all.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, *, keeps_drawing: bool = False) -> None:
        assert decoder.batch_size == 1, "a session is one row"
        self.decoder, self.tokenizer, self.keeps_drawing = decoder, tokenizer, keeps_drawing
        self.tail: deque[int] = deque(maxlen=_TAIL)
        self.n_tokens = 0
        self._random: _Random | None = None

    @property
    def seed(self) -> int | None:
        """The seed that the random numbers began with; None: nothing was drawn yet."""
        return None if self._random is None else self._random[0]

    def write(
        self,
        request: Request,
        *,
        sampling: Sampling,
        likeliest: int | None = None,
        on_read: Callable[[int], object] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[Chosen | Finished]:
        """Read a prompt after all that was read, write on from it, and remember both; see `writing.write`.

        The prompt may be empty if something was read before. The session does not remember a token that ended the text as a
        stop, but it remembers the first tokens of a stop string that takes several.
        """
        if len(request.prompt) == 0 and self.n_tokens == 0:
            raise TokenizerError(EMPTY_PROMPT)
        prompt, n_read = np.asarray(request.prompt), 0

        def read(_: int, n: int) -> None:
            nonlocal n_read
            self._remember(*prompt[n_read : n_read + n][-_TAIL:].tolist(), n=n)
            n_read += n
            if on_read:
                on_read(n)

        last: Chosen | None = None
        if self._random is None or not self.keeps_drawing:
            self._random = request.seed, seeded_generator(request.seed)
        request = replace(request, history=tuple(self.tail), generator=self._random[1])
        for event in write(
            self.decoder,
            [request],
            sampling=sampling,
            likeliest=likeliest,
            go_on=True,
            on_read=read,
            interrupted=interrupted,
        ):
            unread = isinstance(event, Finished) and event.reason == "stop" and event.stop_token is None
            if last is not None and not unread:
                self._remember(last.token)
            last = event if isinstance(event, Chosen) else None
            yield event

    def reset(self) -> None:
        """Forget everything."""
        self.decoder.reset()
        self.tail.clear()
        self.n_tokens, self._random = 0, None

    def save(self, path: Path) -> None:
        """Write the session to a file, which holds the old one or the new one at any time; see `Decoder.save`."""
        note = {"tokenizer": self.tokenizer.fingerprint, "tokens": str(self.n_tokens), "tail": " ".join(map(str, self.tail))}
        if self._random is not None:
            seed, generator = self._random
            note |= {"seed": str(seed), "random": generator_to_text(generator)}
        self.decoder.save(path, note=note)

    def load(self, path: Path) -> None:
        """Forget everything, and go on from a file; see `Decoder.load`. Another tokenizer's session is a CheckpointError."""

        def accept(note: Mapping[str, str]) -> None:
            if note.get("tokenizer", self.tokenizer.fingerprint) != self.tokenizer.fingerprint:
                raise CheckpointError(f"session {str(path)!r} was read with another tokenizer; use that one, or start anew")

        note = self.decoder.load(path, accept=accept)
        tokens = [int(token) for token in note.get("tail", "").split() if _is_whole(token, 10**9)]
        self.tail = deque((token for token in tokens if token < self.tokenizer.vocab_size), maxlen=_TAIL)
        n_tokens = note.get("tokens", "")
        self.n_tokens = int(n_tokens) if _is_whole(n_tokens, 10**18) else max(1, len(self.tail))
        self._random = _random_of(note)

    def keep(self) -> "Kept":
        """Return a copy of all that is remembered, for `restore`."""
        random = None if self._random is None else (self._random[0], generator_to_text(self._random[1]))
        return Kept(self.decoder.take(0), tuple(self.tail), self.n_tokens, random)

    def restore(self, kept: "Kept") -> None:
        """Forget everything, and go on from what `keep` returned; this can be repeated."""
        self.decoder.put(0, kept.memory)
        self.tail = deque(kept.tail, maxlen=_TAIL)
        self.n_tokens = kept.n_tokens
        self._random = None if kept.random is None else (kept.random[0], generator_from_text(kept.random[1]))

    def _remember(self, *tokens: int, n: int = 1) -> None:
        self.tail.extend(tokens)
        self.n_tokens += n


_Random = tuple[int, np.random.Generator]
"""A seed, and the generator that began with it."""


def _random_of(note: Mapping[str, str]) -> _Random | None:
    """Return seed and generator from a note; None if it holds none."""
    seed = note.get("seed", "")
    try:
        return (int(seed), generator_from_text(note["random"])) if _is_whole(seed, 1 << 64) else None
    except (KeyError, ValueError):
        return None


def _is_whole(text: str, end: int) -> bool:
    """Return whether a text is a whole number below `end`."""
    return text.isdecimal() and len(text) <= len(str(end)) and int(text) < end


# --- a random generator as a line of text ----------------------------------------------------------------------------------
# Reference: O'Neill 2014 (PCG, HMC-CS-2014-0905). The state is two numbers of 128 bits, the second of them odd.

_STATE_BYTES = 16


def generator_to_text(generator: np.random.Generator) -> str:
    """Return a generator over PCG64 as text."""
    state: Any = generator.bit_generator.state["state"]
    numbers = (state[name].to_bytes(_STATE_BYTES, "little") for name in ("state", "inc"))
    return base64.b64encode(b"".join(numbers)).decode("ascii")


def generator_from_text(text: str) -> np.random.Generator:
    """Return the generator that a text holds; ValueError if it holds none.

    Example:
        >>> generator = seeded_generator(7)
        >>> same = generator_from_text(generator_to_text(generator))
        >>> same.random() == generator.random()
        True
    """
    data = base64.b64decode(text, validate=True)
    if len(data) != 2 * _STATE_BYTES:
        raise ValueError(f"{len(data)} bytes are not the {2 * _STATE_BYTES} of a generator")
    number, increment = (int.from_bytes(part, "little") for part in (data[:_STATE_BYTES], data[_STATE_BYTES:]))
    if increment % 2 == 0:
        raise ValueError("an even increment is not that of a generator")
    bits = np.random.PCG64(0)
    bits.state = {"bit_generator": "PCG64", "state": {"state": number, "inc": increment}, "has_uint32": 0, "uinteger": 0}
    return np.random.Generator(bits)
