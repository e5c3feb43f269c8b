import numpy as np
import pytest

from transformer_xl.analysis.explain.passages import best_passages
from transformer_xl.analysis.explain.shown import label, labels, shown_text
from transformer_xl.data.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer


def shown(tokenizer, data):
    return shown_text(tokenizer, tokenizer.encode_bytes(data))


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
    found = shown(ByteTokenizer(), data)
    assert cut(found.text, found.lengths) == pieces


def test_words_and_characters_are_shown_with_the_space_between():
    words = WordTokenizer(["<unk>", "<eos>", "the", "cat"])
    found = shown(words, b"the dog\nthe cat")
    assert cut(found.text, found.lengths) == ["the", " <unk>", "\n", "the", " cat"]
    found = shown(CharTokenizer("ab😀"), "a😀b".encode())
    assert found.lengths.tolist() == [1, 2, 1]


def test_labels_name_bytes_and_words():
    tokenizer = ByteTokenizer()
    assert [label(tokenizer, i) for i in (65, 10, 0xC3, 0)] == ["A", "\n", "\\xc3", "\0"]
    words = WordTokenizer(["<unk>", "<eos>", "the", "x" * 99])
    assert [label(words, i) for i in range(4)] == ["<unk>", "\n", "the", "x" * 79 + "…"]
    names, (first, second) = labels(tokenizer, np.array([66, 65]), np.array([[67], [65]]))
    assert (names, first.tolist(), second.tolist()) == (["A", "B", "C"], [1, 0], [[2], [0]])


def test_passages_lie_inside_segments_and_the_best_come_first():
    values = np.zeros(300)
    values[[5, 130, 131, 199]] = 3, 2, 2, -9
    first, second = best_passages(values, tgt_len=128)
    assert (first.begin, first.end, first.score, first.best) == (129, 193, 4.0, 131)
    assert (second.begin, second.end, second.score, second.best) == (1, 65, 3.0, 6)
    assert best_passages(-np.ones(5), tgt_len=2) == []
    assert [p.end - p.begin for p in best_passages(np.ones(100), tgt_len=100, n=9)] == [50, 50]
