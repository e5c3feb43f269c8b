"""Pieces of words, chosen by their probabilities: the Unigram model of SentencePiece, as XLNet uses it.

Ids are those of the library `sentencepiece`, 0.2.2 and later. It adds scores in single precision from the beginning of a line
on; so where two ways to cut a word are nearly as likely, the text before decides, and older versions, which round at another
place, decide otherwise.

Reference: Kudo 2018, "Subword Regularization", section 3.2; google/sentencepiece `src/unigram_model.cc`, `EncodeOptimized`, and
`src/sentencepiece_processor.cc`; zihangdai/xlnet `prepro_utils.py`, `encode_pieces`.
"""

import math
import re
import struct
import unicodedata
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple

import numpy as np

from transformer_xl.data.normalization import (
    SPACE,
    Aligned,
    CharacterMap,
    Spacing,
    lengths_by_first,
    spaced_aligned,
    xlnet_aligned,
    xlnet_text,
)
from transformer_xl.data.tokenizer_base import PieceDecoder, PieceTokenizer, StreamDecoder, ids_of, join_as_sentence, require
from transformer_xl.errors import TokenizerError, did_you_mean, shown
from transformer_xl.untrusted import is_unicode

UNKNOWN, LINE_END = "<unk>", "<eop>"
CONTROL = ("<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>")
USER_DEFINED = (LINE_END, ".", "(", ")", '"', "-", "–", "£", "€")
"""XLNet's special pieces: these are the ids from 0 on, unknown text first, then control pieces."""

BYTE_PIECES = tuple(f"<0x{value:02X}>" for value in range(256))

MAX_PIECE = 128
"""The most characters of a piece."""

MAX_SCORE = 1e6
_UNKNOWN_PENALTY, _FROM_ZERO = 10.0, 100_000.0  # the library's own
_WORDS = re.compile(f"{SPACE}[^{SPACE}]*|[^{SPACE}]+")
_ASCII_STARTS = frozenset('!"#$%&()*+,-./:;?@[\\]^_`{|}~')  # ' = > are not among them in XLNet's own code
_CACHE_SIZE, _LONGEST_CACHED = 1 << 16, 64
_FLOAT = struct.Struct("<f")


class _Path(NamedTuple):
    """The best way to cut a word.

    Attributes:
        ids: of its pieces; each unknown character is one.
        size: the magnitudes of their scores together.
        limit: the word is cut so wherever the magnitudes of scores before it add up to less.
    """

    ids: tuple[int, ...]
    size: float
    limit: float


class _Span(NamedTuple):
    """A piece of a line after all changes: its id, and its characters' places in the changed line."""

    id: int
    start: int
    end: int


