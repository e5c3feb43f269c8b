import json
import lzma
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_spiece import SETTINGS, model
from tests.data.tokenizer_cases import TEXT, TOKENIZERS, UNICODE, check_stream
from tests.helpers import examples
from transformer_xl.config import TokenizerConfig
from transformer_xl.data.normalization import SPACE
from transformer_xl.data.tokenizers import tokenizer_from_dict, train_tokenizer
from transformer_xl.data.unigram import BYTE_PIECES, UnigramTokenizer
from transformer_xl.errors import TokenizerError

PIECES = {
    "<unk>": 0.0,
    "▁": -2.0,
    "▁the": -1.0,
    "a": -3.0,
    "t": -3.0,
    "at": -4.0,
    "<eop>": 0.0,
    "<s>": 0.0,
    "1,": -1.0,
    "▁1": -2.0,
}
FIELDS: dict[str, Any] = {
    "pieces": [*PIECES, "1", ","],
    "scores": [*PIECES.values(), -5.0, -5.0],
    "control": ["<s>"],
    "user_defined": ["<eop>"],
}
MIXED = st.text(st.sampled_from("ab 1,0e\u0301▁é.(`'\t\x00ﬁ\xad東\n")) | UNICODE


def trained(text: str = TEXT, **changes: Any) -> UnigramTokenizer:
    tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=120, **changes), [text])
    assert isinstance(tokenizer, UnigramTokenizer)
    return tokenizer


def test_unknown_characters_side_by_side_are_one() -> None:
    tokenizer = UnigramTokenizer(**FIELDS)
    assert tokenizer.encode("東京 the 東").tolist() == [1, 0, 2, 1, 0]
    assert tokenizer.encode("<s>").tolist() == [1, 0], "text never becomes a control piece"
    assert tokenizer.encode("a<eop>").tolist() == [1, 3, 6]


def test_rounding_of_a_long_sum_decides_between_ways_that_are_nearly_as_likely() -> None:
    scores = {"<unk>": 0.0, "▁": -1.5, "ab": -1.5, "▁a": -1.0, "b": -1.9999998, "▁x": -5.0}
    tokenizer = UnigramTokenizer([*scores], [*scores.values()])
    ids = tokenizer.encode("ab " + "x " * 1000 + "ab").tolist()
    assert (ids[:2], ids[-2:]) == ([3, 4], [1, 2]), "in single precision, both ways to cut the last word are -5,006"


def test_unknown_characters_may_be_spelled_as_a_piece_in_xlnet() -> None:
    assert UnigramTokenizer(**FIELDS).encode("a<s>").tolist() == [1, 3, 0]
    assert UnigramTokenizer(**FIELDS, normalization="xlnet").encode("a<s>").tolist() == [1, 3, 7], "it looks up every piece"


def test_pieces_are_found_by_name() -> None:
    tokenizer = TOKENIZERS["unigram"]
    assert isinstance(tokenizer, UnigramTokenizer)
    assert [tokenizer.id_of(piece) for piece in ("<cls>", "<sep>", "<pad>", "<mask>", "<eod>")] == [3, 4, 5, 6, 7]
    with pytest.raises(TokenizerError, match=r"piece '<seq>' is not in the vocabulary; did you mean '<sep>'\?"):
        tokenizer.id_of("<seq>")


def test_the_place_of_a_piece_begins_after_the_space() -> None:
    _, starts, ends = UnigramTokenizer(**FIELDS).encode_with_offsets("  the   the")
    assert (starts.tolist(), ends.tolist()) == ([2, 8], [5, 11])


def test_line_ends_are_pieces_if_asked() -> None:
    assert UnigramTokenizer(**FIELDS).encode("the\n\nthe\n").tolist() == [2, 2]
    tokenizer = UnigramTokenizer(**FIELDS, line_end="<eop>")
    assert tokenizer.encode("the\n\n the\n").tolist() == [2, 6, 6, 2, 6]
    assert tokenizer.decode([2, 6, 6, 2, 2, 6, 7, 3]) == "the\n\nthe the\na"
    _, starts, ends = tokenizer.encode_with_offsets("the\n\n the\n")
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == [(0, 3), (3, 4), (4, 5), (6, 9), (9, 10)]


