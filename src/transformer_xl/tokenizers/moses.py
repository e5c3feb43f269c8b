"""Running text to words and back by the rules of Moses.

Splitting text into words needs the optional sacremoses package. Joining words does not: it takes one word at a time, undoes the
joins of split numbers and compounds, and attaches punctuation to words.

Reference: the spacing rules are those of the Moses detokenizer for any language (English adds contractions and possessives), as
sacremoses applies them; `&amp;` and the like stay as they are. Splitting takes its steps, their order and their options from
Hugging Face's `TransfoXLTokenizer` (transformers 4.35.2), so that the words are the same: special words are set aside, then
punctuation is normalized, words are split (at dashes inside words too), and commas and dots inside numbers become the words
`@,@` and `@.@`.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import chain

from transformer_xl.errors import TokenizerError

JOINS = {"@-@": "-", "@,@": ",", "@.@": "."}
"""Words that stand for a sign inside a split word, such as 1 @,@ 000."""

_INSIDE_NUMBER = re.compile(r"(?<=\d)([,.])(?=\d)")
_CLOSING = re.compile(r"[,.?!:;\\%}\])]+")
_QUOTE = re.compile(r"['\"„“`]+")
_CONTRACTION = re.compile(r"'[^\W\d_]")
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc\U00020000-\U0002ffff]"
)


class PlainSpacing:
    """Puts a space between any two words, but none at a join if joins are undone."""

    def __init__(self, *, undo_joins: bool = True) -> None:
        self._first = True
        self._glued = False
        self._joins = JOINS if undo_joins else {}

    def push(self, word: str) -> str:
        """Return the word with the space before it, if any."""
        first, self._first = self._first, False
        after_join, self._glued = self._glued, word in self._joins
        if self._glued:
            return self._joins[word]
        if after_join:
            self._after_join(word)
            return word
        space = self._space(word)
        return word if first else space + word

    def _after_join(self, word: str) -> None:
        """Remember a word that follows a join."""

    def _space(self, word: str) -> str:
        return " "


class MosesSpacing(PlainSpacing):
    """Spaces words like running text: no space before closing punctuation, after opening brackets, and inside quotation marks.

    The language is an ISO 639-1 code; only "en" has rules of its own.
    """

    def __init__(self, language: str) -> None:
        super().__init__()
        self._language = language
        self._next = " "  # the space before the next word if no rule applies to that word
        self._previous = ""
        self._open: dict[str, bool] = {}

    def _after_join(self, word: str) -> None:
        self._previous, self._next = word, " "

    def _space(self, word: str) -> str:
        space, after = self._around(word)
        self._previous, self._next = word, after
        return space

    def _around(self, word: str) -> tuple[str, str]:
        """Return the space before `word`, and the space after it if no rule applies to the next word."""
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


def moses_splitter(language: str, never_split: Sequence[str], *, lower_case: bool) -> Callable[[str], list[str]]:
    """Return a function that splits one line of text into words.

    Words of `never_split` are found anywhere in the text, in their exact spelling, and keep their case.
    """
    try:
        import sacremoses  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise TokenizerError(
            "splitting running text into words needs the sacremoses package; in a clone: pip install -e '.[moses]', "
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
