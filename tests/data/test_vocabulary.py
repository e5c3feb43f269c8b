import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from transformer_xl.config import DataConfig
from transformer_xl.data import tokenizers, vocabulary
from transformer_xl.data.prepare import prepare
from transformer_xl.data.text_files import cut_chunks
from transformer_xl.data.tokenizers import SymbolTokenizer, Tokenizer, VocabularyTokenizer, load_tokenizer, tokenizer_from_dict
from transformer_xl.errors import TokenizerError

WORDS = ["<unk>", "<eos>", "<S>", "the", "The", "é", "1", "@,@", "@-@", "@.@", ",", '"', "'s", "x"]
LETTERS = [chr(value) for value in range(0x21, 0x7F)] + ["é", "ß", "ss", "σ"]
TOKENIZERS = {
    "lines": VocabularyTokenizer(WORDS, line_end="<eos>", unknown="<unk>"),
    "sentences": VocabularyTokenizer(WORDS, line_start="<S>", line_end="<S>", unknown="<unk>", lower_case=True),
    "no lines": VocabularyTokenizer(WORDS, unknown="x"),
    "bytes": SymbolTokenizer([*map(str, range(255, -1, -1)), "<eos>"], unit="byte"),
    "bytes without line ends": SymbolTokenizer(["<unk>", *map(str, range(11, 256))], unit="byte", unknown="<unk>"),
    "letters": SymbolTokenizer([*LETTERS, "<unk>"], unit="char", blank="_", lower_case=True, unknown="<unk>"),
    "characters": SymbolTokenizer([*LETTERS, " ", "<eos>"], unit="char", line_end="<eos>", unknown="!"),
}
ALL = pytest.mark.parametrize("name", list(TOKENIZERS))
TEXT = st.text(st.sampled_from("the Theé1,x@-.\"'s \t\r\n_\x0b\x1c\x85\xa0\u2028Σß東") | st.characters(exclude_categories=()))


@ALL
@settings(max_examples=examples(500))
@given(text=TEXT, chunk_bytes=st.integers(8, 40))
def test_encoding_in_chunks_is_encoding_as_a_whole(name: str, text: str, chunk_bytes: int) -> None:
    tokenizer, words = TOKENIZERS[name], text.encode("utf-8", "ignore").decode().replace("\r", " ").split("\n")
    text = "\n".join(f"{word[:1]} x" if word else "" for word in words for _ in range(3))  # lines shorter than a chunk
    parts = [tokenizer.encode_bytes(chunk) for chunk in cut_chunks([text.encode()], chunk_bytes)]
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *parts]), tokenizer.encode(text))


@ALL
@given(text=TEXT)
def test_ids_are_ids(name: str, text: str) -> None:
    ids = TOKENIZERS[name].encode(text)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert np.all((ids >= 0) & (ids < TOKENIZERS[name].vocab_size))


@ALL
@settings(max_examples=examples(400))
@given(data=st.data())
def test_stream_decoder_agrees_with_decode(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    of_text = TEXT.map(lambda text: tokenizer.encode(text).tolist())
    ids = data.draw(of_text | st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    decoder = tokenizer.stream()
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, len(WORDS) - 1)), language=st.sampled_from(["en", "de"]))
def test_stream_decoder_agrees_with_decode_when_moses_spaces(ids: list[int], language: str) -> None:
    tokenizer = VocabularyTokenizer(WORDS, line_end="<eos>", moses=language)
    decoder = tokenizer.stream()
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == tokenizer.decode(ids)


@ALL
def test_saving_and_loading(name: str, tmp_path) -> None:
    tokenizer, text = TOKENIZERS[name], "the the\n\n The é ' x\r\nß"
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.loses == tokenizer.loses
    assert np.array_equal(loaded.encode(text), tokenizer.encode(text))


@given(
    words=st.lists(st.text(min_size=1).filter(lambda word: word.split() == [word]), min_size=1, unique=True),
    lower_case=st.booleans(),
    data=st.data(),
)
def test_any_vocabulary_survives_json(words: list[str], lower_case: bool, data: st.DataObject) -> None:
    special = st.none() | st.sampled_from(words)
    fields = {name: data.draw(special, name) for name in ("line_start", "line_end", "unknown")}
    tokenizer = VocabularyTokenizer(words, lower_case=lower_case, **fields, never_split=words[:2], moses="en")
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.to_dict() == tokenizer.to_dict()


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


