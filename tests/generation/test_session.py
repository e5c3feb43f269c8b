"""`TextSession`: read and written in turns, saved and loaded in between, it is one text."""

from pathlib import Path

import pytest
import torch

from tests.helpers import assert_close, tiny_model
from transformer_xl.errors import CheckpointError, TokenizerError
from transformer_xl.generation.choice import choose
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Chosen, Draft
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.seeds import seeded_generator
from transformer_xl.generation.session import TextSession
from transformer_xl.generation.stopping import Stopping
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tokenizers.kinds import CharTokenizer

LETTERS = CharTokenizer("abcdefghijklm")


@pytest.fixture
def model() -> TransformerXL:
    torch.manual_seed(0)
    return tiny_model(mem_len=6)


def turn(session: TextSession, prompt: list[int], *, seed: int = 0, **options) -> list[int]:
    sampling = Sampling(repetition_penalty=1.5, repetition_window=20)
    draft = Draft(prompt, seed=seed, sampling=sampling, **{"max_new_tokens": 7, **options})
    return [event.token for event in session.write(draft) if isinstance(event, Chosen)]


def seed_of(session: TextSession) -> int | None:
    return session.text.random and session.text.random[0]


def test_turns_are_one_text(model: TransformerXL) -> None:
    session, text = TextSession(Decoder(model), LETTERS), []
    for seed, prompt in enumerate([[1, 2, 3], [], [4] * 2000, [5]]):
        text += [*prompt, *turn(session, prompt, seed=seed)]
        assert_close("memory", session.decoder.scores.full(), Decoder(model).feed([text]), 1e-5)
        assert list(session.text.tail) == text[-512:]
        assert session.text.n_tokens == len(text)


@pytest.mark.parametrize("stop", ["token", "string", "nothing written"])
def test_what_ended_a_text_is_not_remembered(model: TransformerXL, stop: str) -> None:
    tokens = turn(TextSession(Decoder(model), LETTERS), [1])
    last = tokens.index(tokens[4])
    session = TextSession(Decoder(model), LETTERS)
    if stop == "token":
        written = turn(session, [1], stopping=Stopping(tokens={tokens[4]}))
        assert written == tokens[:last]
    elif stop == "string":
        text = LETTERS.decode(tokens)
        assert text[2] not in text[:2]
        written = turn(session, [1], tokenizer=LETTERS, stopping=Stopping(strings=[text[2]]))[:-1]
        assert written == tokens[:2]
    else:
        written = turn(session, [1], stopping=Stopping(tokens={tokens[0]}))
        assert written == []
    assert list(session.text.tail) == [1, *written]
    assert session.text.n_tokens == 1 + len(written)
    assert_close("memory", session.decoder.scores.full(), Decoder(model).feed([[1, *written]]), 1e-5)


def test_a_file_goes_on_where_the_session_was(model: TransformerXL, tmp_path: Path) -> None:
    """Repetition penalty included: the last tokens are in the file."""
    session = TextSession(Decoder(model), LETTERS)
    turn(session, [1, 2, 3])
    session.save(tmp_path / "a")
    expected = turn(session, [], seed=1)
    other = TextSession(Decoder(model), LETTERS)
    turn(other, [9, 9])
    other.load(tmp_path / "a")
    assert other.text.n_tokens == 10
    assert turn(other, [], seed=1) == expected
    assert (list(other.text.tail), other.text.n_tokens) == (list(session.text.tail), session.text.n_tokens)
    other.reset()
    assert (list(other.text.tail), other.text.n_tokens) == ([], 0)
    assert turn(other, [1, 2, 3]) == list(session.text.tail)[3:10]


def drawn(
    session: TextSession, prompt: list[int], n_tokens: int, *, seed: int = 99, until: int | None = None, **options
) -> list[int]:
    draft, tokens = Draft(prompt, seed=seed, max_new_tokens=n_tokens, **options), []
    for event in session.write(draft):
        tokens += [event.token] if isinstance(event, Chosen) else []
        if len(tokens) == until:
            draft.interrupt()
    return tokens


def test_a_text_drawn_in_turns_is_the_text_drawn_at_once(model: TransformerXL, tmp_path: Path) -> None:
    whole = drawn(TextSession(Decoder(model), LETTERS), [1, 2], 100, seed=5)
    session, written = TextSession(Decoder(model), LETTERS, keeps_drawing=True), []
    assert seed_of(session) is None
    for n_tokens, seed in ((50, 5), (0, 6), (1, 7), (49, 8)):
        written += drawn(session, [] if written else [1, 2], n_tokens, seed=seed)
        session.save(tmp_path / "a")
        session = TextSession(Decoder(model), LETTERS, keeps_drawing=True)
        session.load(tmp_path / "a")
        assert seed_of(session) == 5
    assert written == whole
    kept = session.keep()
    expected = drawn(session, [3], 40)
    session.restore(kept)
    assert drawn(session, [3], 40) == expected
    in_memory = TextSession(Decoder(model), LETTERS, keeps_drawing=True)
    assert drawn(in_memory, [1, 2], 30, seed=5) + drawn(in_memory, [], 70) == whole


