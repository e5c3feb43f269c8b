from collections import Counter

import pytest

from tests.tokenizers.cases import TOKENIZERS, WORDS
from transformer_xl.errors import ConfigError
from transformer_xl.tokenizers.growth import can_grow, grown, in_words, lacking, origins
from transformer_xl.tokenizers.kinds import CharTokenizer, WordTokenizer


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("char", {"\u03bb": 3, "c": 1, " ": 2}),  # although bytes write them
        ("letters", {"\u03bb": 3, "\u6771": 2}),
        ("characters", {"\u03bb": 3, "\u6771": 2}),
        ("unigram", {"\u03bb": 3, "b": 1}),
        ("byte", {}),
        ("bpe", {}),
        ("sentences", {"\u03bb\u03bb\u03bb": 1, "\u6771\u6771abc": 1}),
        ("lines", {"\u03bb\u03bb\u03bb": 1, "\u6771\u6771abc": 1, "THE": 1}),
    ],
)
def test_what_a_vocabulary_lacks_is_counted(name: str, expected: dict[str, int]) -> None:
    texts = ["\u03bb\u03bb\u03bb \u6771\u6771abc "] + (["THE"] if name in ("sentences", "lines") else [])
    assert lacking(TOKENIZERS[name], texts) == expected


def test_what_is_lacking_in_words() -> None:
    many = Counter({chr(ord("a") + i): i + 1 for i in range(12)})
    expected = (
        "12 characters: l (U+006C) 12 times, k (U+006B) 11, j (U+006A) 10, i (U+0069) 9, h (U+0068) 8, g (U+0067) 7, "
        "f (U+0066) 6, e (U+0065) 5, d (U+0064) 4, c (U+0063) 3, …"
    )
    assert in_words(CharTokenizer("x"), many) == expected
    assert in_words(WordTokenizer(WORDS), Counter(cat=1)) == "1 word: 'cat' 1 time"


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_a_grown_alphabet_keeps_what_each_character_is(byte_fallback: bool) -> None:
    old = CharTokenizer("bdz", byte_fallback=byte_fallback)
    new = grown(old, Counter("cay\u00e9"))
    assert isinstance(new, CharTokenizer) and (new.alphabet, new.byte_fallback) == ("abcdyz\u00e9", byte_fallback)
    place = origins(old, new)
    assert [token for token in place.tolist() if token >= 0] == list(range(old.vocab_size))
    assert place[new.encode("bdz")].tolist() == old.encode("bdz").tolist()
    assert (place[new.encode("acy\u00e9")] == -1).all()
    if byte_fallback:
        assert place[new.encode("\u6771")].tolist() == old.encode("\u6771").tolist()


def test_words_are_added_in_order_of_their_counts() -> None:
    old = WordTokenizer(WORDS, lower_case=True, line_start="<S>", any_line_end=True)
    new = grown(old, Counter({"dog": 2, "cat": 3, "rare": 1, "ant": 2}))
    assert isinstance(new, WordTokenizer)
    assert new.words == (*WORDS, "cat", "ant", "dog")
    assert {**new.to_dict(), "words": None} == {**old.to_dict(), "words": None}
    assert origins(old, new).tolist() == [*range(len(WORDS)), -1, -1, -1]


@pytest.mark.parametrize("name", ["byte", "bpe", "unigram", "letters"])
def test_other_vocabularies_say_why_they_cannot_grow(name: str) -> None:
    assert not can_grow(TOKENIZERS[name])
    with pytest.raises(
        ConfigError, match=rf"^--grow: a vocabulary of kind '{TOKENIZERS[name].kind}' \w+ .*; leave --grow out$"
    ):
        grown(TOKENIZERS[name], Counter("x"))
