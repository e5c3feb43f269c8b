from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from tests.tokenizers.cases import MIXED, TOKENIZERS, UNICODE, WORDS, check_stream
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError
from transformer_xl.tokenizers.kinds import WordTokenizer, train_tokenizer


@given(text=UNICODE)
def test_words_lose_what_they_say(text: str) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="word"), [text + " x"])
    expected = "\n".join(" ".join(line.split()) for line in text.split("\n"))
    assert tokenizer.decode(tokenizer.encode(text.replace("<eos>", ""))) == expected.replace("<eos>", "")
    assert "space between words" in tokenizer.loses
    assert "case" not in tokenizer.loses


def test_word_vocabulary_order_limits_and_case() -> None:
    text = "b a A c <unk> a\nb a\n"
    assert train_tokenizer(TokenizerConfig(kind="word"), [text]).to_dict()["words"] == ["<unk>", "<eos>", "a", "b", "A", "c"]
    short = train_tokenizer(TokenizerConfig(kind="word", vocab_size=4, lower_case=True), [text])
    assert short.to_dict()["words"] == ["<unk>", "<eos>", "a", "b"]
    assert train_tokenizer(TokenizerConfig(kind="word"), [text]).to_dict().keys() == {"kind", "format", "words", "lower_case"}
    assert short.encode("A <eos> zz <unk>\n").tolist() == [2, 1, 0, 0, 1]
    assert "case" in short.loses
    rare = train_tokenizer(TokenizerConfig(kind="word", min_frequency=3), [text])
    assert rare.to_dict()["words"] == ["<unk>", "<eos>", "a"]


@given(ids=st.lists(st.integers(0, len(WORDS) - 1)), language=st.sampled_from(["en", "de"]))
def test_stream_decoder_agrees_with_decode_when_moses_spaces(ids: list[int], language: str) -> None:
    check_stream(WordTokenizer(WORDS, unknown=None, moses=language), ids)


@given(words=st.lists(st.sampled_from(["the", "The", "é", "1", ",", "x"])))
def test_words_survive(words: list[str]) -> None:
    for tokenizer, end in ((TOKENIZERS["lines"], "\n"), (TOKENIZERS["no lines"], "")):
        assert tokenizer.decode(tokenizer.encode("\t" + "  ".join(words) + end)) == " ".join(words) + end


def test_lines_of_words() -> None:
    ids = {word: index for index, word in enumerate(WORDS)}

    def encoded(name: str, text: str) -> list[str]:
        return [WORDS[index] for index in TOKENIZERS[name].encode(text)]

    assert encoded("lines", "The\r\nthe\r\rx\n") == ["The", "<eos>", "the", "<eos>", "<eos>", "x", "<eos>"]
    assert encoded("lines", "x\u2028x\x0bx\x85x") == ["x"] * 4
    assert encoded("lines", "a <eos> the") == ["<unk>", "<eos>", "the"]
    assert encoded("sentences", "The\n\nthe") == ["<S>", "the", "<S>", "<S>", "<S>", "<S>", "the"]
    assert encoded("sentences", "\n") == ["<S>", "<S>"]
    assert encoded("sentences", "") == []
    assert encoded("no lines", "\nThe\nthe") == ["The", "the"]
    assert ids["<S>"] == 2


@settings(max_examples=examples(300))
@given(text=MIXED)
def test_the_place_of_a_word_holds_it(text: str) -> None:
    for name in ("word", "lines", "sentences", "no lines"):
        tokenizer = TOKENIZERS[name]
        assert isinstance(tokenizer, WordTokenizer)
        ids, starts, ends = tokenizer.encode_with_offsets(text)
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert all(each.tolist() == sorted(each) for each in (starts, ends))
        for token, start, end in zip(ids.tolist(), starts, ends, strict=True):
            word, found = tokenizer.words[token], text[start:end]
            if not found.strip():
                assert word in (tokenizer.line_start, tokenizer.line_end)
                assert found in ("", "\n", "\r", "\r\n")
            elif word != tokenizer.unknown:
                assert word == (found.lower() if tokenizer.lower_case else found)


def test_longest_special_word_is_set_aside_and_means_itself() -> None:
    pytest.importorskip("sacremoses")
    words = ["a", "a.b", "a.b.c", "x", "-", "@-@"]
    tokenizer = WordTokenizer([*words, "<unk>"], line_end=None, moses="en", never_split=["a.b", "a.b.c"])
    assert [tokenizer.words[index] for index in tokenizer.encode("xa.b.cx a-b a.b-x")] == [
        *["x", "a.b.c", "x", "a", "@-@", "<unk>", "a.b", "<unk>"],
    ]


def test_what_sacremoses_refuses_is_an_error_of_ours() -> None:
    pytest.importorskip("sacremoses")
    tokenizer = WordTokenizer(["<unk>"], line_end=None, moses="en", never_split=["<unk>"])
    assert tokenizer.encode("<unk>" * 2000).tolist() == [0] * 2000
    with pytest.raises(TokenizerError, match="sacremoses refuses a line of 10000 characters: too many protected tokens"):
        tokenizer.encode("<UNK>" * 2000)


def written(words: list[str], **options: Any) -> str:
    """Return the text that a tokenizer with these words decodes their ids to."""
    tokenizer = WordTokenizer(sorted(set(words)), unknown=None, **options)
    return tokenizer.decode(map(tokenizer.words.index, words))


@pytest.mark.parametrize(
    ("start", "end", "words", "text"),
    [
        (None, "<eos>", "a b <eos> <eos> @-@ c <eos>", "a b\n\n-c\n"),
        ("<S>", "<S>", "<S> a b <S> <S> <S> <S> c <S> d", "a b\n\nc\nd"),
        ("<S>", "<S>", "a <S> <S> b", "a\nb"),
        ("<s>", "</s>", "<s> a <s> b </s> c </s>", "a <s> b\nc\n"),
        (None, None, "a <eos> b", "a <eos> b"),
        (None, "<eos>", "a @-@ <eos> b", "a-\nb"),
    ],
)
def test_lines_are_written(start: str | None, end: str | None, words: str, text: str) -> None:
    assert written(words.split(), line_start=start, line_end=end, undo_joins=True) == text


def test_quotation_marks_do_not_reach_over_a_line_end() -> None:
    assert written(['"', "a", "<eos>", '"', "b", '"'], line_end="<eos>", moses="en") == '"a\n"b"'


ITEM = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"


@pytest.mark.parametrize(
    ("words", "are"),
    [
        (["白日依山尽"], True),  # more than 4 Chinese letters
        (["白日依山", "白日依，，，。"], False),  # signs are none
        (["白日依山尽", "a" * 4], True),  # more than half of all characters
        (["白日依山尽", "a" * 5], False),
        (["コンピュータープログラム"], False),  # katakana
        (["これは本です"], True),
        (["ก" * 12, "ກ" * 12, "ម" * 12, "မ" * 12], False),
        (["ก" * 13], True),  # Thai, Lao, Khmer, Burmese
        (["ກ" * 13], True),
        (["ម" * 13], True),
        (["မ" * 13], True),
        ([ITEM, "GET", "/item"], False),  # a log
        ([f"用户{ITEM}登录成功", "GET"], False),
        (["ЁЖИК" * 10, "é" * 30, "한국어" * 10], False),  # scripts with spaces
    ],
)
def test_which_words_are_lines(words: list[str], are: bool) -> None:
    assert WordTokenizer(words, line_end=None, unknown=None).counts == ("word" if are else "character")
