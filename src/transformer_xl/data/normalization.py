"""How text is changed before a Unigram tokenizer cuts it into pieces, with the place of every character in the original.

Each change comes in two forms: one that is fast, and one that also says where each character comes from.

Reference: zihangdai/xlnet `prepro_utils.py` for `xlnet_text`; google/sentencepiece `src/normalizer.cc` for the classes.
"""

import re
import sys
import unicodedata
from array import array
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

SPACE = "\u2581"
"""What stands for a space inside of pieces."""

MAX_TABLE_BYTES = 1 << 22
"""The largest table of rules for characters; those of SentencePiece itself have 0.25 MB."""

MAX_RULE = 32
"""The most characters that a rule replaces, or writes."""

_LABEL, _VALUE, _ENDS = 0x800000FF, 0x7FFFFFFF, 0x100  # what a unit of a double array says: a byte, a place, that a rule ends
_MOST_STEPS = 1 << 18
_ROWS = 4096  # units whose children are looked for at once
_QUOTES = re.compile("``|''")
_WORDS = re.compile(r"\S+")
_Units = TypeVar("_Units", int, np.ndarray)


class Aligned(NamedTuple):
    """A changed text, and where each of its characters comes from: the original's characters `starts[i]` to `ends[i]`."""

    text: str
    starts: list[int]
    ends: list[int]

    def after(self, first: "Aligned") -> "Aligned":
        """Return this change, made to the text of `first`, as a change of what `first` was made to."""
        starts = [first.starts[at] for at in self.starts]
        ends = [
            first.ends[end - 1] if end > at else start for at, end, start in zip(self.starts, self.ends, starts, strict=True)
        ]
        return Aligned(self.text, starts, ends)


def aligned(parts: Iterable[tuple[str, int, int]]) -> Aligned:
    """Join parts, each with the place that all of its characters come from.

    Example:
        >>> aligned([("a", 0, 1), ("bc", 1, 2)])
        Aligned(text='abc', starts=[0, 1, 1], ends=[1, 2, 2])
    """
    known = list(parts)
    starts = [start for text, start, _ in known for _ in text]
    return Aligned("".join([text for text, *_ in known]), starts, [end for text, _, end in known for _ in text])


def xlnet_text(text: str, *, lower_case: bool = False, keep_accents: bool = False) -> str:
    r"""Return a text as XLNet reads it: single spaces, plain quotes, no accents.

    Example:
        >>> xlnet_text("  Caf\u00e9,\t``\u00bd''  ")
        'Cafe, "1\u20442"'
    """
    text = _QUOTES.sub('"', " ".join(text.split()))
    if not keep_accents and not text.isascii():
        text = _without_accents(text)
    return text.lower() if lower_case else text


def spaced_aligned(text: str) -> Aligned:
    """Return a text without space at its ends and with one space between words, with the place of every character."""
    return aligned(_spaced(text))


def _spaced(text: str) -> list[tuple[str, int, int]]:
    parts: list[tuple[str, int, int]] = []
    for found in _WORDS.finditer(text):
        parts += [(" ", parts[-1][2], found.start())] if parts else []
        parts += [(text[i], i, i + 1) for i in range(*found.span())]
    return parts


def xlnet_aligned(text: str, *, lower_case: bool = False, keep_accents: bool = False) -> Aligned:
    """Return the same as `xlnet_text`, with the place of every character."""
    parts = _spaced(text)
    spaced = aligned(parts)
    quotes = [found.start() for found in _QUOTES.finditer(spaced.text)]
    for at in reversed(quotes):
        parts[at : at + 2] = [('"', parts[at][1], parts[at + 1][2])]
    if not keep_accents:  # the order of marks, which a whole text's normal form may change, does not matter to what has none
        parts = [(_without_accents(character), start, end) for character, start, end in parts]
    plain = aligned(parts)
    if not lower_case:
        return plain
    # the lower case of a sigma depends on its neighbors, but not how many characters it has
    sizes = [len(character.lower()) for character in plain.text]
    lowered, ends = plain.text.lower(), list(accumulate(sizes))
    parts = [
        (lowered[last - size : last], start, end)
        for size, last, start, end in zip(sizes, ends, plain.starts, plain.ends, strict=True)
    ]
    return aligned(parts)


