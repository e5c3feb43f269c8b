import copy
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.tokenizer_cases import MIXED, TEXT, TOKENIZERS, UNICODE
from tests.helpers import examples
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.data.tokenizers import BPETokenizer, train_tokenizer
from transformer_xl.errors import TokenizerError


@pytest.mark.parametrize("size", [300_001, 2**63 - 1])
def test_a_vocabulary_beyond_any_text_is_refused(size: int) -> None:
    with pytest.raises(TokenizerError, match=r"must be at most 300,000 for bpe; lower it"):
        train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=size), ["a b a b"])


@pytest.mark.parametrize("name", ["merges", "tokens"])
def test_a_file_of_more_pieces_than_anybody_publishes_is_refused(name: str) -> None:
    tokenizer = TOKENIZERS["bpe"]
    assert isinstance(tokenizer, BPETokenizer)
    many = {"merges": {"merges": ["a b"] * 300_001}, "tokens": {"vocab": {str(i): i for i in range(300_001)}}}[name]
    with pytest.raises(TokenizerError, match=rf"^unusable tokenizer: it has 300,001 {name}; 300,000 is the most accepted; "):
        BPETokenizer(tokenizer.library | {"model": tokenizer.library["model"] | many})


def test_bpe_refuses_lone_surrogates() -> None:
    with pytest.raises(TokenizerError, match=r"lone surrogate is not Unicode; use tokenizer.kind=byte"):
        TOKENIZERS["bpe"].encode("a\ud800")


@settings(max_examples=examples(500))
@given(text=st.text("ab'9. \n\t\r\x1c\x85\xa0\u2028²東") | UNICODE)
def test_bpe_by_segments_is_bpe_by_the_library(text: str) -> None:
    tokenizer = TOKENIZERS["bpe"]
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.encode(text).tolist() == tokenizer._model.encode(text).ids


def test_bpe_learns_units_and_is_deterministic() -> None:
    again = train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=320), [TEXT])
    assert again.fingerprint == TOKENIZERS["bpe"].fingerprint
    assert 300 < again.vocab_size <= 320
    assert len(again.encode(TEXT)) < len(TEXT) / 2


def test_not_utf8() -> None:
    with pytest.raises(TokenizerError, match=r"byte 1 \(0xff\) is not UTF-8; .*, or use tokenizer.kind=byte"):
        TOKENIZERS["bpe"].encode_bytes(b"a\xff")


BYTES_LAST = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
OWN = TOKENIZERS["bpe"].to_dict()["library"]["pre_tokenizer"]["pretokenizers"][0]["pattern"]
WORD_PIECE = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}


def split(pattern: dict[str, str], behavior: str = "Isolated", *, invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def library(model: dict[str, Any] | None = None, *, cut: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The JSON of a trained tokenizer with another option of its model, something else that cuts text, or other changes."""
    values = copy.deepcopy(TOKENIZERS["bpe"].to_dict()["library"])
    values["model"] |= model or {}
    if cut is not None:
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cut}
    return values | changes


ACCEPTED: dict[str, dict[str, Any]] = {
    "GPT-2's own": library(pre_tokenizer=BYTES_LAST | {"use_regex": True}),
    "bytes alone": library(pre_tokenizer=BYTES_LAST),
    "digits and dots": library(
        cut=[{"type": "Digits", "individual_digits": True}, {"type": "Punctuation", "behavior": "Contiguous"}, BYTES_LAST]
    ),
    "between our own units": library(cut=[split(OWN, "MergedWithPrevious", invert=True), BYTES_LAST]),
    "space to the next": library(cut=[split({"String": " "}, "MergedWithNext"), BYTES_LAST]),
    "nothing to merge": library({"ignore_merges": True, "fuse_unk": True, "dropout": 0.0}, decoder=None),
}


@pytest.mark.parametrize("name", ACCEPTED)
@settings(max_examples=examples(200))
@given(text=MIXED.map(lambda text: text.encode("utf-8", "ignore").decode()) | UNICODE)
def test_any_text_survives_a_tokenizer_of_another_program(name: str, text: str) -> None:
    tokenizer = loaded(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.tolist() == [i for line in re.findall("[^\n]*\n+|[^\n]+", text) for i in tokenizer._model.encode(line).ids]


@cache
def loaded(name: str) -> BPETokenizer:
    return BPETokenizer(ACCEPTED[name])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (library({"dropout": 0.1}), "dropout, so encoding would be random"),
        (library({"unk_token": "a"}), "its model has unk_token"),
        (library({"continuing_subword_prefix": "##"}), "its model has continuing_subword_prefix"),
        (library({"end_of_word_suffix": "</w>"}), "its model has end_of_word_suffix"),
        (library({"byte_fallback": True}), "its model has byte_fallback"),
        (library(WORD_PIECE), "its model is not BPE"),
        (library({"type": None}), "its model is not BPE"),
        (library(model=None, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "its decoder is not ByteLevel"),
        (library(pre_tokenizer=None), "its last pre-tokenizer is not ByteLevel"),
        (library(pre_tokenizer=5), "its last pre-tokenizer is not ByteLevel"),
        (library(pre_tokenizer={"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}), "is not ByteLevel"),
        (library(pre_tokenizer=BYTES_LAST | {"add_prefix_space": True}), "it puts a space before text"),
        (library(cut=[]), "it has no pre-tokenizer"),
        (library(cut=[5, BYTES_LAST]), "its pre-tokenizer 5 may drop text"),
        (library(cut=[BYTES_LAST, BYTES_LAST]), "may drop text"),
        (library(cut=[{"type": "WhitespaceSplit"}, BYTES_LAST]), "may drop text"),
        (library(cut=[{"type": "Punctuation", "behavior": "Removed"}, BYTES_LAST]), "may drop text"),
        (library(cut=[split({"Regex": r"\s+"}, "Removed"), BYTES_LAST]), "'behavior': 'Removed'.* may drop text"),
        (library(cut=[split({"String": ""}), BYTES_LAST]), "may drop text"),
        (library(cut=[split({"Regex": "(a+)+$"}), BYTES_LAST]), r"\(a\+\)\+\$.* or never end"),
        (library(cut=[split({"Regex": "a"} | OWN | {"String": ""}), BYTES_LAST]), "or never end"),
    ],
)
def test_what_could_lose_text_or_never_end_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        BPETokenizer(values)
    assert "\n" not in str(error.value)


def test_a_part_that_loses_text_unseen_by_structure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.data.bpe._only_cuts", lambda part: True)
    with pytest.raises(TokenizerError, match="text does not survive it"):
        BPETokenizer(library(cut=[split({"Regex": r"\s+"}, "Removed"), BYTES_LAST]))


def test_a_panic_of_the_library_is_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("transformer_xl.data.bpe._only_cuts", lambda part: True)
    tokenizer = BPETokenizer(library(cut=[split({"Regex": "(a+)+$"}), BYTES_LAST]))
    with pytest.raises(TokenizerError, match=r"fails at a part of the text \(.*retry-limit.*\); leave that part out"):
        tokenizer.encode("a" * 40 + "!")
    assert "panicked" in capfd.readouterr().err  # printed by the library


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_ctrl_c_in_the_library_is_ctrl_c(kind: type[BaseException]) -> None:
    class Interrupted:
        def encode_batch_fast(self, texts: list[str], **_: Any) -> None:
            raise kind

    tokenizer = BPETokenizer(library())
    tokenizer._model = Interrupted()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(kind):
        tokenizer.encode("text that was not seen before")
