"""`Stopping`: whatever pieces a text comes in, what is passed on is the text up to the first stop string."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transformer_xl.errors import ConfigError
from transformer_xl.generation.stopping import Stopping, StopStream, Transcript
from transformer_xl.tokenizers.kinds import ByteTokenizer, Tokenizer, WordTokenizer


def passed_on(stream: StopStream, pieces: list[str]) -> list[str]:
    texts = [stream.push(piece) for piece in pieces]
    return [*texts, stream.finish()]


def cut(text: str, strings: list[str]) -> tuple[str, str | None]:
    """Return the text before the first complete stop string, and which it is, looking at every beginning of the text."""
    for end in range(len(text) + 1):
        complete = [stop for stop in strings if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


# few letters, so that stop strings occur, overlap and begin without going on
LETTERS = "abé𝄞"


@st.composite
def texts_in_pieces(draw: st.DrawFn) -> list[str]:
    text = draw(st.text(LETTERS, max_size=40))
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


@given(pieces=texts_in_pieces(), strings=st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4))
@example(["aab", "ab"], ["abab"])  # the beginning of the stop string is not the first that might have been
@example(["ab", "ab", "a"], ["ababb", "baba"])  # one goes wrong, inside of it another is complete
@example(["aaa"], ["aaa", "aa", "a"])
@example(["baa"], ["aa", "baa"])  # complete at the same character: the longest
@example(["abba"], ["bb", "abba"])  # complete first, though the other begins before it
def test_any_pieces_give_the_text_up_to_the_first_stop_string(pieces: list[str], strings: list[str]) -> None:
    stopping = Stopping(strings=strings[0] if len(strings) == 1 else strings)
    stream, other = stopping.stream(), stopping.stream()
    assert ("".join(passed_on(stream, pieces)), stream.stopped_by) == cut("".join(pieces), strings)
    assert other.stopped_by is None and other.push("") == ""
    if stream.stopped_by is not None:
        assert stream.push("more") == ""


@given(pieces=texts_in_pieces(), strings=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_become_a_stop_string(pieces: list[str], strings: list[str]) -> None:
    """After each piece: what is held back is the beginning of some stop string, and no longer end of the text is."""
    stream, so_far, passed = Stopping(strings=strings).stream(), "", ""
    for piece in pieces:
        so_far += piece
        passed += stream.push(piece)
        if stream.stopped_by is not None:
            return
        assert so_far.startswith(passed)
        possible = [n for n in range(len(so_far) + 1) if any(s.startswith(so_far[len(so_far) - n :]) for s in strings)]
        assert len(so_far) - len(passed) == max(possible)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"strings": [""]}, r"a stop string \(''\) is empty, .*; leave it out"),
        ({"strings": ""}, "is empty"),
        ({"tokens": [2, -1]}, "stop token id -1 must be at least 0"),
        ({"tokens": [4]}, r"stop token id 4 is outside the vocabulary \(4\); leave it out"),
    ],
)
def test_what_would_never_or_always_stop_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Stopping(**options).check(4)


# --- `Transcript`: the pieces, put together, are the text up to its first stop string, however tokens cut it ---


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


def test_an_unfinished_character_is_one_sign_at_the_end() -> None:
    transcript = Transcript(ByteTokenizer(), [65, 195])
    assert [transcript.push(token) for token in (169, 65, 226, 128)] == ["é", "A", "", ""]  # begun before the text
    assert transcript.finish() == "\ufffd"


@pytest.mark.parametrize(
    "tokenizer",
    [WordTokenizer(WORDS), WordTokenizer(WORDS, any_line_end=True, undo_joins=True)],
    ids=["words", "vocabulary"],
)
def test_words_begin_as_what_came_before_has_it(tokenizer: Tokenizer) -> None:
    assert spelled(Transcript(tokenizer, [2]), [3, 4]) == " cat sat"
    assert spelled(Transcript(tokenizer, [2, 1]), [3, 4]) == "cat sat"
    assert spelled(Transcript(tokenizer, [1] * 600 + [2]), [3]) == " cat"