def test_a_refused_draft_leaves_the_random_numbers_as_they_were(model: TransformerXL) -> None:
    for keeps_drawing in (True, False):
        session = TextSession(Decoder(model), LETTERS, keeps_drawing=keeps_drawing)
        with pytest.raises(TokenizerError):
            turn(session, [], seed=4)
        assert seed_of(session) is None
        turn(session, [1, 2], seed=5)
        with pytest.raises(TokenizerError):
            turn(session, [99], seed=6)
        assert seed_of(session) == 5
        assert turn(session, [], seed=7) and seed_of(session) == (5 if keeps_drawing else 7)


def test_each_turn_has_its_seed_unless_the_session_keeps_drawing(model: TransformerXL, tmp_path: Path) -> None:
    session = TextSession(Decoder(model), LETTERS)
    drawn(session, [1], 20, seed=5)
    session.save(tmp_path / "a")
    texts = []
    for keeps_drawing in (False, False, True):
        session = TextSession(Decoder(model), LETTERS, keeps_drawing=keeps_drawing)
        session.load(tmp_path / "a")
        texts.append(drawn(session, [], 40, seed=6))
    assert texts[0] == texts[1] != texts[2]
    session.reset()
    assert seed_of(session) is None
    assert drawn(session, [1], 20, seed=5) == drawn(TextSession(Decoder(model), LETTERS), [1], 20, seed=5)


STATE = '{"bit_generator": "PCG64", "state": {"state": 1, "inc": 3}, "has_uint32": 0, "uinteger": 0}'


@pytest.mark.parametrize(
    "note",
    [
        *({"random": text} for text in (None, "x", "[]", "{}", '{"bit_generator": "PCG64"}')),
        *({"random": STATE.replace("1", text)} for text in ("x", "-1", "1" + "0" * 60)),
        *({"random": text} for text in ("[" * 100_000, STATE.replace("3}", "4}"))),
        *({"seed": text} for text in (None, "-1", str(2**64))),
    ],
)
def test_random_numbers_that_cannot_be_gone_on_with_begin_anew(
    model: TransformerXL, tmp_path: Path, note: dict[str, str | None]
) -> None:
    session = TextSession(Decoder(model), LETTERS)
    drawn(session, [1], 20, seed=5)
    session.save(tmp_path / "a")
    sound = session.decoder.load(tmp_path / "a")
    session.decoder.save(tmp_path / "a", note={name: text for name, text in (sound | note).items() if text is not None})
    other = TextSession(Decoder(model), LETTERS, keeps_drawing=True)
    other.load(tmp_path / "a")
    assert (seed_of(other), other.text.n_tokens) == (None, 21)
    assert drawn(other, [], 30, seed=7) == drawn(session, [], 30, seed=7)


def test_a_repetition_penalty_looks_back_into_earlier_turns(model: TransformerXL) -> None:
    session, sampling = TextSession(Decoder(model), LETTERS), Sampling(repetition_penalty=1e6, repetition_window=20)
    text = [1, 2, 3, *turn(session, [1, 2, 3])]
    decoder, generator = Decoder(model), seeded_generator(9)
    scores, expected = decoder.read([text]), list(text)
    for _ in range(5):
        expected.append(choose(scores, 0, sampling, expected, generator))
        scores = decoder.read([expected[-1:]])
    events = session.write(Draft([], seed=9, max_new_tokens=5, sampling=sampling))
    assert [event.token for event in events if isinstance(event, Chosen)] == expected[len(text) :]


def test_sessions_of_others_are_refused_and_nothing_is_lost(model: TransformerXL, tmp_path: Path) -> None:
    session = TextSession(Decoder(model), LETTERS)
    turn(session, [1])
    session.save(tmp_path / "a")
    other = TextSession(Decoder(model), CharTokenizer("bcdefghijklmn"))
    turn(other, [2])
    before = (list(other.text.tail), other.text.n_tokens, other.decoder.scores.full())
    with pytest.raises(CheckpointError, match="was read with another tokenizer; use that one, or start anew"):
        other.load(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        other.load(tmp_path / "gone")
    assert before[:2] == (list(other.text.tail), other.text.n_tokens)
    assert torch.equal(before[2], other.decoder.scores.full())


def test_a_session_without_our_notes_is_taken_over_too(model: TransformerXL, tmp_path: Path) -> None:
    decoder = Decoder(model)
    decoder.read([[1, 2]])
    decoder.save(tmp_path / "a", note={"tail": "3 99 x -1 4", "tokens": "many"})
    session = TextSession(Decoder(model), LETTERS)
    session.load(tmp_path / "a")
    assert (list(session.text.tail), session.text.n_tokens) == ([3, 4], 2)
    assert torch.equal(session.decoder.scores.full(), decoder.scores.full())
