import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from tests.tokenizers.cases import TEXT, TOKENIZERS, UNICODE
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError
from transformer_xl.tokenizers.kinds import BPETokenizer, train_tokenizer


def test_a_vocabulary_beyond_any_text_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"must be at most 300,000 for bpe; lower it"):
        train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=2**63 - 1), ["a b a b"])


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
    with pytest.raises(TokenizerError, match="lone surrogate is not Unicode"):
        again.encode("a\ud800")


@pytest.mark.parametrize(
    ("place", "new", "why"), [(0, "zzz", "it lacks some of the 256 bytes"), (-1, "東", "not made of bytes")]
)
def test_a_vocabulary_without_a_byte_or_of_other_things_is_refused(place: int, new: str, why: str) -> None:
    vocab = library()["model"]["vocab"]
    vocab[new] = vocab.pop(sorted(vocab, key=vocab.__getitem__)[place])
    with pytest.raises(TokenizerError, match=why):
        BPETokenizer(library({"merges": [], "vocab": vocab}))


def library(model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The JSON of a trained tokenizer with another option of its model, or other changes."""
    values = copy.deepcopy(TOKENIZERS["bpe"].to_dict()["library"])
    return values | {"model": values["model"] | (model or {})} | changes


@pytest.mark.parametrize(
    "values",
    [
        *(library({name: value}) for name, value in {"dropout": 0.1, "unk_token": "a", "byte_fallback": True}.items()),
        library({"type": "WordPiece"}),
        library(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
        library(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Removed", "invert": False}),
        library(normalizer={"type": "NFC"}),
    ],
)
def test_what_could_lose_text_or_never_end_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match="text might not survive it"):
        BPETokenizer(values)