def test_bytes_and_letters() -> None:
    assert TOKENIZERS["bytes"].encode("a\né").tolist() == [255 - value for value in "a\né".encode()]
    assert TOKENIZERS["bytes"].encode_bytes(b"\xff\x00").tolist() == [0, 255]
    assert TOKENIZERS["bytes"].decode([255 - 0xC3, 256, 255 - 65]) == "\ufffd<eos>A"
    no_lines = TOKENIZERS["bytes without line ends"]
    assert no_lines.decode(no_lines.encode("a\nb\r\n")) == "ab\r"
    assert no_lines.encode("\t").tolist() == [0]
    letters = TOKENIZERS["letters"]
    assert letters.decode(letters.encode(" The \t\nSea\u2003é_É ")) == " the sea" + "é é "
    assert letters.encode("Σ").tolist() == [LETTERS.index("σ")]  # by itself, for each character stands by itself
    characters = TOKENIZERS["characters"]
    assert characters.decode(characters.encode("  the sea\t\n \r\nso ")) == "the sea\n\nso"
    ended = SymbolTokenizer(["97", "<eos>"], unit="byte", line_end="<eos>")
    assert ended.decode(ended.encode("a\na\n")) == "a\na\n"


@pytest.mark.parametrize(
    ("tokenizer", "text", "message"),
    [
        (VocabularyTokenizer(["a"]), "a b" + "c" * 99, r"word 'bc{39}' is not in the vocabulary of 1 words"),
        (SymbolTokenizer(["97"], unit="byte"), "aé", r"byte 195 \(0xc3\) is not among the vocabulary's 1 symbols"),
        (
            SymbolTokenizer(["a"], unit="char"),
            "aé\n東",
            r"character '\\xe9' \(U\+00E9\) is not among the vocabulary's 1 symbols",
        ),
    ],
)
def test_unknown_without_a_word_for_it(tokenizer: Tokenizer, text: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        tokenizer.encode(text)
    assert "\n" not in str(error.value)


def test_longest_special_word_is_set_aside_and_means_itself() -> None:
    pytest.importorskip("sacremoses")
    words = ["a", "a.b", "a.b.c", "x", "-", "@-@"]
    tokenizer = VocabularyTokenizer([*words, "<unk>"], unknown="<unk>", moses="en", never_split=["a.b", "a.b.c"])
    assert [tokenizer.words[index] for index in tokenizer.encode("xa.b.cx a-b a.b-x")] == [
        *["x", "a.b.c", "x", "a", "@-@", "<unk>", "a.b", "<unk>"],
    ]


def test_what_sacremoses_refuses_is_an_error_of_ours() -> None:
    pytest.importorskip("sacremoses")
    tokenizer = VocabularyTokenizer(["<unk>"], unknown="<unk>", moses="en", never_split=["<unk>"])
    assert tokenizer.encode("<unk>" * 2000).tolist() == [0] * 2000
    with pytest.raises(TokenizerError, match="sacremoses refuses a line of 10000 characters: too many protected tokens"):
        tokenizer.encode("<UNK>" * 2000)


def test_only_bytes_need_no_utf8() -> None:
    assert [name for name, tokenizer in TOKENIZERS.items() if tokenizer.reads_bytes] == ["bytes", "bytes without line ends"]
    with pytest.raises(TokenizerError, match=r"byte 0 \(0xff\) is not UTF-8"):
        TOKENIZERS["letters"].encode_bytes(b"\xff")


@pytest.mark.parametrize(
    ("name", "loses"),
    [
        ("lines", "Words outside the vocabulary (they become <unk>), the kind of space; @-@, @,@ and @.@"),
        ("sentences", "Words outside the vocabulary (they become <unk>), case, the kind of space; @-@"),
        ("no lines", "Words outside the vocabulary (they become x), line ends, the kind of space; @-@"),
        ("bytes without line ends", "Bytes outside the vocabulary (they become <unk>), line ends."),
        (
            "letters",
            "Characters outside the vocabulary (they become <unk>), line ends, case, white space other than blanks, _ (it",
        ),
        ("characters", "Characters outside the vocabulary (they become !), space at the ends of lines."),
    ],
)
def test_what_is_lost_is_said(name: str, loses: str) -> None:
    upper = VocabularyTokenizer(["<UNK>"], unknown="<UNK>", moses="en").loses
    assert upper.startswith("Words outside the vocabulary (they become <UNK>), line ends, the amount and kind of space and the")
    assert TOKENIZERS[name].loses.startswith(loses)
    assert TOKENIZERS["bytes"].loses == ""


WORD_FIELDS = TOKENIZERS["lines"].to_dict()
SYMBOL_FIELDS = TOKENIZERS["letters"].to_dict()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (WORD_FIELDS | {"words": "abc"}, "words are no list"),
        (WORD_FIELDS | {"words": []}, "0 words are not between"),
        (WORD_FIELDS | {"words": ["<eos>", "<unk>", ["a"]]}, "a word is not text"),
        (WORD_FIELDS | {"words": ["<eos>", "<unk>", 1]}, "a word is not text"),
        (WORD_FIELDS | {"words": ["<eos>", "<unk>", "a", "a"]}, "occurs twice"),
        (WORD_FIELDS | {"words": ["<eos>", "<unk>", ""]}, "empty or contains space"),
        (WORD_FIELDS | {"words": ["<eos>", "<unk>", "a\u2028b"]}, "empty or contains space"),
        (WORD_FIELDS | {"words": ["<eos>", "<unk>", "a" * 70_000]}, "more than 65,536 characters"),
        (WORD_FIELDS | {"line_end": "</s>"}, r"line_end \('</s>'\) is not one of its words"),
        (WORD_FIELDS | {"line_start": 1}, r"line_start \('1'\) is not one of its words"),
        (WORD_FIELDS | {"unknown": ["<unk>"]}, "unknown .* is not one of its words"),
        (WORD_FIELDS | {"lower_case": None}, "lower_case is neither"),
        (WORD_FIELDS | {"moses": "/etc"}, "moses is no language"),
        (WORD_FIELDS | {"moses": 1}, "moses is no language"),
        (WORD_FIELDS | {"never_split": "ab"}, "never_split is no list"),
        (WORD_FIELDS | {"never_split": [1]}, "never_split has what is not text"),
        (WORD_FIELDS | {"never_split": [""]}, "a word of never_split is empty"),
        (WORD_FIELDS | {"more": 1}, "its fields are"),
        (SYMBOL_FIELDS | {"unit": "word"}, "unit 'word' is neither 'byte' nor 'char'"),
        (SYMBOL_FIELDS | {"unit": ["byte"]}, r"unit \['byte'\] is neither"),
        (SYMBOL_FIELDS | {"unit": "byte"}, "bytes have neither case"),
        (SYMBOL_FIELDS | {"blank": "-" * 80}, r"blank \('-{40}'\) is not one of its words"),
        (SYMBOL_FIELDS | {"lower_case": "yes"}, "lower_case is neither"),
        (SYMBOL_FIELDS | {"symbols": {}}, "words are no list"),
    ],
)
def test_inconsistent_values(values, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        tokenizer_from_dict(values)
    assert "\n" not in str(error.value)


SCALAR = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
JSON = SCALAR | st.lists(SCALAR, max_size=3) | st.dictionaries(st.text(max_size=1), SCALAR, max_size=1)
CHANGES = st.fixed_dictionaries({}, optional={name: JSON for name in [*WORD_FIELDS, *SYMBOL_FIELDS] if name != "kind"})


@settings(max_examples=examples(300))
@given(base=st.sampled_from([WORD_FIELDS, SYMBOL_FIELDS]), changes=CHANGES)
def test_any_json_makes_a_tokenizer_or_its_error(base: dict, changes: dict) -> None:
    try:
        tokenizer = tokenizer_from_dict(base | changes)
    except TokenizerError as error:
        assert "\n" not in str(error)
    else:
        assert tokenizer.decode(range(tokenizer.vocab_size)) is not None


def test_absurd_sizes_are_refused(tmp_path, monkeypatch) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZERS["lines"].save(path)
    monkeypatch.setattr(vocabulary, "MAX_WORDS", 13)
    with pytest.raises(TokenizerError, match="14 words are not between 1 and 13"):
        load_tokenizer(path)
    monkeypatch.setattr(tokenizers, "MAX_FILE_BYTES", 10)
    with pytest.raises(TokenizerError, match=r"tokenizer.json': it has \d+ bytes, more than the 10 of any tokenizer"):
        load_tokenizer(path)


def test_a_large_vocabulary_loads_quickly(tmp_path) -> None:
    words = [f"{number:x}é" if number % 2 else f"word{number}" for number in range(800_000)]
    VocabularyTokenizer(words).save(tmp_path / "tokenizer.json")
    before = time.process_time()
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert time.process_time() - before < 2
    assert loaded.encode(f"{words[-1]} {words[0]}").tolist() == [len(words) - 1, 0]


def test_a_corpus_is_prepared_by_it(tmp_path) -> None:
    text = "the x 1 @,@ 000\n\n The end\n" * 300
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    for name in ("lines", "sentences", "letters"):
        data = DataConfig(corpus=str(tmp_path / "text.txt"), split=(1, 0, 0))
        tokenizer = TOKENIZERS[name]
        prepared = prepare(data, tokenizer, cache=tmp_path / "cache", n_workers=2, progress=False)
        assert np.array_equal(prepared.splits["train"].ids, tokenizer.encode(text))
        assert prepared.tokenizer.fingerprint == tokenizer.fingerprint
