"""Tokenizers of every kind, and texts for them."""

from typing import Any

from hypothesis import strategies as st

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.tokenizers.kinds import (
    ByteTokenizer,
    CharTokenizer,
    SentencePieceTokenizer,
    SymbolTokenizer,
    Tokenizer,
    WordTokenizer,
    tokenizer_from_dict,
    train_tokenizer,
)

TEXT = "def f(x):\n    return x + 1\n\n\nthe cat sat on the mat, the mat! naïve Ünïcode 東京 🙂 it's 1984\n" * 20
WITH_SURROGATES = st.text(st.characters(exclude_categories=()))
UNICODE = st.text()  # without lone surrogates
MIXED = st.text(st.sampled_from("the Theé1,x@-.\"'s \t\r\n_\x0b\x1c\x85\xa0\u2028Σß東") | st.characters(exclude_categories=()))

SAVED_UNIGRAM: dict[str, Any] = {
    "kind": "unigram",
    "format": 1,
    "unknown": "<unk>",
    "control": [],
    "user_defined": [],
    "unused": [],
    "byte_fallback": False,
    "rules": "",
    "add_dummy_prefix": True,
    "remove_extra_whitespaces": True,
    "unknown_text": " \u2047 ",
    "normalization": "none",
    "lower_case": False,
    "keep_accents": False,
    "line_end": None,
}
"""What 0.2 saved, without pieces and scores."""


def unigram(pieces: list[str], scores: list[float], **others: Any) -> SentencePieceTokenizer:
    """A tokenizer of a few pieces, as 0.2 saved it."""
    tokenizer = tokenizer_from_dict(SAVED_UNIGRAM | {"pieces": pieces, "scores": scores} | others)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


WORDS = ["<unk>", "<eos>", "<S>", "the", "The", "é", "1", "@,@", "@-@", "@.@", ",", '"', "'s", "x"]
LETTERS = [chr(value) for value in range(0x21, 0x7F)] + ["é", "ß", "ss", "σ"]
AS_OTHERS: dict[str, Any] = {"any_line_end": True, "undo_joins": True}

TOKENIZERS: dict[str, Tokenizer] = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("abé東", byte_fallback=True),
    "bpe": train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=320), [TEXT]),
    "unigram": train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=120), [TEXT]),
    "word": train_tokenizer(TokenizerConfig(kind="word", vocab_size=12), [TEXT]),
    "lines": WordTokenizer(WORDS, **AS_OTHERS),
    "sentences": WordTokenizer(WORDS, line_start="<S>", line_end="<S>", lower_case=True, **AS_OTHERS),
    "no lines": WordTokenizer(WORDS, line_end=None, unknown="x", **AS_OTHERS),
    "bytes": SymbolTokenizer([*map(str, range(255, -1, -1)), "<eos>"], unit="byte"),
    "bytes without line ends": SymbolTokenizer(["<unk>", *map(str, range(11, 256))], unit="byte", unknown="<unk>"),
    "letters": SymbolTokenizer([*LETTERS, "<unk>"], unit="char", blank="_", lower_case=True, unknown="<unk>"),
    "characters": SymbolTokenizer([*LETTERS, " ", "\n"], unit="char", unknown="!"),
}
EXACT = ("byte", "char", "bpe")
TRAINED = (*EXACT, "unigram", "word")


def check_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Compare decoding id by id with decoding all at once."""
    decoder = tokenizer.stream()
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == tokenizer.decode(ids)
