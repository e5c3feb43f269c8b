import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from transformer_xl.config import TokenizerConfig
from transformer_xl.data.text_files import cut_chunks
from transformer_xl.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    tokenizer_from_dict,
    train_tokenizer,
)
from transformer_xl.errors import TokenizerError

TEXT = "def f(x):\n    return x + 1\n\n\nthe cat sat on the mat, the mat! naïve Ünïcode 東京 🙂 it's 1984\n" * 20
WITH_SURROGATES = st.text(st.characters(exclude_categories=()))
UNICODE = st.text()  # without lone surrogates
TRAINED = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("abé東", byte_fallback=True),
    "bpe": train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=320), [TEXT]),
    "word": train_tokenizer(TokenizerConfig(kind="word", vocab_size=12), [TEXT]),
}
EXACT = pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
ALL = pytest.mark.parametrize("kind", list(TRAINED))


@EXACT
@given(text=UNICODE)
def test_any_unicode_text_survives(kind: str, text: str) -> None:
    tokenizer = TRAINED[kind]
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert np.array_equal(tokenizer.encode_bytes(text.encode()), ids)


@pytest.mark.parametrize("kind", ["byte", "char"])
@given(text=WITH_SURROGATES)
def test_lone_surrogates_survive(kind: str, text: str) -> None:
    assert TRAINED[kind].decode(TRAINED[kind].encode(text)) == text


def test_bpe_refuses_lone_surrogates() -> None:
    with pytest.raises(TokenizerError, match=r"lone surrogate is not Unicode; use tokenizer.kind=byte"):
        TRAINED["bpe"].encode("a\ud800")


@given(data=st.binary())
def test_bytes_take_any_bytes(data: bytes) -> None:
    assert bytes(ByteTokenizer().encode_bytes(data).tolist()) == data


@ALL
@settings(max_examples=examples(1000))
@given(data=st.data())
def test_stream_decoder_agrees_with_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = TRAINED[kind]
    text_ids = WITH_SURROGATES if kind in ("byte", "char") else UNICODE
    of_text = text_ids.map(lambda text: tokenizer.encode(text).tolist())
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1))
    _check_stream(tokenizer, data.draw(of_text | any_ids))


@settings(max_examples=examples(1000))
@given(st.lists(st.sampled_from([0x41, 0x80, 0xA0, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xED, 0xF0, 0x9F, 0x99, 0x82, 0xF4, 0xFF])))
def test_stream_decoder_agrees_on_broken_utf8(ids: list[int]) -> None:
    _check_stream(TRAINED["byte"], ids)
    _check_stream(TRAINED["char"], [i + 4 for i in ids] + [0])


def _check_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    decoder = tokenizer.stream()
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == tokenizer.decode(ids)


def test_stream_gives_complete_characters_only() -> None:
    decoder = ByteTokenizer().stream()
    assert [decoder.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert decoder.push(0xE2) == ""
    assert decoder.finish() == "\ufffd"


@settings(max_examples=examples(500))
@given(text=st.text("ab'9. \n\t\r\x1c\x85\xa0\u2028²東") | UNICODE)
def test_bpe_by_segments_is_bpe_by_the_library(text: str) -> None:
    tokenizer = TRAINED["bpe"]
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.encode(text).tolist() == tokenizer._model.encode(text).ids


@ALL
@given(text=UNICODE, chunk_bytes=st.integers(8, 40))
def test_encoding_in_chunks_is_encoding_as_a_whole(kind: str, text: str, chunk_bytes: int) -> None:
    # Lines shorter than a chunk, so that every cut is at a line end.
    text = "\n".join(text[i : i + 1] + " x" for i in range(len(text)))
    tokenizer = TRAINED[kind]
    parts = [tokenizer.encode_bytes(chunk) for chunk in cut_chunks([text.encode()], chunk_bytes)]
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *parts]), tokenizer.encode(text))


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
    assert short.encode("A <eos> zz <unk>\n").tolist() == [2, 1, 0, 0, 1]
    assert "case" in short.loses
    rare = train_tokenizer(TokenizerConfig(kind="word", min_frequency=3), [text])
    assert rare.to_dict()["words"] == ["<unk>", "<eos>", "a"]


def test_alphabet_is_sorted_and_unseen_characters_are_named() -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="char"), ["né", "an"])
    assert tokenizer.to_dict()["alphabet"] == "ané"
    message = (
        r"'\\u6771' \(U\+6771\) is not in the tokenizer's alphabet of 3 characters; train with tokenizer.byte_fallback=true"
    )
    with pytest.raises(TokenizerError, match=message):
        tokenizer.encode("n東")


