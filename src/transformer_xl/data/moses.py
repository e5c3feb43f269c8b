"""Running text to words and back by the rules of Moses.

Text becomes words through the optional sacremoses package. Words become text without it, one at a time: joins of split numbers
and compounds are undone, and punctuation moves to its word.

Reference: the spacing rules are those of the Moses detokenizer for any language (English adds contractions and possessives), as
sacremoses applies them; `&amp;` and its like are left alone. Splitting takes the steps, their order and their options from
Hugging Face's `TransfoXLTokenizer` (transformers 4.35.2), so that the words are the same: special words are set aside, then
punctuation is normalized, words are split (dashes inside words too), and commas and dots inside numbers become words of their
own, `@,@` and `@.@`.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import chain

from transformer_xl.errors import TokenizerError

JOINS = {"@-@": "-", "@,@": ",", "@.@": "."}
"""Words that stand for a sign between two parts of what was one word, such as 1 @,@ 000."""

_INSIDE_NUMBER = re.compile(r"(?<=\d)([,.])(?=\d)")
_CLOSING = re.compile(r"[,.?!:;\\%}\])]+")
_QUOTE = re.compile(r"['\"„“`]+")
_CONTRACTION = re.compile(r"'[^\W\d_]")
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc\U00020000-\U0002ffff]"
)


class PlainSpacing:
    """A space between any two words, but none at a join if joins are undone."""

    def __init__(self, *, undo_joins: bool = True) -> None:
        self._first = True
        self._glued = False
        self._joins = JOINS if undo_joins else {}

    def push(self, word: str) -> str:
        """Return the word with the space before it, if any."""
        first, self._first = self._first, False
        glued, self._glued = self._glued, word in self._joins
        if self._glued:
            return self._joins[word]
        if glued:
            self._after_join(word)
            return word
        space = self._space(word)
        return word if first else space + word

    def _after_join(self, word: str) -> None:
        """Take note of a word that follows a join."""

    def _space(self, word: str) -> str:
        """Return what separates `word` from the text before it."""
        return " "


class MosesSpacing(PlainSpacing):
    """Like running text: no space before closing punctuation, after opening brackets, and inside quotation marks.

    Args:
        language: ISO 639-1 code; only "en" has rules of its own.
    """

    def __init__(self, language: str) -> None:
        super().__init__()
        self._language = language
        self._next = " "  # what a word without rules of its own is separated by
        self._previous = ""
        self._open: dict[str, bool] = {}

    def _after_join(self, word: str) -> None:
        self._previous, self._next = word, " "

    def _space(self, word: str) -> str:
        space, after = self._around(word)
        self._previous, self._next = word, after
        return space

    def _around(self, word: str) -> tuple[str, str]:
        """Return what comes before `word`, and what comes after it if the next word has no rule."""
        if _CJK.match(word) and self._language != "ko":
            return ("" if _CJK.match(self._previous[-1:]) else self._next), " "
        if all(unicodedata.category(sign) == "Sc" or sign in "([{¿¡" for sign in word):
            return self._next, ""
        if _CLOSING.fullmatch(word):
            return "", " "
        if self._language == "en" and self._previous and _CONTRACTION.match(word):
            return "", " "
        return self._around_quote(word) if _QUOTE.fullmatch(word) else (self._next, " ")

    def _around_quote(self, mark: str) -> tuple[str, str]:
        kind = '"' if set(mark) <= set("„“”") else mark
        if self._open.get(kind, False):
            self._open[kind] = False
            return "", " "
        if self._language == "en" and mark == "'" and self._previous.endswith("s"):
            return "", " "
        self._open[kind] = True
        return self._next, ""


class LineWriter:
    """Writes words as lines of text.

    Args:
        line_start: the word that begins a line and is not written; None: there is none.
        line_end: the word that ends a line and is written as line end, possibly the same; None: there is none.
        language: what Moses spacing to use; None: a space between any two words.
        undo_joins: write the words of `JOINS` as what they stand for; Moses spacing always does.
    """

    def __init__(self, line_start: str | None, line_end: str | None, language: str | None, *, undo_joins: bool = True) -> None:
        self._line_start, self._line_end, self._language = line_start, line_end, language
        self._undo_joins = undo_joins
        self._begin()

    def _begin(self) -> None:
        self._in_line = False
        if self._language is None:
            self._spacing = PlainSpacing(undo_joins=self._undo_joins)
        else:
            self._spacing = MosesSpacing(self._language)

    def push(self, word: str) -> str:
        """Return the text that one more word adds."""
        if word == self._line_end and (self._in_line or word != self._line_start):
            self._begin()
            return "\n"
        at_start, self._in_line = not self._in_line, True
        return "" if at_start and word == self._line_start else self._spacing.push(word)


def moses_splitter(language: str, never_split: Sequence[str], *, lower_case: bool) -> Callable[[str], list[str]]:
    """Return a function that gives the words of one line of text.

    Args:
        language: ISO 639-1 code, such as "en".
        never_split: words that are found anywhere in the text, in their exact spelling, and left as they are.
        lower_case: fold the case of all others.

    Raises:
        TokenizerError: sacremoses is not installed.
    """
    try:
        import sacremoses  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise TokenizerError(
            "splitting running text into words needs the sacremoses package: pip install 'transformer_xl[moses]', "
            "or give text whose words are separated by spaces and use moses=None"
        ) from None
    normalizer, moses = sacremoses.MosesPunctNormalizer(language), sacremoses.MosesTokenizer(language)
    longest_first = sorted(map(re.escape, never_split), key=len, reverse=True)
    set_aside = re.compile(f"({'|'.join(longest_first)})") if longest_first else None
    protected = [re.escape(word) for word in never_split]

    def split(line: str) -> list[str]:
        parts = [line] if set_aside is None else set_aside.split(line)
        return list(chain.from_iterable([part] if part in never_split else split_part(part) for part in parts if part))

    def split_part(part: str) -> list[str]:
        text = part.strip()
        text = normalizer.normalize("".join(map(str.lower, text)) if lower_case else text)
        try:
            words = moses.tokenize(
                text, aggressive_dash_splits=True, return_str=False, escape=False, protected_patterns=protected
            )
        except ValueError as error:
            raise TokenizerError(f"sacremoses refuses a line of {len(part)} characters: {error}") from None
        return list(chain.from_iterable(_INSIDE_NUMBER.sub(r" @\1@ ", word).split() for word in words))

    return split