def test_a_comma_after_a_digit_is_cut_off_as_in_xlnet() -> None:
    text = "a1, 1,"
    plain = UnigramTokenizer(**FIELDS)
    assert [plain.pieces[i] for i in plain.encode(text)] == ["▁", "a", "1,", "▁", "1,"]
    xlnet = UnigramTokenizer(**FIELDS, normalization="xlnet")
    # the 1 in the middle of a word is cut at the beginning of a line, and loses the mark that it got there
    assert [xlnet.pieces[i] for i in xlnet.encode(text)] == ["▁", "a", "1", ",", "▁", "1", ","]
    assert list(zip(*(each.tolist() for each in xlnet.encode_with_offsets(text)[1:]), strict=True))[2:4] == [(1, 2), (2, 3)]


def test_what_text_is_lost_is_said() -> None:
    assert UnigramTokenizer(**FIELDS, line_end="<eop>", remove_extra_whitespaces=False).loses.startswith("Characters outside")
    assert "line ends" in UnigramTokenizer(**FIELDS).loses
    xlnet = UnigramTokenizer(**FIELDS, normalization="xlnet", lower_case=True).loses
    assert xlnet.endswith("the amount and kind of space between words, accents and other forms of the same characters, case.")


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(TokenizerError, match=r"lone surrogate is not Unicode; use tokenizer.kind=byte"):
        UnigramTokenizer(**FIELDS).encode("a\ud800")


@settings(max_examples=examples(300))
@given(text=MIXED, setting=st.sampled_from(sorted(SETTINGS)), name=st.sampled_from(["xlnet", "bytes", "phrases"]))
def test_places_are_in_the_original(text: str, setting: str, name: str) -> None:
    tokenizer = model(name, setting)
    ids, starts, ends = tokenizer.encode_with_offsets(text)
    assert np.array_equal(ids, tokenizer.encode(text))
    assert np.all((starts >= 0) & (starts <= ends) & (ends <= len(text)))
    assert np.all(np.diff(starts) >= 0)
    assert np.all(np.diff(ends) >= 0)
    for token_id, start, end in zip(ids.tolist(), starts.tolist(), ends.tolist(), strict=True):
        source, piece = text[start:end], tokenizer.pieces[token_id].strip(SPACE)
        if not piece or token_id == 0 or piece in BYTE_PIECES:
            continue
        again = "".join([tokenizer._aligned(line).text for line in source.split("\n")])
        assert piece.lower().replace("σ", "ς") in again.lower().replace("σ", "ς"), "its place alone is written as it is"


@settings(max_examples=examples(300))
@given(words=st.lists(st.sampled_from(["the", "cat,", "1984!", "naïve", "“it's”", "(x)", "3,000,", "東京", "½", "<unk>"])))
def test_every_run_of_words_is_found_again(words: list[str]) -> None:
    """As an answer in a passage is: the pieces that its characters belong to begin and end where it does."""
    tokenizer = TOKENIZERS["unigram"]
    assert isinstance(tokenizer, UnigramTokenizer)
    text = "  ".join(words)
    _, starts, ends = tokenizer.encode_with_offsets(text)
    for found in re.finditer(r"\S+", text):
        inside = np.flatnonzero((ends > found.start()) & (starts < found.end()) & (starts < ends))
        assert text[starts[inside[0]] : ends[inside[-1]]].strip() == found.group()


@pytest.mark.parametrize("setting", SETTINGS)
@settings(max_examples=examples(300))
@given(data=st.data())
def test_stream_decoder_agrees_with_decode(setting: str, data: st.DataObject) -> None:
    tokenizer = model(data.draw(st.sampled_from(["xlnet", "bytes", "phrases"])), setting)
    check_stream(tokenizer, data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1))))


@given(text=st.text(st.sampled_from("the cat sat on\n") | st.characters(categories=("L", "N"))))
def test_bytes_stand_for_unknown_characters(text: str) -> None:
    tokenizer = WITH_BYTES
    lines = [" ".join(line.split(" ")).strip(" ") for line in re.sub(" +", " ", text).split("\n")]
    assert tokenizer.decode(tokenizer.encode(text)) == "\n".join(lines)


