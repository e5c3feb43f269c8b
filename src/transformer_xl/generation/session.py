"""`TextSession`: one text read and written in turns, which a file can keep from one program to the next."""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_xl.errors import CheckpointError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Chosen, Draft, Event, Read
from transformer_xl.generation.scheduler import write
from transformer_xl.generation.seeds import seeded_generator
from transformer_xl.generation.session_file import RowState
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.untrusted import parse_json

_TAIL = 512
"""Last tokens that are kept as ids: for a repetition penalty, and for how the text goes on (spaces, parts of characters)."""


@dataclass
class TextState:
    """What is known of a text besides what its row remembers."""

    tail: deque[int] = field(default_factory=lambda: deque(maxlen=_TAIL))  # the last tokens
    n_tokens: int = 0  # how many tokens were read and written in all
    random: "_Random | None" = None  # the seed and the random numbers that go on from turn to turn; None: nothing was drawn yet

    def add(self, event: Event) -> None:
        """Remember what its row has read; it does not read a token that ended the text as a stop."""
        draft = event.draft
        if isinstance(event, Read):
            self.tail.extend(draft.ids[draft.n_read - event.n : draft.n_read].tolist())
            self.n_tokens += event.n
        elif isinstance(event, Chosen) and draft.reason != "stop":
            self.tail.append(event.token)
            self.n_tokens += 1

    def draw(self, draft: Draft, *, on: bool) -> "_Random":
        """Let a draft draw `on` with the random numbers of the last one, or else with its own; return what it draws with.

        They become the text's `random` once the draft is accepted, because a refused one must change nothing.
        """
        random = self.random if on and self.random is not None else (draft.seed, draft.generator)
        draft.generator = random[1]
        return random

    def copy(self) -> "TextState":
        """Return the same text, which goes its own way from here."""
        return TextState.of_note(self.note())

    def begun_anew(self) -> "TextState":
        """Return the text as it was before anything was read: its seed stays."""
        return TextState(random=self.random and (self.random[0], seeded_generator(self.random[0])))

    def note(self) -> dict[str, str]:
        """Return it as the note of a session's file."""
        note = {"tokens": str(self.n_tokens), "tail": " ".join(map(str, self.tail))}
        if self.random is not None:
            seed, generator = self.random
            note |= {"seed": str(seed), "random": json.dumps(generator.bit_generator.state)}
        return note

    @classmethod
    def of_note(cls, note: Mapping[str, str], *, vocab_size: int = 10**9) -> "TextState":
        """Return the state that a note holds; what is no such thing in it is left out."""
        tokens = [int(token) for token in note.get("tail", "").split() if _is_whole(token, 10**9)]
        tail = deque((token for token in tokens if token < vocab_size), maxlen=_TAIL)
        n_tokens = note.get("tokens", "")
        return cls(tail, int(n_tokens) if _is_whole(n_tokens, 10**18) else max(1, len(tail)), _random_of(note))


class Kept(NamedTuple):
    """What a session remembers: the row's state, and the text's."""

    memory: RowState
    text: TextState


class TextSession:
    """One text, read and written in turns; what was read stays in the decoder's memory.

    Args:
        decoder: of one row.
        tokenizer: of the model; a session goes on only with the same one.
        keeps_drawing: random numbers go on from turn to turn, and from a file, so that a text does not depend on how it is cut
            into turns; only the seed of the very first request counts. False: each turn begins with its own seed.

    Attributes:
        text: what is known of it besides what its row remembers.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, *, keeps_drawing: bool = False) -> None:
        assert decoder.batch_size == 1, "a session is one row"
        self.decoder, self.tokenizer, self.keeps_drawing = decoder, tokenizer, keeps_drawing
        self.text = TextState()

    def write(self, draft: Draft) -> Iterator[Event]:
        """Read a prompt after all that was read, write on from it, and remember both; see `scheduler.write`.

        The prompt may be empty if something was read before. The session does not remember a token that ended the text as a
        stop, but it remembers the first tokens of a stop string that takes several.
        """
        random = self.text.draw(draft, on=self.keeps_drawing)
        draft.before, draft.remember = tuple(self.text.tail), True
        for event in write(self.decoder, [draft], go_on=True):
            self.text.random = random
            if isinstance(event, Read):
                self.text.add(event)
            yield event
            if isinstance(event, Chosen):  # only now will the row read it
                self.text.add(event)

    def reset(self) -> None:
        """Forget everything."""
        self.decoder.reset()
        self.text = TextState()

    def save(self, path: Path) -> None:
        """Write the session to a file, which holds the old one or the new one at any time; see `Decoder.save`."""
        self.decoder.save(path, note={"tokenizer": self.tokenizer.fingerprint, **self.text.note()})

    def load(self, path: Path) -> None:
        """Forget everything, and go on from a file; see `Decoder.load`. Another tokenizer's session is a CheckpointError."""

        def accept(note: Mapping[str, str]) -> None:
            if note.get("tokenizer", self.tokenizer.fingerprint) != self.tokenizer.fingerprint:
                raise CheckpointError(f"session {str(path)!r} was read with another tokenizer; use that one, or start anew")

        self.text = TextState.of_note(self.decoder.load(path, accept=accept), vocab_size=self.tokenizer.vocab_size)

    def keep(self) -> "Kept":
        """Return a copy of all that is remembered, for `restore`."""
        return Kept(self.decoder.take(0), self.text.copy())

    def restore(self, kept: "Kept") -> None:
        """Forget everything, and go on from what `keep` returned; this can be repeated."""
        self.decoder.put(0, kept.memory)
        self.text = kept.text.copy()


_Random = tuple[int, np.random.Generator]
"""A seed, and the generator that began with it."""


def _random_of(note: Mapping[str, str]) -> _Random | None:
    """Return seed and generator from a note; None if it holds none."""
    seed, bits = note.get("seed", ""), np.random.PCG64(0)
    try:
        bits.state = parse_json(note.get("random", "").encode())
    except (KeyError, OverflowError, TypeError, ValueError):
        return None
    is_sound = bits.state["state"]["inc"] % 2 == 1  # O'Neill 2014 (PCG, HMC-CS-2014-0905)
    return (int(seed), np.random.Generator(bits)) if is_sound and _is_whole(seed, 1 << 64) else None


def _is_whole(text: str, end: int) -> bool:
    """Return whether a text is a whole number below `end`."""
    return text.isdecimal() and len(text) <= len(str(end)) and int(text) < end
