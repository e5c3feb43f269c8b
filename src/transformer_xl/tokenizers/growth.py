"""Vocabularies that grow: what a text has that a vocabulary lacks, and a vocabulary that has it, too."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from transformer_xl.errors import ConfigError, TokenizerError, counted, named, shown
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.tokenizers.characters import CharTokenizer
from transformer_xl.tokenizers.kinds import tokenizer_from_dict
from transformer_xl.tokenizers.words import WordTokenizer

LEAST_COUNT = 2
"""Words that come less often are not added: one that comes once teaches nothing, and takes a row of the model's tables."""

_MOST_NAMED = 10  # characters or words in a message
_FIXED = {
    "byte": "has all bytes",
    "bpe": "writes any text, rare words in pieces",
    "unigram": "has pieces that were weighed together, so others change how all text is cut",
    "symbols": "is that of another program",
    "ids": "has no text",
}


def can_grow(tokenizer: Tokenizer) -> bool:
    """Return whether it is a vocabulary of characters or words."""
    return tokenizer.kind not in _FIXED


def check_can_grow(tokenizer: Tokenizer) -> None:
    """Refuse another vocabulary."""
    if not can_grow(tokenizer):
        raise ConfigError(f"--grow: a vocabulary of kind '{tokenizer.kind}' {_FIXED[tokenizer.kind]}; leave --grow out")


def lacking(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """Count the characters of texts that a vocabulary has no id for, or of a vocabulary of words, the words.

    Example:
        >>> lacking(CharTokenizer("ab"), ["abba", "cacao"])
        Counter({'c': 2, 'o': 1})
    """
    counts: Counter[str] = Counter()
    if isinstance(tokenizer, WordTokenizer):
        known = set(tokenizer.words)
        for text in texts:
            counts.update(tokenizer.split(text))
        return Counter({word: n for word, n in counts.items() if word not in known})
    for text in texts:
        counts.update(text)
    return Counter({character: n for character, n in counts.items() if _lacks(tokenizer, character)})


def _lacks(tokenizer: Tokenizer, character: str) -> bool:
    if isinstance(tokenizer, CharTokenizer):  # even if it writes others as bytes
        return character not in tokenizer.alphabet
    try:
        return tokenizer.unknown_id is not None and tokenizer.unknown_id in tokenizer.encode(character)
    except TokenizerError:
        return True


def in_words(tokenizer: Tokenizer, counts: Counter[str]) -> str:
    """Return what a vocabulary lacks, the most frequent first.

    Example:
        >>> in_words(CharTokenizer("ab"), Counter({"é": 31, "x": 1}))
        '2 characters: é (U+00E9) 31 times, x (U+0078) 1'
    """
    unit = "word" if isinstance(tokenizer, WordTokenizer) else "character"
    (first, n), *others = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    name = shown if unit == "word" else named
    parts = [f"{name(first)} {counted(n, 'time')}"]
    parts += [f"{name(each)} {n:,}" for each, n in others[: _MOST_NAMED - 1]]
    more = ", …" if len(counts) > _MOST_NAMED else ""
    return f"{counted(len(counts), unit)}: {', '.join(parts)}{more}"


def grown(tokenizer: Tokenizer, counts: Counter[str]) -> Tokenizer:
    """Return a vocabulary with the characters that it lacks, or with the words that come at least `LEAST_COUNT` times.

    Ids of words stay, and the new ones follow in order of their counts. Those of characters are in order of code point.

    Example:
        >>> grown(CharTokenizer("bd"), Counter("ca")).alphabet
        'abcd'
    """
    check_can_grow(tokenizer)
    values = tokenizer.to_dict()
    if isinstance(tokenizer, WordTokenizer):
        frequent = [word for word, n in counts.items() if n >= LEAST_COUNT]
        values["words"] += sorted(frequent, key=lambda word: (-counts[word], word))
    else:
        values["alphabet"] = "".join(sorted({*values["alphabet"], *counts}))
    return tokenizer_from_dict(values)


def origins(old: Tokenizer, new: Tokenizer) -> np.ndarray:
    """Return the id in an old vocabulary of each id of the grown one, int64 (vocab_size,), -1 for what was added.

    Example:
        >>> origins(CharTokenizer("bd"), CharTokenizer("abcd")).tolist()
        [-1, 0, -1, 1]
    """
    places = {symbol: token_id for token_id, symbol in enumerate(_symbols(old))}
    return np.array([places.get(symbol, -1) for symbol in _symbols(new)], np.int64)


def _symbols(tokenizer: Tokenizer) -> list[str | int]:
    """Return what each id stands for; bytes that write unknown characters are numbers."""
    if isinstance(tokenizer, CharTokenizer):
        return [*tokenizer.alphabet, *range(tokenizer.vocab_size - len(tokenizer.alphabet))]
    assert isinstance(tokenizer, WordTokenizer)
    return list(tokenizer.words)
