"""Running text to words by Moses's rules, through the optional sacremoses package.

Reference: the steps, their order and their options are those of Hugging Face's `TransfoXLTokenizer` (transformers 4.35.2), so
that the words are the same: special words are set aside, then punctuation is normalized, words are split (dashes inside words
too), and commas and dots inside numbers become words of their own, `@,@` and `@.@`.
"""

import re
from collections.abc import Callable, Sequence
from itertools import chain

from transformer_xl.errors import TokenizerError

_INSIDE_NUMBER = re.compile(r"(?<=\d)([,.])(?=\d)")


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
