import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.tokenizer_cases import TEXT, TOKENIZERS, UNICODE
from tests.helpers import examples
from transformer_xl.config import TokenizerConfig
from transformer_xl.data.tokenizers import BPETokenizer, train_tokenizer
from transformer_xl.errors import TokenizerError


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
    with pytest.raises(TokenizerError, match=r"byte 1 \(0xff\) is not UTF-8; use tokenizer.kind=byte"):
        TOKENIZERS["bpe"].encode_bytes(b"a\xff")
