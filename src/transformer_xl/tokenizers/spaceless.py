"""Text of scripts that put no spaces between words, such as Chinese: which characters these are, and what words are in it."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

_CJK = (
    r"\u2e80-\u2fff\u3001-\u312f\u31a0-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese and Japanese
    r"\uff00-\uff9f"  # full-width signs
)
SPACELESS = rf"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff{_CJK}"
"""Characters that no spaces divide into words, as part of a regular expression: Thai, Lao, Burmese, Khmer, and these."""

_IS_SPACELESS = re.compile(rf"[{SPACELESS}]")
_IS_CJK = re.compile(rf"[{_CJK}]")
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text that nobody divided: those between white space, and each Chinese or Japanese character.

    Example:
        >>> words_of("小明 uses a Mac。")
        ['小', '明', 'uses', 'a', 'Mac', '。']
    """
    return _WORD.findall(text)


def are_lines(words: Iterable[str]) -> bool:
    """Return whether the words of a vocabulary are lines or phrases, because nobody divided its text.

    No language has many words of more than 20 characters, or of more than 4 where they are Chinese or Japanese: 1 % of the
    characters of a vocabulary are in such words in English novels, 2 % in German captions, 23 % in Wikipedia with markup, and
    all of them in an undivided Chinese novel.

    Example:
        >>> are_lines(["小明", "去", "北京", "。"]), are_lines(["小明去北京。", "to", "be"])
        (False, True)
    """
    n_all = n_long = 0
    for word in words:
        n_all += len(word)
        n_long += len(word) * (len(word) > 20 or (len(word) > 4 and _IS_CJK.search(word) is not None))
    return 2 * n_long > n_all


def join_words(words: Sequence[str], space: str = " ") -> str:
    """Return words as text: with a space between, but none beside a character of a script without spaces.

    In a sentence with such characters, other characters that are words one by one, such as digits, have none between, either.

    Example:
        >>> join_words(["to", "be"]), join_words(["我", "爱", "New", "York", "。"]), join_words(["1", "9", "年"])
        ('to be', '我爱New York。', '19年')
    """
    text = space.join(words)
    if text.isascii() or not _IS_SPACELESS.search(text):  # the former is faster
        return text
    parts = [words[0]]
    for last, word in pairwise(words):
        touches = _IS_SPACELESS.match(last[-1]) or _IS_SPACELESS.match(word[0]) or len(last) == len(word) == 1
        parts += [word] if touches else [space, word]
    return "".join(parts)
