"""Prompts that begin alike are read once: what a row remembers within a prompt is kept, and the next prompt goes on from it.

A model with a memory of fixed size cannot share keys of single tokens among texts, as attention over the whole text can. But
what it remembers at one place has a fixed size, too, so a number of bytes holds a known number of places:

    prompt A   |--------|--------|--------|-----        | pieces of the reading length
    kept                                  ^ after its last whole piece
    prompt B   |--------|--------|----x---|--           x differs from A
    kept                         ^ where A and B part, once B has come by

A place is always between two pieces, so a prompt is read in the same pieces from there, to the same bits.
"""

import hashlib
from collections import OrderedDict

import numpy as np

from transformer_xl.generation.session_file import RowState

_MOST_SEEN = 65_536
"""The most places of earlier prompts to recognize; each takes the 32 bytes of its hash."""


class Prefixes:
    """What rows remembered at places of prompts, the places used last; an owner never gets those of another.

    Args:
        piece: the reading length, tokens.
        most: how many places to keep; 0: none.

    Example:
        >>> prefixes, state = Prefixes(piece=2, most=1), RowState({}, {}, "")
        >>> path = prefixes.path("me", np.array([5, 6, 7, 8, 9]))
        >>> prefixes.longest(path), prefixes.due(path) == {4: path[1]}
        ((0, None), True)
        >>> prefixes.add(path[1], state)
        >>> prefixes.longest(prefixes.path("me", np.array([5, 6, 7, 8, 1])))[0]
        4
    """

    def __init__(self, *, piece: int, most: int) -> None:
        self.most, self._piece = most, piece
        self._states = OrderedDict[bytes, RowState]()
        self._seen = OrderedDict[bytes, None]()

    def path(self, owner: str, prompt: np.ndarray) -> list[bytes]:
        """Return a hash of what an owner's prompt has read after each of its whole pieces, but not after its last token."""
        digest, path = hashlib.sha256(owner.encode()), list[bytes]()
        for end in range(self._piece, len(prompt) if self.most else 0, self._piece):
            digest.update(prompt[end - self._piece : end].astype("<i8").tobytes())
            path.append(digest.digest())
        return path

    def longest(self, path: list[bytes]) -> tuple[int, RowState | None]:
        """Return the last place on a path that is kept, in tokens, and what a row remembers there; 0 and None: none is."""
        for i in reversed(range(len(path))):
            if state := self._states.get(path[i]):
                self._states.move_to_end(path[i])
                return (i + 1) * self._piece, state
        return 0, None

    def due(self, path: list[bytes]) -> dict[int, bytes]:
        """Return the places to keep, in tokens: the last one of a path, and the last one that an earlier prompt came by."""
        shared = next((i for i in reversed(range(len(path))) if path[i] in self._seen), None)
        for key in path:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        places = {i for i in (shared, len(path) - 1) if i is not None and i >= 0 and path[i] not in self._states}
        return {(i + 1) * self._piece: path[i] for i in places if self.most}

    def add(self, key: bytes, state: RowState) -> None:
        """Keep what a row remembers at a place of a path."""
        self._states[key] = state
        while len(self._states) > self.most:
            self._states.popitem(last=False)
