from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from tests.tokenizers.cases import EXACT, TOKENIZERS, check_stream
from transformer_xl.errors import TokenizerError
from transformer_xl.tokenizers.kinds import ByteTokenizer, CharTokenizer


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


def test_decode_accepts_arrays_iterators_and_nothing() -> None:
    assert ByteTokenizer().decode(np.array([65, 66], np.uint16)) == "AB"
    assert ByteTokenizer().decode(iter([65])) == "A"
    assert ByteTokenizer().decode([]) == ""
    wrong: list[Any] = [[0.5], [[1, 2]], ["a"], [True]]
    for ids in wrong:
        with pytest.raises(TokenizerError, match="one row of integers"):
            ByteTokenizer().decode(ids)


@settings(max_examples=examples(300))
@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text(st.sampled_from("the cat \n\tnaïve東 🙂")))
def test_the_place_of_a_piece_holds_its_bytes(text: str) -> None:
    for name in EXACT:
        tokenizer = TOKENIZERS[name]
        ids, starts, ends = tokenizer.encode_with_offsets(text)
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert np.all(starts < ends) and np.all(np.diff(starts) >= 0) and np.all(np.diff(ends) >= 0)
        done = 0  # bytes
        for token, start, end in zip(ids.tolist(), starts, ends, strict=True):
            piece = tokenizer.piece(token)
            before, through = len(text[:start].encode()), len(text[:end].encode())
            assert before <= done + len(piece) and done + len(piece) <= through
            space = text.encode()[done:before]
            assert (
                not space.strip() and piece.startswith(space) and (start == 0 or end - start == 1 or not text[start].isspace())
            )
            done += len(piece)


def test_the_place_of_a_piece_begins_after_its_space() -> None:
    _, starts, ends = TOKENIZERS["bpe"].encode_with_offsets("the cat\n\n    return é")
    assert [(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)][:2] == [(0, 3), (4, 7)]
    assert (starts[-1], ends[-1]) == (20, 21)
    _, starts, ends = ByteTokenizer().encode_with_offsets("a é\ud800")
    assert starts.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert ends.tolist() == [1, 2, 3, 3, 4, 4, 4]
    assert CharTokenizer("a").encode_with_offsets("")[1].tolist() == []


@pytest.mark.parametrize("name", ["bytes without line ends", "letters", "characters"])
def test_tokenizers_that_lose_places_say_so(name: str) -> None:
    with pytest.raises(TokenizerError, match=rf"kind {TOKENIZERS[name].kind}\) does not keep the place .*; use one of kind"):
        TOKENIZERS[name].encode_with_offsets("ab")