class UnigramTokenizer(PieceTokenizer):
    r"""Cuts lines into the pieces that are most likely together.

    Args:
        pieces: the vocabulary in order of id; U+2581 stands for the space before a word.
        scores: the logarithm of each piece's probability, in single precision; those of special pieces do not matter.
        unknown: the piece for characters that no other piece has.
        control: pieces that text never becomes, and that are not written.
        user_defined: pieces that are always cut out of text, and to which no rule is applied.
        unused: pieces that text never becomes.
        byte_fallback: write unknown characters as bytes, with the pieces `<0x00>` to `<0xFF>`.
        rules: what is written in place of characters before the text is cut: the `precompiled_charsmap` of SentencePiece in
            base 64; empty: nothing.
        add_dummy_prefix: put a space before each line.
        remove_extra_whitespaces: no space at both ends of a line, and one between words.
        unknown_text: how `unknown` is written.
        normalization: what is changed before all else. "spaces": white space becomes one space. "xlnet": the same, two
            backticks or apostrophes become a quotation mark, and characters are taken apart and lose their accents; and
            afterwards, a piece that ends in a comma after a digit is cut again without the comma. "none": nothing.
        lower_case: fold case; needs "xlnet".
        keep_accents: leave characters as they are; needs "xlnet".
        line_end: the piece for a line end; None: line ends have no id.

    Raises:
        TokenizerError: arguments that do not fit together.

    Example:
        >>> tokenizer = UnigramTokenizer(["<unk>", "▁", "▁the", "a", "t", "at"], [0, -3.0, -1.0, -3.0, -3.0, -4.0])
        >>> tokenizer.encode("the at").tolist(), tokenizer.decode([2, 1, 5])
        ([2, 1, 5], 'the at')
    """

    kind = "unigram"

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        *,
        unknown: str = UNKNOWN,
        control: Sequence[str] = (),
        user_defined: Sequence[str] = (),
        unused: Sequence[str] = (),
        byte_fallback: bool = False,
        rules: str = "",
        add_dummy_prefix: bool = True,
        remove_extra_whitespaces: bool = True,
        unknown_text: str = " \u2047 ",
        normalization: Literal["none", "spaces", "xlnet"] = "none",
        lower_case: bool = False,
        keep_accents: bool = False,
        line_end: str | None = None,
    ) -> None:
        self._ids = ids_of(pieces)
        self.pieces = tuple(pieces)
        require(isinstance(scores, list | tuple) and len(scores) == len(pieces), "there is not one score for each piece")
        require(all(map(_is_score, scores)), f"a score is no number within ±{MAX_SCORE:,.0f}")
        self.scores = tuple([_float32(score) for score in scores])
        self.control, self.user_defined, self.unused = (
            _members(self._ids, name, of)
            for name, of in (("control", control), ("user_defined", user_defined), ("unused", unused))
        )
        require(isinstance(unknown, str) and unknown in self._ids, f"unknown ({shown(unknown)}) is not one of its pieces")
        require(line_end is None or (isinstance(line_end, str) and line_end in self._ids), "line_end is not one of its pieces")
        require(line_end != unknown, "line_end stands for unknown text")
        for name, flag in (
            ("byte_fallback", byte_fallback),
            ("add_dummy_prefix", add_dummy_prefix),
            ("remove_extra_whitespaces", remove_extra_whitespaces),
            ("lower_case", lower_case),
            ("keep_accents", keep_accents),
        ):
            require(isinstance(flag, bool), f"{name} is neither true nor false")
        known = ("none", "spaces", "xlnet")
        require(normalization in known, f"normalization ({shown(normalization)}) is not one of {', '.join(known)}")
        require(normalization == "xlnet" or not (lower_case or keep_accents), "lower_case and keep_accents need 'xlnet'")
        require(isinstance(unknown_text, str) and len(unknown_text) <= MAX_PIECE, "unknown_text is no short text")
        self.rules = rules
        self.unknown, self.unknown_text, self.line_end = unknown, unknown_text, line_end
        self.byte_fallback, self.normalization = byte_fallback, normalization
        self.add_dummy_prefix, self.remove_extra_whitespaces = add_dummy_prefix, remove_extra_whitespaces
        self.lower_case, self.keep_accents = lower_case, keep_accents
        _check_pieces(self.pieces, self.unknown_text or " ")
        byte_names = BYTE_PIECES if byte_fallback else ()
        self._byte_ids = [self._ids.get(name, -1) for name in byte_names]
        require(-1 not in self._byte_ids, "it lacks some of the 256 pieces for bytes")
        special = [unknown, *self.control, *self.user_defined, *self.unused, *byte_names]
        require(len(set(special)) == len(special), "a piece is special in two ways")
        self._special = set(special)
        self._spacing = Spacing(
            _character_map(rules),
            self.user_defined,
            add_dummy_prefix=add_dummy_prefix,
            remove_extra_whitespaces=remove_extra_whitespaces,
        )
        self._known: dict[str, _Path] = {}
        self._again: dict[str, list[tuple[str, int]]] = {}
        self._prepare_search()
        hidden = frozenset(self.control)
        super().__init__([self._text_of(piece, hidden) for piece in self.pieces])

    def _prepare_search(self) -> None:
        """Collect what is looked up while a word is cut."""
        normal = {piece: score for piece, score in zip(self.pieces, self.scores, strict=True) if piece not in self._special}
        self._scores = dict(normal)
        self._scores |= {piece: _float32(0.1 * (len(piece.encode()) - 1)) for piece in self.user_defined}
        self._unknown_score = _float32(min(normal.values(), default=0.0) - _UNKNOWN_PENALTY)
        self._lengths = lengths_by_first(self._scores)
        self._steepest = max([abs(score) for score in (*self._scores.values(), self._unknown_score)])
        self._in_words = not any(SPACE in piece[1:] for piece in self._scores)
        self._with_comma = frozenset(
            self._ids[piece] for piece in self._scores if self.normalization == "xlnet" and _ends_in_digit_comma(piece)
        )
        self._unknown_id = self._ids[self.unknown]

    def _text_of(self, piece: str, hidden: frozenset[str]) -> bytes:
        if piece == self.line_end:
            return b"\n"
        if piece == self.unknown:
            return self.unknown_text.encode()
        if self.byte_fallback and piece in BYTE_PIECES:
            return bytes([int(piece[3:5], 16)])
        return b"" if piece in hidden else piece.replace(SPACE, " ").encode()

    @property
    def loses(self) -> str:
        """What `decode(encode(text))` loses, as a sentence."""
        lost = [] if self.byte_fallback else [f"characters outside the vocabulary (they become {self.unknown})"]
        lost += ["line ends"] if self.line_end is None else []
        loses_space = self.remove_extra_whitespaces or self.normalization != "none"
        lost += ["the amount and kind of space between words"] if loses_space else []
        if self.normalization == "xlnet":
            lost += [] if self.keep_accents else ["accents and other forms of the same characters"]
            lost += ["case"] if self.lower_case else []
        lost += ["characters for which there are rules"] if self.rules else []
        return f"{join_as_sentence(lost)}." if lost else ""

    def id_of(self, piece: str) -> int:
        """Return the id of a piece, such as `<sep>`.

        Raises:
            TokenizerError: there is no such piece.
        """
        if piece not in self._ids:
            raise TokenizerError(f"piece {shown(piece)} is not in the vocabulary; {did_you_mean(piece, self._special)}")
        return self._ids[piece]

    def starts_word(self) -> np.ndarray:
        """Return for each id whether its piece begins a word, as XLNet's spans of targets do, shape (vocab_size,), bool.

        Those are pieces that begin with U+2581 or "<", and single ASCII punctuation except `'`, `=` and `>`.
        Reference: zihangdai/xlnet `data_utils.py`, `_is_start_piece`.
        """
        return np.array([piece.startswith((SPACE, "<")) or piece in _ASCII_STARTS for piece in self.pieces])

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of the pieces, line by line."""
        ids: list[int] = []
        for number, line in enumerate(_lines(text)):
            if number and self.line_end is not None:
                ids.append(self._ids[self.line_end])
            if self.normalization == "xlnet":
                line = xlnet_text(line, lower_case=self.lower_case, keep_accents=self.keep_accents)
            elif self.normalization == "spaces":
                line = " ".join(line.split())
            if changed := self._spacing.text(line):
                ids += self._line(changed)
        return np.array(ids, np.int64)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids, and the place in `text` from which each piece comes.

        The place of a piece begins after the space before it, if more than space belongs to the piece. Pieces made of one
        character have the same place. See `Tokenizer.encode_with_offsets`.
        """
        ids, starts, ends = [], [], []
        offset = 0
        for number, line in enumerate(_lines(text)):
            if number:
                offset += 1
                if self.line_end is not None:
                    ids.append(self._ids[self.line_end])
                    starts.append(offset - 1)
                    ends.append(offset)
            changed = self._aligned(line)
            for span in self._spans(changed.text) if changed.text else ():
                ids.append(span.id)
                start, end = _place(changed, span)
                starts.append(offset + start)
                ends.append(offset + end)
            offset += len(line)
        return np.array(ids, np.int64), np.array(starts, np.int64), np.array(ends, np.int64)

    def _aligned(self, line: str) -> Aligned:
        if self.normalization == "none":
            return self._spacing.aligned(line)
        if self.normalization == "spaces":
            first = spaced_aligned(line)
        else:
            first = xlnet_aligned(line, lower_case=self.lower_case, keep_accents=self.keep_accents)
        return self._spacing.aligned(first.text).after(first)

    def _line(self, changed: str) -> list[int]:
        """Return the ids of a line after all changes."""
        ids = list(chain.from_iterable(self._paths(changed)))
        if self._unknown_id in ids or not self._with_comma.isdisjoint(ids):
            return [span.id for span in self._finished(changed, ids)]
        return ids

    def _spans(self, changed: str) -> list[_Span]:
        """Return the ids of a line after all changes, with their places."""
        return self._finished(changed, list(chain.from_iterable(self._paths(changed))))

    def _paths(self, changed: str) -> Iterable[tuple[int, ...]]:
        """Yield the ids of each word; no piece reaches beyond one."""
        words = _WORDS.findall(changed) if self._in_words else [changed]
        if len(self._known) > _CACHE_SIZE:
            self._known.clear()
        paths = [self._path(word) for word in words]
        if sum([path.size for path in paths]) + self._steepest * max(map(len, words)) > _FROM_ZERO:
            yield self._best(changed, 0.0).ids
            return
        waiting: list[int] = []  # ids whose scores are not in `total` yet
        total, magnitude = 0.0, 0.0
        for word, path in zip(words, paths, strict=True):
            ids = path.ids
            if magnitude >= path.limit:
                for each in waiting:
                    total = _float32(total + self._score_of(each))
                waiting = []
                ids = self._best(word, total).ids
            waiting += ids
            magnitude += path.size
            yield ids

    def _path(self, word: str) -> _Path:
        """Return how a word is cut at the beginning of a line."""
        path = self._known.get(word)
        if path is None:
            path = self._best(word, 0.0)
            if len(word) <= _LONGEST_CACHED:
                self._known[word] = path
        return path

    def _score_of(self, token_id: int) -> float:
        return self._unknown_score if token_id == self._unknown_id else self._scores[self.pieces[token_id]]

    def _steps(self, word: str, start: int) -> list[tuple[int, int, float]]:
        """Return end, id and score of every piece that begins at a place; of the unknown one if none has one character."""
        steps = []
        for length in self._lengths.get(word[start], ()):
            piece = word[start : start + length]
            score = self._scores.get(piece)
            if score is not None and len(piece) == length:
                steps.append((start + length, self._ids[piece], score))
        if not steps or steps[-1][0] > start + 1:
            steps.append((start + 1, self._unknown_id, self._unknown_score))
        return steps

    def _best(self, word: str, total: float) -> _Path:
        """Return the most likely pieces of a word before which a line's scores add up to `total`."""
        n = len(word)
        scores, back, ids = [total] + [-math.inf] * n, [0] * (n + 1), [0] * (n + 1)
        second = [-math.inf] * (n + 1)
        for start in range(n):
            if abs(scores[start]) > _FROM_ZERO:  # longer sums would be too coarse
                scores[start:] = [_float32(score - scores[start]) for score in scores[start:]]
            before = scores[start]
            steps = self._steps(word, start)
            for end, token_id, own in steps:
                score = _float32(own + before)
                if score > scores[end]:
                    second[end] = scores[end]
                    scores[end], back[end], ids[end] = score, start, token_id
                elif score > second[end]:
                    second[end] = score
        found: list[int] = []
        at, margin = n, math.inf
        while at:
            found.append(ids[at])
            margin = min(margin, scores[at] - second[at])
            at = back[at]
        # A way of n pieces is wrong by at most n roundings of the sum, and so is the other, here and where the word stands.
        limit = margin / (4 * n * 2.0**-24) - 2 * n * self._steepest
        return _Path(tuple(reversed(found)), sum([abs(self._score_of(each)) for each in found]), limit)

    def _finished(self, changed: str, ids: list[int]) -> list[_Span]:
        spans = self._joined(changed, ids)
        return self._without_commas(changed, spans) if self.normalization == "xlnet" else spans

    def _joined(self, changed: str, ids: list[int]) -> list[_Span]:
        """Return the places of ids; unknown characters side by side become one, or all become bytes."""
        spans: list[_Span] = []
        end = 0
        for each in ids:
            start, end = end, end + (1 if each == self._unknown_id else len(self.pieces[each]))
            if each != self._unknown_id:
                spans.append(_Span(each, start, end))
            elif self.byte_fallback:
                spans += [_Span(self._byte_ids[byte], start, end) for byte in changed[start:end].encode()]
            elif spans and spans[-1].id == each:
                spans[-1] = spans[-1]._replace(end=end)
            else:
                spans.append(_Span(each, start, end))
        return spans

    def _without_commas(self, changed: str, spans: list[_Span]) -> list[_Span]:
        """Cut pieces again that end in a comma after a digit."""
        finished: list[_Span] = []
        for span in spans:
            if span.id != self._unknown_id and span.id not in self._with_comma:
                finished.append(span)
                continue
            piece = changed[span.start : span.end]
            if not _ends_in_digit_comma(piece):
                finished.append(span._replace(id=self._named(piece, span.id)))
                continue
            again = self._cut_again(piece)
            places = list(accumulate([len(text) for text, _ in again], initial=span.start))
            fits = "".join([text for text, _ in again]) == piece
            for (_, each), (start, end) in zip(again, pairwise(places), strict=True):
                finished.append(_Span(each, start, end) if fits else span._replace(id=each))
        return finished

    def _cut_again(self, piece: str) -> list[tuple[str, int]]:
        """Return texts and ids of a piece that ends in a comma after a digit, as XLNet cuts it."""
        if piece not in self._again:
            changed = self._spacing.text(piece[:-1].replace(SPACE, ""))
            spans = self._joined(changed, list(chain.from_iterable(self._paths(changed)))) if changed else []
            again = [(changed[span.start : span.end], span.id) for span in spans]
            if again and not piece.startswith(SPACE) and again[0][0].startswith(SPACE):
                rest = again[0][0][1:]  # which need not be a piece
                again[:1] = [(rest, self._ids.get(rest, self._unknown_id))] if rest else []
            again = [(text, self._named(text, each)) for text, each in again]
            self._again[piece] = [*again, (piece[-1], self._ids.get(piece[-1], self._unknown_id))]
        return self._again[piece]

    def _named(self, text: str, token_id: int) -> int:
        """Return the id that XLNet finds by a piece's text: unknown characters may be spelled as a special piece."""
        return self._ids.get(text, token_id) if token_id == self._unknown_id else token_id

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the pieces, without the space before each line; bytes that are not UTF-8 become U+FFFD."""
        decoder = _UnigramDecoder(self)
        return "".join([*map(decoder.write, self._checked(ids)), decoder.finish()])

    def stream(self) -> StreamDecoder:
        """Return a decoder that takes ids one at a time."""
        return _UnigramDecoder(self)


class _UnigramDecoder(PieceDecoder):
    """Leaves out the space at the beginning of each line."""

    def __init__(self, tokenizer: UnigramTokenizer) -> None:
        super().__init__(tokenizer)
        self._unigram = tokenizer
        self._at_start = True

    def push(self, token_id: int) -> str:
        (token_id,) = self._unigram._checked([token_id])
        return self.write(token_id)

    def write(self, token_id: int) -> str:
        """Return the text that an id of the vocabulary adds."""
        owner, piece = self._unigram, self._unigram.pieces[token_id]
        data = owner._pieces[token_id]
        if self._at_start and data and token_id != owner._unknown_id:
            is_space = piece.startswith(SPACE) and (owner.add_dummy_prefix or owner.remove_extra_whitespaces)
            data = data[1:] if is_space else data
            self._at_start = not data and owner.remove_extra_whitespaces
        elif data:
            self._at_start = False
        if piece == owner.line_end:
            self._at_start = True
        return self._bytes.decode(data)


def _lines(text: str) -> list[str]:
    if not is_unicode(text):
        raise TokenizerError("text with a lone surrogate is not Unicode; use tokenizer.kind=byte")
    return text.split("\n")


def _place(changed: Aligned, span: _Span) -> tuple[int, int]:
    """Return the place of a piece in the original, without spaces before it."""
    start = span.start
    while start < span.end - 1 and changed.text[start] == SPACE:
        start += 1
    return changed.starts[start], changed.ends[span.end - 1]


def _ends_in_digit_comma(piece: str) -> bool:
    return len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit()


def _float32(value: float) -> float:
    return _FLOAT.unpack(_FLOAT.pack(value))[0]


def _is_score(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_SCORE  # pyright: ignore[reportArgumentType]


def _members(ids: Mapping[str, int], name: str, pieces: object) -> tuple[str, ...]:
    require(isinstance(pieces, list | tuple) and all(isinstance(piece, str) for piece in pieces), f"{name} is no list of text")
    assert isinstance(pieces, list | tuple)
    strange = next((piece for piece in pieces if piece not in ids), None)
    require(strange is None, f"{name} ({shown(strange)}) is not one of its pieces")
    return tuple(pieces)


def _check_pieces(pieces: Sequence[str], *others: str) -> None:
    for text in (*pieces, *others):
        require(text and len(text) <= MAX_PIECE, f"piece {shown(text)} is empty or has more than {MAX_PIECE} characters")
        is_text = text.isprintable() or not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)
        require(is_text, f"piece {text[:40]!a} has a control character or a lone surrogate")


def _character_map(rules: object) -> CharacterMap | None:
    require(isinstance(rules, str), "its rules are no text")
    assert isinstance(rules, str)
    try:
        return CharacterMap(b64decode(rules, validate=True)) if rules else None
    except ValueError as error:  # not base 64, among others
        require(False, str(error))