def _without_accents(text: str) -> str:
    return "".join([character for character in unicodedata.normalize("NFKD", text) if not unicodedata.combining(character)])


class CharacterMap:
    """SentencePiece's rules for characters: what is written in their place.

    The table is a double array (github.com/s-yata/darts-clone), a tree in one row of 32-bit units, and the texts to which it
    leads. The child of a unit for a byte is at its own place ^ offset ^ byte, if the unit there names that byte.

    Args:
        table: `precompiled_charsmap` of the file: bytes of the array, the array, texts that each end with a zero byte.

    Raises:
        ValueError: the table leads out of itself, or to what is no short text.
    """

    def __init__(self, table: bytes) -> None:
        if len(table) > MAX_TABLE_BYTES:
            raise ValueError(f"its table of characters has {len(table):,} bytes; {MAX_TABLE_BYTES:,} is the most accepted")
        size = int.from_bytes(table[:4], "little")
        if size % 4 or not 4 <= size <= len(table) - 5:
            raise ValueError("its table of characters is cut short")
        self._targets = table[4 + size :]
        _check_table(np.frombuffer(table[4 : 4 + size], "<u4").astype(np.int64), self._targets)
        self._units = array("I", table[4 : 4 + size])
        if sys.byteorder == "big":
            self._units.byteswap()
        self._steps: dict[tuple[int, str], tuple[int, int | None] | None] = {}

    def longest(self, text: str, at: int) -> tuple[str, int] | None:
        """Return what is written for the characters from a place on, and where they end; None if there is no rule for them."""
        place, found = self._root, None
        for end in range(at + 1, min(len(text), at + MAX_RULE) + 1):
            step = self._step(place, text[end - 1])
            if step is None:
                break
            place, target = step
            found = found if target is None else (target, end)
        if found is None:
            return None
        target, end = found
        return self._targets[target : self._targets.index(0, target)].decode(), end

    @property
    def _root(self) -> int:
        return _offset(self._units[0])

    def _step(self, place: int, character: str) -> tuple[int, int | None] | None:
        """Return where a character leads to, and where its text begins if a rule ends with it; None if no rule goes on so."""
        key = (place, character)
        if key not in self._steps:
            if len(self._steps) > _MOST_STEPS:
                self._steps.clear()
            self._steps[key] = self._walk(place, character.encode())
        return self._steps[key]

    def _walk(self, place: int, data: bytes) -> tuple[int, int | None] | None:
        unit = 0
        for byte in data:
            place ^= byte
            if byte == 0 or place >= len(self._units) or (unit := self._units[place]) & _LABEL != byte:
                return None
            place ^= _offset(unit)
        return place, self._units[place] & _VALUE if unit & _ENDS else None

    @cached_property
    def ascii_signs(self) -> frozenset[str]:
        """ASCII characters that begin a rule: an ASCII text without any of them is not changed."""
        letters = [chr(value) for value in range(1, 128)]
        steps = {letter: self._step(self._root, letter) for letter in letters}
        return frozenset(
            letter
            for letter, step in steps.items()
            if step and (step[1] is not None or any(self._walk(step[0], other.encode()) for other in letters))
        )


