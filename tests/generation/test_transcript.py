"""`Transcript`: the pieces, put together, are the text up to its first stop string, however tokens cut it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.tokenizers import ByteTokenizer, Tokenizer, VocabularyTokenizer, WordTokenizer
from transformer_xl.generation.stopping import Stopping
from transformer_xl.generation.transcript import Transcript

WORDS = ["<unk>", "<eos>", "the", "cat", "sat"]


def spelled(transcript: Transcript, ids: list[int]) -> str:
    pieces = []
    for token in ids:
        pieces.append(transcript.push(token))
        if transcript.stopped_by is not None:
            break
    return "".join([*pieces, transcript.finish()])


@given(st.binary(max_size=12), st.lists(st.sampled_from(["a", "é", "b—", "aa"]), max_size=2), st.binary(max_size=3))
def test_the_text_of_bytes_ends_before_the_first_stop(data: bytes, stops: list[str], before: bytes) -> None:
    before += b"x"  # a whole character
    transcript = Transcript(ByteTokenizer(), list(before), Stopping(strings=stops))
    written = spelled(transcript, list(data))
    whole = ByteTokenizer().decode(list(data))
    places = [whole.find(stop) for stop in stops if stop in whole]
    if places:
        assert transcript.stopped_by in stops
        assert whole.startswith(written + (transcript.stopped_by or ""))
        assert not any(stop in written for stop in stops)
    else:
        assert (written, transcript.stopped_by) == (whole, None)


def test_a_character_begun_before_the_text_is_completed_in_it() -> None:
    assert Transcript(ByteTokenizer(), [195]).push(169) == "é"


def test_an_unfinished_character_is_one_sign_at_the_end() -> None:
    transcript = Transcript(ByteTokenizer(), [65])
    assert [transcript.push(token) for token in (65, 226, 128)] == ["A", "", ""]
    assert transcript.finish() == "\ufffd"


def test_what_looked_like_a_stop_comes_at_the_end() -> None:
    transcript = Transcript(ByteTokenizer(), [65], Stopping(strings=["ab"]))
    assert transcript.push(97) == ""
    assert transcript.finish() == "a"


@pytest.mark.parametrize(
    "tokenizer",
    [WordTokenizer(WORDS), VocabularyTokenizer(WORDS, line_end="<eos>", unknown="<unk>")],
    ids=["words", "vocabulary"],
)
def test_words_begin_as_what_came_before_has_it(tokenizer: Tokenizer) -> None:
    assert spelled(Transcript(tokenizer, [2]), [3, 4]) == " cat sat"
    assert spelled(Transcript(tokenizer, [2, 1]), [3, 4]) == "cat sat"
    assert spelled(Transcript(tokenizer, [1] * 600 + [2]), [3]) == " cat"
