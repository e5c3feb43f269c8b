import numpy as np
import pytest

from transformer_xl.explain.token_text import label, labels, text_of
from transformer_xl.tokenizers.kinds import ByteTokenizer, CharTokenizer, WordTokenizer


def shown(tokenizer, data):
    return text_of(tokenizer, tokenizer.encode_bytes(data))


def cut(text, lengths):
    """The text of each token, as a script cuts it: by UTF-16 code units."""
    data, at, pieces = text.encode("utf-16-le"), 0, []
    for length in lengths:
        pieces.append(data[2 * at : 2 * (at + length)].decode("utf-16-le"))
        at += length
    assert 2 * at == len(data)
    return pieces


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        ("aé😀b".encode(), ["a", "", "é", "", "", "", "😀", "b"]),
        ("שלום".encode(), ["", "ש", "", "ל", "", "ו", "", "ם"]),
        (b"a\xffb", ["a", "\ufffd", "b"]),
        (b"a\xe2\x80", ["a", "", "\ufffd"]),
        (b"\xed\xa0\x80", ["", "", "\ufffd"]),  # a lone surrogate, which no page can hold
        ("\ufeffa".encode(), ["", "", "\ufeff", "a"]),
    ],
)
def test_bytes_are_shown_as_characters(data, pieces):
    assert cut(*shown(ByteTokenizer(), data)) == pieces


def test_words_and_characters_are_shown_with_the_space_between():
    words = WordTokenizer(["<unk>", "<eos>", "the", "cat"])
    assert cut(*shown(words, b"the dog\nthe cat")) == ["the", " <unk>", "\n", "the", " cat"]
    _, lengths = shown(CharTokenizer("ab😀"), "a😀b".encode())
    assert lengths.tolist() == [1, 2, 1]


def test_labels_name_bytes_and_words():
    tokenizer = ByteTokenizer()
    assert [label(tokenizer, i) for i in (65, 10, 0xC3, 0)] == ["A", "\n", "\\xc3", "\0"]
    words = WordTokenizer(["<unk>", "<eos>", "the", "x" * 99])
    assert [label(words, i) for i in range(4)] == ["<unk>", "\n", "the", "x" * 79 + "…"]
    names, (first, second) = labels(tokenizer, np.array([66, 65]), np.array([[67], [65]]))
    assert (names, first.tolist(), second.tolist()) == (["A", "B", "C"], [1, 0], [[2], [0]])