def test_bpe_learns_units_and_is_deterministic() -> None:
    again = train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=320), [TEXT])
    assert again.fingerprint == TRAINED["bpe"].fingerprint
    assert 300 < again.vocab_size <= 320
    assert len(again.encode(TEXT)) < len(TEXT) / 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TokenizerConfig(kind="bpe", vocab_size=255), r"vocab_size \(255\) must be at least 256"),
        (TokenizerConfig(kind="word", vocab_size=2), r"vocab_size \(2\) must exceed 2"),
        (TokenizerConfig(kind="word"), "no words to learn"),
        (TokenizerConfig(kind="char"), "no text to learn"),
    ],
)
def test_training_errors(config: TokenizerConfig, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        train_tokenizer(config, [])


@ALL
def test_saving_and_loading(kind: str, tmp_path) -> None:
    tokenizer = TRAINED[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert np.array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@ALL
@pytest.mark.parametrize("bad", [-1, 10_000])
def test_ids_outside_the_vocabulary(kind: str, bad: int) -> None:
    with pytest.raises(TokenizerError, match=rf"token id {bad} is outside the vocabulary \(0 … \d+\); decode with"):
        TRAINED[kind].decode([0, bad])
    with pytest.raises(TokenizerError, match=rf"token id {bad} is outside"):
        TRAINED[kind].stream().push(bad)


@pytest.mark.parametrize("ids", [[0.5], [[1, 2]], ["a"], [True]])
def test_ids_must_be_integers(ids) -> None:
    with pytest.raises(TokenizerError, match=r"one row of integers"):
        ByteTokenizer().decode(ids)


def test_decode_accepts_arrays_iterators_and_nothing() -> None:
    assert ByteTokenizer().decode(np.array([65, 66], np.uint16)) == "AB"
    assert ByteTokenizer().decode(iter([65])) == "A"
    assert ByteTokenizer().decode([]) == ""


def _library(**changes) -> dict:
    library = json.loads(json.dumps(TRAINED["bpe"].to_dict()["library"]))
    vocab = library["model"]["vocab"]
    if changes.pop("gap", False):
        vocab[max(vocab, key=vocab.get)] = 999
    if changes.pop("strange", False):
        library["model"]["merges"].pop()
        last = max(vocab, key=vocab.get)
        vocab["東"] = vocab.pop(last)
    return library | changes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "not a JSON object"),
        ({"kind": "bite", "format": 1}, "unknown tokenizer kind 'bite'; did you mean 'byte'"),
        ({"kind": ["byte"], "format": 1}, "unknown tokenizer kind"),
        ({"kind": "byte", "format": 2}, "format 2 is not 1"),
        ({"kind": "byte", "format": 1, "more": 1}, "its fields are"),
        ({"kind": "char", "format": 1, "alphabet": "ba", "byte_fallback": False}, "not sorted or has duplicates"),
        ({"kind": "char", "format": 1, "alphabet": "aa", "byte_fallback": False}, "not sorted or has duplicates"),
        ({"kind": "char", "format": 1, "alphabet": "", "byte_fallback": False}, "alphabet is empty"),
        ({"kind": "char", "format": 1, "alphabet": ["a"], "byte_fallback": False}, "wrong type"),
        ({"kind": "word", "format": 1, "words": ["a"], "lower_case": False}, "do not begin with <unk>, <eos>"),
        ({"kind": "word", "format": 1, "words": ["<unk>", "<eos>", "a", "a"], "lower_case": False}, "occurs twice"),
        ({"kind": "word", "format": 1, "words": ["<unk>", "<eos>", "a b"], "lower_case": False}, "contains space"),
        ({"kind": "word", "format": 1, "words": ["<unk>", "<eos>", 3], "lower_case": False}, "not text"),
        ({"kind": "word", "format": 1, "words": "abc", "lower_case": False}, "wrong type"),
        ({"kind": "bpe", "format": 1, "library": 3}, "wrong type"),
        ({"kind": "bpe", "format": 1, "library": {}}, "damaged tokenizer"),
        ({"kind": "bpe", "format": 1, "library": _library(normalizer={"type": "NFC"})}, "has a normalizer"),
        ({"kind": "bpe", "format": 1, "library": _library(gap=True)}, "damaged tokenizer"),
        ({"kind": "bpe", "format": 1, "library": _library(strange=True)}, "not made of bytes"),
    ],
)
def test_inconsistent_values(values, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        tokenizer_from_dict(values)
    assert "\n" not in str(error.value)


def test_damaged_files(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(TokenizerError, match=r"cannot read tokenizer .*No such file"):
        load_tokenizer(path)
    path.write_bytes(b'{"kind": "by')
    with pytest.raises(TokenizerError, match=r"tokenizer.json' is damaged \(.*train it again"):
        load_tokenizer(path)
    path.write_bytes(b"\x80\x04\x95")
    with pytest.raises(TokenizerError, match=r"is damaged"):
        load_tokenizer(path)
    path.write_text("[" * 100_000)
    with pytest.raises(TokenizerError, match=r"is damaged"):
        load_tokenizer(path)


def test_not_utf8() -> None:
    with pytest.raises(TokenizerError, match=r"byte 1 \(0xff\) is not UTF-8; use tokenizer.kind=byte"):
        TRAINED["bpe"].encode_bytes(b"a\xff")


def test_types() -> None:
    assert isinstance(TRAINED["bpe"], BPETokenizer)
    assert isinstance(TRAINED["word"], WordTokenizer)
    assert TRAINED["bpe"].loses == ""