def _offset(unit: _Units) -> _Units:
    """Return the offset in a unit, or in each of an array."""
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _check_table(units: np.ndarray, targets: bytes) -> None:
    """Refuse a table with a step that leads out of it, or into the middle of a character."""
    if targets[-1:] != b"\0" or max(map(len, targets.split(b"\0"))) > 4 * MAX_RULE:
        raise ValueError(f"its table of characters writes more than {MAX_RULE} characters for one")
    targets.decode()
    text = np.frombuffer(targets, np.uint8)
    reached = np.zeros(len(units), bool)
    new = np.zeros(1, np.int64)
    while len(new):
        reached[new] = True
        batch, waiting = new[:_ROWS], new[_ROWS:]
        unit = units[batch]
        base = batch ^ _offset(unit)
        leaves = base[(unit & _ENDS) != 0]
        if leaves.size and leaves.max() >= len(units):
            raise ValueError("its table of characters leads out of itself")
        values = units[leaves] & _VALUE
        if values.size and (values.max() >= len(text) or np.any((text[values] & 0xC0) == 0x80)):
            raise ValueError("its table of characters leads to no text")
        child = base[:, None] ^ np.arange(1, 256)
        inside = np.minimum(child, len(units) - 1)
        fits = (child < len(units)) & ((units[inside] & _LABEL) == np.arange(1, 256)) & ~reached[inside]
        found = np.unique(child[fits])
        reached[found] = True
        new = np.concatenate([waiting, found])


class Spacing:
    """SentencePiece's own changes: rules for characters, and how spaces are written.

    Args:
        rules: for characters; of several that fit at a place, the longest is applied.
        kept: texts to which no rule is applied.
        add_dummy_prefix: put a space before the text.
        remove_extra_whitespaces: no space at both ends, and one between words.
    """

    def __init__(
        self, rules: CharacterMap | None, kept: Iterable[str], *, add_dummy_prefix: bool, remove_extra_whitespaces: bool
    ) -> None:
        self._rules, self._kept = rules, set(kept)
        self._lengths = lengths_by_first(self._kept)
        self._prefix = SPACE if add_dummy_prefix else ""
        self._removes = remove_extra_whitespaces

    def text(self, text: str) -> str:
        """Return the changed text; nothing if there is nothing but spaces."""
        if self._rules and not (text.isascii() and self._rules.ascii_signs.isdisjoint(text)):
            return self.aligned(text).text
        if self._removes:
            text = " ".join([word for word in text.split(" ") if word])
        return self._ended(self._prefix + text.replace(" ", SPACE)) if text else ""

    def aligned(self, text: str) -> Aligned:
        """Return the same as `text`, with the place of every character."""
        if not text:
            return Aligned("", [], [])
        parts: list[tuple[str, int, int]] = []
        after_space, at = self._removes, 0
        while at < len(text):
            written, end = self._next(text, at)
            if after_space:
                written = written.lstrip(" ")
            if written:
                after_space = self._removes and written.endswith(" ")
                parts.append((written.replace(" ", SPACE), at, end))
            at = end
        first = parts[0][1] if parts else 0
        joined = aligned([(self._prefix, first, first), *parts])
        n = len(self._ended(joined.text))
        return Aligned(joined.text[:n], joined.starts[:n], joined.ends[:n])

    def _ended(self, text: str) -> str:
        return text.rstrip(SPACE) if self._removes else text

    def _next(self, text: str, at: int) -> tuple[str, int]:
        """Return what is written for the next characters, and where they end."""
        for length in self._lengths.get(text[at], ()):
            if text[at : at + length] in self._kept:
                return text[at : at + length], at + length
        return (self._rules.longest(text, at) if self._rules else None) or (text[at], at + 1)


def lengths_by_first(texts: Iterable[str]) -> dict[str, list[int]]:
    """Return the lengths of texts by their first character, the longest first.

    Example:
        >>> lengths_by_first(["a", "abc", "b"])
        {'a': [3, 1], 'b': [1]}
    """
    lengths: dict[str, set[int]] = {}
    for text in texts:
        lengths.setdefault(text[0], set()).add(len(text))
    return {first: sorted(known, reverse=True) for first, known in lengths.items()}
