"""How right an answer to a question is, and when none should be given.

Scores of answers are those of the official scripts `evaluate-v1.1.py` and `evaluate-v2.0.py`, as shares (Rajpurkar et al. 2016,
section 6.1, and 2018). Text of a script that puts no spaces between words is counted by characters, as the scripts of CMRC 2018
and MLQA do; unlike them, digits count one by one there, too: 1994年 is nearer to 1995年 than to 红楼梦.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from transformer_xl.tokenizers.spaceless import SPACELESS

Version = Literal["1.1", "2.0"]

_ARTICLES = re.compile(r"\b(?:an?|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WIDE_PUNCTUATION = {chr(ord(sign) + 0xFEE0) for sign in string.punctuation}  # which Unicode calls symbols in part: ＋ ＝ ～
_IS_SPACELESS = re.compile(rf"[{SPACELESS}][\w{SPACELESS}]|\w[{SPACELESS}]")
_CHARACTERS = re.compile(rf"[{SPACELESS}]|\d|[^\s\d{SPACELESS}]+")


def compared_words(*texts: str) -> list[list[str]]:
    """Return the words by which answers are compared: in lower case, without punctuation and articles.

    If characters of a script without spaces touch others in one of the texts, all texts are taken apart: into such characters,
    digits, and what else stands between spaces. Then all of Unicode's punctuation is left out, and articles stay. A Chinese
    character alone among English words is a word, as in the official scripts.

    Example:
        >>> compared_words("The  cat's (a) hat.")
        [['cats', 'hat']]
        >>> compared_words("《红楼梦》 VR版", "“19”")
        [['红', '楼', '梦', 'vr', '版'], ['1', '9']]
    """
    if not any(map(_IS_SPACELESS.search, texts)):
        return [_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split() for text in texts]
    return [_CHARACTERS.findall("".join(sign for sign in text.lower() if not _is_punctuation(sign))) for text in texts]


def _is_punctuation(sign: str) -> bool:
    return unicodedata.category(sign).startswith("P") or sign in string.punctuation or sign in _WIDE_PUNCTUATION


def exact_and_f1(said: str, answers: Sequence[str], version: Version = "2.0") -> tuple[float, float]:
    """Return how right an answer is: whether it is one of the right ones, and the best F1 of its words with one of them.

    Args:
        said: the answer, empty if there is none.
        answers: the right ones; empty if there is none.
        version: 2.0: right answers without words do not count, unless all are, and two answers without words agree. 1.1: all
            count, and an answer without words has F1 0.

    Example:
        >>> exact_and_f1("the cat sat", ["A cat", "dog"])
        (0.0, 0.6666666666666666)
        >>> exact_and_f1("1994年被", ["1994年"])
        (0.0, 0.9090909090909091)
    """
    pairs = [compared_words(said, answer) for answer in answers]
    if version == "2.0":
        pairs = [pair for pair in pairs if pair[1]] or [[*compared_words(said), []]]
    if not pairs:
        return 0.0, 0.0
    return float(any(words == gold for words, gold in pairs)), max(_f1(words, gold, version) for words, gold in pairs)


def _f1(words: list[str], gold: list[str], version: Version) -> float:
    if version == "2.0" and not (words and gold):
        return float(words == gold)
    n_common = (Counter(words) & Counter(gold)).total()
    return 2 * n_common / (len(words) + len(gold)) if n_common else 0.0


class BestThreshold(NamedTuple):
    """The best score that can be had by giving no answer where its probability is above a threshold, and the threshold."""

    score: float
    threshold: float


def best_threshold(scores: np.ndarray, no_answer: np.ndarray, is_impossible: np.ndarray) -> BestThreshold:
    """Look for the threshold of the probability of no answer that gives the best score, as the official script does.

    Args:
        scores: (n,), of the answers that would be given; those to questions without an answer count 0, unless they are empty.
        no_answer: (n,), probability that there is none.
        is_impossible: (n,) bool, whether there is none.

    Returns:
        The mean score, and the largest probability at which an answer is given; 0 if none ever should be. Questions of the
        same probability, which the script parts, stay together.

    Example:
        >>> best_threshold(np.array([1.0, 0.5, 0.0]), np.array([0.1, 0.3, 0.9]), np.array([False, False, True]))
        BestThreshold(score=0.8333333333333334, threshold=0.3)
    """
    order = np.argsort(no_answer, kind="stable")
    ordered = no_answer[order]
    gain = np.where(is_impossible, scores - 1, scores)[order]  # by answering, beside giving no answer to any
    total = is_impossible.sum() + np.cumsum(gain)
    may_end = np.append(ordered[1:] != ordered[:-1], True)
    total = np.where(may_end, total, -np.inf)
    best = int(total.argmax())
    if total[best] <= is_impossible.sum():
        return BestThreshold(float(is_impossible.mean()), 0.0)
    return BestThreshold(float(total[best] / len(scores)), float(ordered[best]))
