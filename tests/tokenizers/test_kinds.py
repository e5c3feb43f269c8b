import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from tests.tokenizers.cases import EXACT, MIXED, TEXT, TOKENIZERS, TRAINED, UNICODE, WITH_SURROGATES, WORDS, check_stream
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.data.text_files import cut_chunks
from transformer_xl.errors import TokenizerError
from transformer_xl.tokenizers.kinds import (
    CharTokenizer,
    SymbolTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    tokenizer_from_dict,
    train_tokenizer,
)

ALL = pytest.mark.parametrize("name", list(TOKENIZERS))


@pytest.mark.parametrize("name", EXACT)
@given(text=UNICODE)
def test_any_unicode_text_survives(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert np.array_equal(tokenizer.encode_bytes(text.encode()), ids)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name not in EXACT[:2]])
@given(text=MIXED)
def test_ids_are_ids(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text.encode("utf-8", "ignore").decode() if name in ("bpe", "unigram") else text)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert np.all((ids >= 0) & (ids < tokenizer.vocab_size))


@ALL
@settings(max_examples=examples(600))
@given(data=st.data())
def test_stream_decoder_agrees_with_decode(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    text = {"byte": WITH_SURROGATES, "char": WITH_SURROGATES, "bpe": UNICODE, "unigram": UNICODE, "word": UNICODE}.get(
        name, MIXED
    )
    of_text = text.map(lambda text: tokenizer.encode(text).tolist())
    check_stream(tokenizer, data.draw(of_text | st.lists(st.integers(0, tokenizer.vocab_size - 1))))


@ALL
@settings(max_examples=examples(500))
@given(text=UNICODE | MIXED, chunk_bytes=st.integers(8, 40))
def test_encoding_in_chunks_is_encoding_as_a_whole(name: str, text: str, chunk_bytes: int) -> None:
    words = text.encode("utf-8", "ignore").decode()
    if name in TRAINED:  # lines are shorter than a chunk, so every cut is at a line end
        text = "\n".join(f"{word} x" for word in words)
    else:
        lines = words.replace("\r", " ").split("\n")
        text = "\n".join(f"{line[:1]} x" if line else "" for line in lines for _ in range(3))
    tokenizer = TOKENIZERS[name]
    parts = [tokenizer.encode_bytes(chunk) for chunk in cut_chunks([text.encode()], chunk_bytes)]
    assert np.array_equal(np.concatenate([np.empty(0, np.int64), *parts]), tokenizer.encode(text))


@ALL
def test_saving_and_loading(name: str, tmp_path) -> None:
    tokenizer, text = TOKENIZERS[name], TEXT if name in TRAINED else "the the\n\n The é ' x\r\nß"
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.loses == tokenizer.loses
    assert np.array_equal(loaded.encode(text), tokenizer.encode(text))
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@given(
    words=st.lists(st.text(min_size=1).filter(lambda word: word.split() == [word]), min_size=1, unique=True),
    lower_case=st.booleans(),
    data=st.data(),
)
def test_any_vocabulary_survives_json(words: list[str], lower_case: bool, data: st.DataObject) -> None:
    special = st.none() | st.sampled_from(words)
    fields = {name: data.draw(special, name) for name in ("line_start", "line_end", "unknown")}
    others: dict[str, Any] = (
        {"never_split": words[:2], "moses": "en"} if lower_case else {"any_line_end": True, "undo_joins": True}
    )
    tokenizer = WordTokenizer(words, lower_case=lower_case, **fields, **others)
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.to_dict() == tokenizer.to_dict()


@ALL
@pytest.mark.parametrize("bad", [-1, 10_000])
def test_ids_outside_the_vocabulary(name: str, bad: int) -> None:
    with pytest.raises(TokenizerError, match=rf"token id {bad} is outside the vocabulary \(0 … \d+\); decode with"):
        TOKENIZERS[name].decode([0, bad])
    with pytest.raises(TokenizerError, match=rf"token id {bad} is outside"):
        TOKENIZERS[name].stream().push(bad)


@pytest.mark.parametrize(
    ("name", "loses"),
    [
        ("word", "Words outside the vocabulary (they become <unk>), SPACE."),
        ("lines", "Words outside the vocabulary (they become <unk>), SPACE; @-@, @,@ and @.@ are written as -"),
        ("sentences", "Words outside the vocabulary (they become <unk>), SPACE, case; @-@"),
        ("bytes without line ends", "Bytes outside the vocabulary (they become <unk>), line ends."),
        ("letters", "Characters outside the vocabulary (they become <unk>), line ends, case, white space other than blanks, _"),
        ("characters", "Characters outside the vocabulary (they become !), the kind of line ends, space at the ends of lines."),
    ],
)
def test_what_is_lost_is_said(name: str, loses: str) -> None:
    space = "the amount and kind of space between words"
    upper = WordTokenizer(["<UNK>"], line_end=None, unknown="<UNK>", moses="en").loses
    assert upper.startswith(f"Words outside the vocabulary (they become <UNK>), line ends, {space} and the typography of")
    assert TOKENIZERS[name].loses.startswith(loses.replace("SPACE", space))
    assert TOKENIZERS["bytes"].loses == TOKENIZERS["bpe"].loses == ""


WORD_FIELDS = WordTokenizer(WORDS, line_start="<S>", moses="en", never_split=["x"], lower_case=True).to_dict()
SYMBOL_FIELDS = TOKENIZERS["letters"].to_dict()


CHAR_FIELDS = CharTokenizer("ab").to_dict()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "bite", "format": 1}, "unknown tokenizer kind 'bite'; did you mean 'byte'"),
        ({"kind": ["byte"], "format": 1}, "unknown tokenizer kind"),
        ({"kind": "byte", "format": 2}, "format 2 is not 1"),
        ({"kind": "byte", "format": 1, "more": 1}, "damaged tokenizer: .*'more'"),
        (CHAR_FIELDS | {"alphabet": "ba"}, "not in the form in which"),
        (CHAR_FIELDS | {"alphabet": ""}, "alphabet is empty"),
        (CHAR_FIELDS | {"alphabet": [[]]}, "damaged tokenizer: unhashable"),
        ({"kind": "bpe", "format": 1, "library": {}}, "damaged tokenizer: 'model'"),
        (WORD_FIELDS | {"words": "abc"}, "is not one of its words"),
        (WORD_FIELDS | {"words": []}, "it has no words"),
        (WORD_FIELDS | {"words": ["<eos>", "<unk>", "a", "a"]}, "occurs twice"),
        (WORD_FIELDS | {"words": ["<eos>", "<unk>", "a\u2028b"]}, "empty or contains space"),
        (WORD_FIELDS | {"line_end": "</s>"}, r"line_end \('</s>'\) is not one of its words"),
        (WORD_FIELDS | {"moses": "/etc"}, "moses is not a language"),
        (WORD_FIELDS | {"never_split": "ab"}, "not in the form in which"),
        (WORD_FIELDS | {"never_split": [""]}, "a word of never_split is empty"),
        (SYMBOL_FIELDS | {"unit": "word"}, "unit 'word' is neither 'byte' nor 'char'"),
        (SYMBOL_FIELDS | {"unit": "byte"}, "bytes have neither case"),
    ],
)
def test_inconsistent_values(values, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        tokenizer_from_dict(values)
    assert "\n" not in str(error.value)


SCALAR = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
JSON = SCALAR | st.lists(SCALAR, max_size=3) | st.dictionaries(st.text(max_size=1), SCALAR, max_size=1)
FIELDS = WORD_FIELDS.keys() | SYMBOL_FIELDS.keys() | CHAR_FIELDS.keys()
CHANGES = st.fixed_dictionaries({}, optional={name: JSON for name in sorted(FIELDS - {"kind"})})


@settings(max_examples=examples(300))
@given(base=st.sampled_from([WORD_FIELDS, SYMBOL_FIELDS, CHAR_FIELDS]), changes=CHANGES)
def test_any_json_makes_a_tokenizer_or_its_error(base: dict, changes: dict) -> None:
    try:
        tokenizer = tokenizer_from_dict(base | changes)
    except TokenizerError as error:
        assert "\n" not in str(error)
    else:
        assert tokenizer.decode(range(tokenizer.vocab_size)) is not None


@pytest.mark.parametrize(
    ("tokenizer", "text", "message"),
    [
        (WordTokenizer(["a"], line_end=None, unknown=None), "a b" + "c" * 99, r"word 'bc+\.\.\.c+' is not in the vocabulary"),
        (SymbolTokenizer(["97"], unit="byte"), "aé", r"byte 195 \(0xc3\) is not among"),
        (SymbolTokenizer(["a"], unit="char"), "aé\n東", r"character é \(U\+00E9\) is not among"),
    ],
)
def test_unknown_without_a_word_for_it(tokenizer: Tokenizer, text: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer.encode(text)


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


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"kind": "by', "Unterminated string"), (b"\x80\x04\x95", "'utf-8' codec"), (b"[" * 100_000, "it is nested too deep")],
)
def test_damaged_files(tmp_path, content: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"tokenizer '.*tokenizer.json': {message}"):
        load_tokenizer(path)


def test_what_only_0_2_wrote_is_left_out() -> None:
    loaded = tokenizer_from_dict(SYMBOL_FIELDS | {"checksum": "…", "events": {}, "line_end": None})
    assert loaded.fingerprint == TOKENIZERS["letters"].fingerprint
