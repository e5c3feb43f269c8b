import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.tokenizer_cases import TOKENIZERS, check_stream
from tests.helpers import examples
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import TokenizerError


@settings(max_examples=examples(1000))
@given(st.lists(st.sampled_from([0x41, 0x80, 0xA0, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xED, 0xF0, 0x9F, 0x99, 0x82, 0xF4, 0xFF])))
def test_stream_decoder_agrees_on_broken_utf8(ids: list[int]) -> None:
    check_stream(TOKENIZERS["byte"], ids)
    check_stream(TOKENIZERS["char"], [i + 4 for i in ids] + [0])


def test_stream_gives_complete_characters_only() -> None:
    decoder = ByteTokenizer().stream()
    assert [decoder.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert decoder.push(0xE2) == ""
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize("ids", [[0.5], [[1, 2]], ["a"], [True]])
def test_ids_must_be_integers(ids) -> None:
    with pytest.raises(TokenizerError, match=r"one row of integers"):
        ByteTokenizer().decode(ids)


def test_decode_accepts_arrays_iterators_and_nothing() -> None:
    assert ByteTokenizer().decode(np.array([65, 66], np.uint16)) == "AB"
    assert ByteTokenizer().decode(iter([65])) == "A"
    assert ByteTokenizer().decode([]) == ""
