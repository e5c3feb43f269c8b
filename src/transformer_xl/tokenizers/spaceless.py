"""Text of scripts that put no spaces between words, such as Chinese: which characters these are, and what words are in it."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

_HAN = r"\u2e80-\u2fff\u3001-\u312f\u31a0-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese and Japanese
_CJK = rf"{_HAN}\uff00-\uff9f"  # full-width signs, too
_THAI = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
SPACELESS = rf"{_THAI}{_CJK}"
"""Characters that no spaces divide into words, as part of a regular expression: Thai, Lao, Burmese, Khmer, and these."""

_IS_SPACELESS = re.compile(rf"[{SPACELESS}]")
_LONGEST = {re.compile(rf"(?![\W\u30a0-\u30ff])[{_HAN}]"): 4, re.compile(rf"[{_THAI}]"): 12}  # letters, and those of a word
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

    More than half of its characters must be letters of scripts without spaces, in words that have more of them than words do:
    4 of Chinese or Japanese (without katakana, which spell long foreign words), or 12 of Thai, Lao, Burmese or Khmer.

    Example:
        >>> are_lines(["小明", "去", "北京", "。"]), are_lines(["小明去北京了。", "to", "be"]), are_lines(["f81d4fae-7dec"])
        (False, True, False)
    """
    n_all = n_long = 0
    for word in words:
        n_all += len(word)
        if not word.isascii():
            n_long += sum(n for letter, most in _LONGEST.items() if (n := len(letter.findall(word))) > most)
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