WITH_BYTES = train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=350, byte_fallback=True), [TEXT])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pieces": []}, "it has no words"),
        ({"pieces": ["<unk>"]}, "there is not one score for each piece"),
        ({"scores": 3}, "there is not one score for each piece"),
        ({"scores": ["0"] * 12}, "a score is no number"),
        ({"scores": [True] * 12}, "a score is no number"),
        ({"scores": [1e9] * 12}, "a score is no number"),
        ({"scores": [0.1] * 12}, "not in the form in which"),
        ({"unknown": "<UNK>"}, "unknown .'<UNK>'. is not one of its pieces"),
        ({"unknown": ["<unk>"]}, "unknown .* is not one of its pieces"),
        ({"control": ["<cls>"]}, "control .'<cls>'. is not one of its pieces"),
        ({"control": "<s>"}, "control is no list of text"),
        ({"unused": [1]}, "unused is no list of text"),
        ({"unused": ["<s>"]}, "a piece is special in two ways"),
        ({"user_defined": ["<eop>", "<eop>"]}, "a piece is special in two ways"),
        ({"byte_fallback": True}, "lacks some of the 256 pieces"),
        ({"byte_fallback": 0}, "byte_fallback is neither true nor false"),
        ({"rules": "é"}, "unusable tokenizer"),
        ({"rules": "AAAA"}, "table of characters is cut short"),
        ({"rules": 1}, "its rules are no text"),
        ({"unknown_text": None}, "unknown_text is no short text"),
        ({"unknown_text": "\0"}, "has a control character"),
        ({"normalization": "nfkc"}, "normalization .'nfkc'. is not one of none, spaces, xlnet"),
        ({"normalization": ["xlnet"]}, "is not one of none, spaces, xlnet"),
        ({"lower_case": True}, "lower_case and keep_accents need 'xlnet'"),
        ({"line_end": "<eod>"}, "line_end is not one of its pieces"),
        ({"line_end": "<unk>"}, "line_end stands for unknown text"),
        ({"more": 1}, "its fields are"),
    ],
)
def test_inconsistent_values(changes: dict[str, Any], message: str) -> None:
    values = UnigramTokenizer(**FIELDS).to_dict()
    assert tokenizer_from_dict(json.loads(json.dumps(values))).to_dict() == values
    with pytest.raises(TokenizerError, match=message) as error:
        tokenizer_from_dict(values | changes)
    assert "\n" not in str(error.value)


# --- real text --------------------------------------------------------------------------------------------------------


def real(name: str) -> str:
    path = Path(os.environ.get("TXL_DATA", "")) / name
    if "TXL_DATA" not in os.environ or not path.exists():
        pytest.skip(f"$TXL_DATA holds no {name}")
    return lzma.decompress(path.read_bytes()).decode()


@pytest.mark.data
def test_every_answer_of_squad_is_found_again() -> None:
    """It is inside of the pieces that its first and last characters belong to, and all of them if it is made of whole words."""
    articles = json.loads(real("squad/dev-v1.1.json.xz"))["data"]
    passages = [paragraph for article in articles for paragraph in article["paragraphs"]]
    config = TokenizerConfig(kind="unigram", vocab_size=8000, normalization="xlnet")
    tokenizer = train_tokenizer(config, [passage["context"] for passage in passages])
    assert isinstance(tokenizer, UnigramTokenizer)
    n_answers = n_exact = 0
    for passage in passages:
        text = passage["context"]
        _, starts, ends = tokenizer.encode_with_offsets(text)
        for answer in {(each["answer_start"], each["text"]) for question in passage["qas"] for each in question["answers"]}:
            begin, end = answer[0], answer[0] + len(answer[1])
            first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(starts, end) - 1
            found = text[starts[first] : ends[last]]
            assert answer[1].strip() in found
            is_whole = not text[begin - 1 : begin].strip() and not text[end : end + 1].strip()
            assert found == answer[1].strip() or not is_whole, "it is a part of a word, or a comma follows"
            n_answers += 1
            n_exact += found == answer[1].strip()
    assert n_answers == 16_983
    assert n_exact > 0.97 * n_answers


@pytest.mark.data
def test_a_real_text_survives_but_for_space(tmp_path: Path) -> None:
    text = real("wikitext-2/wiki.valid.tokens.xz")
    tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=4000, byte_fallback=True), [text])
    assert tokenizer.decode(tokenizer.encode(text)) == "\n".join(
        [line.strip(" ") for line in re.sub(" +", " ", text).split("\n")]
    )
