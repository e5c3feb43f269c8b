"""What a decoder can do with single rows: take one out and put it elsewhere, go back, and score every token."""

import copy
from functools import cache
from typing import Any

import pytest
import torch

from tests.generation.test_session_file import KINDS as ATTENDING
from tests.generation.test_session_file import READ_AGAIN, assert_same_bits
from tests.helpers import tiny_model
from transformer_xl.config.model import LstmConfig
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.session_file import RowState
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.lstm import Lstm

VOCAB = 13
KINDS = {**ATTENDING, "lstm": {}}
WAYS = ("transformer_xl", "zero_first_memory", "al_rfou", "no memory", "lstm")
"""One of each way to read on, and one whose memory begins with zeros."""

TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(200)]


@cache
def model_of(kind: str) -> LanguageModel:
    torch.manual_seed(len(kind))
    if kind == "lstm":
        return Lstm(LstmConfig(vocab_size=VOCAB, n_layer=2, d_model=10))
    return tiny_model(cutoffs=(4, 9), div_val=2) if kind == "adaptive" else tiny_model(**KINDS[kind])


def decoder_of(kind: str = "transformer_xl", **options: Any) -> Decoder:
    return Decoder(model_of(kind), **{"batch_size": 3, "tgt_len": 4, **options})


def feed(decoder: Decoder, row: int, ids: list[int]) -> None:
    """Read in one row, token by token where there is one, else in pieces."""
    decoder.read([ids if other == row else [] for other in range(decoder.batch_size)])


def assert_go_on_alike(one: Decoder, row: int, other: Decoder, other_row: int) -> None:
    for ids in ([], [5], TEXT[50:63], [1], [2, 3]):
        if ids:
            feed(one, row, ids)
            feed(other, other_row, ids)
        assert_same_bits(one.scores.full()[row], other.scores.full()[other_row])


# --- take and put -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "n"), [*((kind, 41) for kind in KINDS), *((kind, n) for kind in WAYS for n in (0, 9))])
def test_a_row_goes_on_where_it_was_put(kind: str, n: int) -> None:
    home, away = decoder_of(kind), decoder_of(kind)
    home.feed([TEXT[:17], TEXT[:n], TEXT[:6]])
    twin = decoder_of(kind)
    for each in (away, twin):
        each.feed([TEXT[row : row + 3 * row + 9] for row in range(3)])  # nothing of row 1 may be left
    state = home.take(1)
    away.put(1, state)
    assert_go_on_alike(away, 1, home, 1)
    away.put(1, state)  # it stayed as it was
    home.put(1, state)
    assert_go_on_alike(away, 1, home, 1)
    for row in (0, 2):  # the other rows do not notice
        assert_go_on_alike(away, row, twin, row)


@pytest.mark.parametrize(("kind", "n_row", "row"), [*((kind, 5, 3) for kind in KINDS), ("transformer_xl", 2, 0)])
def test_it_may_be_another_row_of_a_decoder_of_another_number_of_rows(kind: str, n_row: int, row: int) -> None:
    """Pieces of one row have the same bits; single tokens and scores are products of all rows, and may be rounded otherwise."""
    home, away = decoder_of(kind), decoder_of(kind, batch_size=n_row)
    home.feed([TEXT[:17], TEXT[:23], []])
    away.feed([TEXT[:12]] * n_row)
    away.put(row, home.take(1))
    feed(home, 1, TEXT[50:63])
    feed(away, row, TEXT[50:63])
    for name, x in home.take(1).tensors.items():
        assert torch.equal(away.take(row).tensors[name], x), name
    torch.testing.assert_close(away.scores.full()[row], home.scores.full()[1], atol=1e-5, rtol=1e-5)
    home.step([1, 2, 3])
    away.step([2] * n_row)
    torch.testing.assert_close(away.scores.full()[row], home.scores.full()[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        *((kind, (17, 1, 6)) for kind in WAYS),
        ("transformer_xl", (3, 5, 0)),
        ("transformer_xl", (0, 9, 3)),
        ("transformer_xl", (40, 41, 9)),
    ],
)
def test_rows_go_on_where_others_were_as_if_they_were_taken_and_put(kind: str, lengths: tuple[int, ...]) -> None:
    """Also at once: what a row had read goes to another row although it is overwritten itself."""
    moved, put = decoder_of(kind), decoder_of(kind)
    for decoder in (moved, put):
        decoder.feed([TEXT[row : row + n] for row, n in enumerate(lengths)])
        decoder.step([1, 2, 3], active=[True, False, True])
    states = [put.take(row) for row in range(3)]
    for sources in ([1, 1, 2], [1, 2, 0], [1, 2, 2], [0, 0, 2], [0, 1, 2], [2, 2, 2]):
        moved.reorder(sources)
        states = [states[source] for source in sources]
        for row, state in enumerate(states):
            put.put(row, state)
        for row in range(3):
            for name, x in moved.take(row).tensors.items():
                assert torch.equal(put.take(row).tensors[name].nan_to_num(7), x.nan_to_num(7)), name
        for tokens in ([3, 4, 5], [6, 6, 6]):
            assert_same_bits(moved.step(tokens).full(), put.step(tokens).full())
        states = [put.take(row) for row in range(3)]


def test_a_row_goes_back_as_far_as_the_one_that_it_goes_on_from() -> None:
    decoder = Decoder(tiny_model(shift="averages", d_model=16), batch_size=3, tgt_len=4)
    decoder.feed([TEXT[:3], TEXT[:5], TEXT[:2]])
    decoder.put(1, decoder.take(1))  # nothing is known any more of what lies before
    assert [decoder.n_rewindable(row) for row in range(3)] == [3, 0, 2]
    decoder.reorder([1, 2, 0])
    assert [decoder.n_rewindable(row) for row in range(3)] == [0, 2, 3]


def test_rows_that_are_none_are_refused() -> None:
    decoder = decoder_of()
    decoder.feed([TEXT[:4], TEXT[4:6], TEXT[9:12]])
    before = [decoder.take(row).tensors for row in range(3)]
    state = decoder.take(0)
    for call, message in (
        (lambda: decoder.reorder([0, 1, 3]), r"row \(3\) must be one of 0 … 2"),
        (lambda: decoder.reorder([-1, 1, 2]), r"row \(-1\)"),
        (lambda: decoder.reorder([0, 1]), "one for each"),
        (lambda: decoder.put(3, state), r"row \(3\) must be one of 0 … 2"),
        (lambda: decoder.take(-1), r"row \(-1\) must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for row, tensors in enumerate(before):
        assert all(torch.equal(x, decoder.take(row).tensors[name]) for name, x in tensors.items())


def test_a_state_holds_what_a_later_token_sees_and_no_more() -> None:
    decoder = decoder_of()
    feed(decoder, 1, TEXT[:100])
    state = decoder.take(1)
    assert {x.shape[1] for name, x in state.tensors.items() if name.startswith(("keys", "values"))} == {5}
    numbers = 2 * 5 * 2 * 3 * 4  # layers, positions, keys and values, heads, their width
    assert sum(x.nbytes for x in state.tensors.values()) == 4 * (numbers + 10) + 16
    assert all(x.untyped_storage().nbytes() <= 4 * 1000 for x in state.tensors.values())  # copies, not views of the rings


@pytest.mark.parametrize("kind", ["transformer_xl", "lstm", "al_rfou"])
def test_a_state_is_refused_by_another_model_of_the_same_shape(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = decoder_of(kind)
    feed(home, 0, TEXT[:9])
    state, same, other = home.take(0), copy.deepcopy(model_of(kind)), copy.deepcopy(model_of(kind))
    with torch.no_grad():
        next(other.parameters()).view(-1)[7] += 0.25
    decoder, twin = (Decoder(other, batch_size=3, tgt_len=4) for _ in range(2))
    for each in (decoder, twin):
        feed(each, 1, TEXT[:9])
    with pytest.raises(ValueError, match=r"it was read by another model"):
        decoder.put(1, state)
    assert_go_on_alike(decoder, 1, twin, 1)
    decoder = Decoder(same, batch_size=3, tgt_len=4)
    decoder.put(0, state)
    assert_go_on_alike(decoder, 0, home, 0)
    monkeypatch.setattr("transformer_xl.generation.session_file.encode_tensors", None)
    decoder.put(1, decoder.take(0))  # weights are hashed once


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("transformer_xl", "n_valid", torch.tensor(9), "impossible lengths"),
        ("transformer_xl", "n_valid", torch.tensor(-1), "impossible lengths"),
        ("transformer_xl", "end", torch.tensor(-1), "impossible lengths"),
        ("transformer_xl", "keys.0", torch.zeros(3, 2, 4), "tensor 'keys.0' is"),
        ("transformer_xl", "keys.9", torch.zeros(3, 2, 4), "missing or unknown"),
        ("transformer_xl", "keys.0", torch.zeros(3, 2, 4).bfloat16(), "tensor 'keys.0' is torch.bfloat16"),
        ("transformer_xl", "last", torch.zeros(9), "tensor 'last' should be"),
        ("al_rfou", "open", torch.tensor([1, 99, -1, -1]), "outside the vocabulary"),
        ("al_rfou", "n_valid", torch.tensor(6), "impossible lengths"),
        ("al_rfou", "n_valid", torch.tensor(-1), "impossible lengths"),
        ("lstm", "hidden.0", torch.zeros(1, 3), "tensor 'hidden.0' is"),
    ],
)
def test_a_state_that_lies_changes_nothing(kind: str, name: str, value: torch.Tensor, message: str) -> None:
    decoder, twin = decoder_of(kind), decoder_of(kind)
    for each in (decoder, twin):
        feed(each, 1, TEXT[:9])
    sound = decoder.take(1)
    with pytest.raises(ValueError, match=message):
        decoder.put(1, RowState({**sound.tensors, name: value}, sound.terms, sound.model))
    assert_go_on_alike(decoder, 1, twin, 1)


def test_rows_of_a_session_may_be_fewer_than_those_of_the_decoder(tmp_path: Any) -> None:
    one, many = decoder_of(batch_size=2), decoder_of(batch_size=4)
    one.feed([TEXT[:30], TEXT[:3]])
    one.save(tmp_path / "a.safetensors")
    many.feed([TEXT[:4]] * 4)
    many.load(tmp_path / "a.safetensors")
    assert many.scores.full()[2:].isnan().all()  # they begin anew
    feed(many, 1, TEXT[:9])
    feed(one, 1, TEXT[:9])
    torch.testing.assert_close(many.scores.full()[1], one.scores.full()[1], atol=1e-5, rtol=1e-5)


# --- going back -------------------------------------------------------------------------------------------------------------


def most(decoder: Decoder, row: int) -> int:
    """Return how many tokens a row can go back, as the refusal of more names it."""
    with pytest.raises(ConfigError, match=r"^row \d cannot go back by 100,000 tokens, \d+ are possible; take\(row\)") as caught:
        decoder.rewind(row, 100000)
    return int(str(caught.value).split(" tokens, ")[1].split()[0])


@pytest.mark.parametrize(
    ("kind", "n", "others_step"),
    [
        *((kind, 60, True) for kind in KINDS if kind not in ("lstm", *READ_AGAIN)),
        ("zero_first_memory", 15, True),
        *((kind, n, others_step) for kind in WAYS[:2] for n, others_step in ((9, True), (16, False))),
    ],
)
def test_a_row_that_went_back_never_read_those_tokens(kind: str, n: int, others_step: bool) -> None:
    slots = 16  # 5 + 1 + 4, rounded up; one less where a window is shorter does not matter
    probe = decoder_of(kind)
    feed(probe, 1, TEXT[:n])
    possible = most(probe, 1)
    assert possible == n if n < slots and kind != "zero_first_memory" else possible >= min(n, slots - 5 - 1)
    for back in {1, possible // 2, possible}:
        decoder, twin = decoder_of(kind), decoder_of(kind)
        for each in (decoder, twin):
            if n > back:
                feed(each, 1, TEXT[: n - back])
        if back:
            feed(decoder, 1, TEXT[n - back : n])
        if others_step:
            decoder.step([1, 2, 3], active=[True, False, True])
        decoder.rewind(1, back)
        assert back == 0 or decoder.scores.full()[1].isnan().all()
        feed(decoder, 1, [7, 8, 9])
        feed(twin, 1, [7, 8, 9])
        assert_go_on_alike(decoder, 1, twin, 1)


@pytest.mark.parametrize("kind", ["lstm", "no memory", "al_rfou"])
def test_models_whose_keys_cannot_be_kept_do_not_go_back(kind: str) -> None:
    decoder = decoder_of(kind)
    feed(decoder, 0, TEXT[:3])
    before = decoder.scores.full()
    assert most(decoder, 0) == 0
    decoder.rewind(0, 0)
    assert_same_bits(decoder.scores.full(), before)


def test_one_token_too_many_would_be_wrong() -> None:
    """The limit is the true one: beyond it, numbers differ."""
    put = decoder_of()
    feed(put, 0, TEXT[:40])
    put.put(0, put.take(0))  # nothing is known of what lies before
    feed(put, 0, [1, 2])
    assert most(put, 0) == 2
    with pytest.raises(ConfigError, match="cannot go back by -1 tokens"):
        put.rewind(0, -1)
    decoder, twin = decoder_of(), decoder_of()
    back = 16 - 5 + 1
    for each in (decoder, twin):
        feed(each, 1, TEXT[: 60 - back])
    feed(decoder, 1, TEXT[60 - back : 60])
    assert most(decoder, 1) == 16 - 5 - 1
    decoder._stream.rewind(1, back)
    feed(decoder, 1, [7, 8, 9])
    feed(twin, 1, [7, 8, 9])
    assert not torch.equal(decoder.scores.full()[1], twin.scores.full()[1])


# --- scores of what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "adaptive"])
def test_every_token_is_scored_as_single_steps_would(kind: str) -> None:
    """And read with the same bits as without its score."""
    decoder, read, stepped = decoder_of(kind), decoder_of(kind), decoder_of(kind)
    for ids in ([TEXT[:9], [], [4]], [TEXT[9:30], TEXT[:2], TEXT[40:49]], [[1], [2], [3]]):
        nats = decoder.score(torch.tensor(ids) if len(ids[1]) == 1 else ids)
        read.read(ids)
        assert_same_bits(decoder.scores.full(), read.scores.full())
        assert [len(own) for own in nats] == [len(own) for own in ids]
        for row, own in enumerate(ids):
            expected = []
            for token in own:
                scores = stepped.scores
                expected.append(-scores.log_probability([0] * row + [token] + [0] * (2 - row))[row])
                feed(stepped, row, [token])
            if own:
                torch.testing.assert_close(nats[row], torch.stack(expected), atol=1e-5, rtol=1e-5, equal_nan=True)
    assert decoder_of(kind).score([[3], [], []])[0].isnan().all()  # nothing predicts the first token of a text


def test_what_cannot_be_scored_is_refused_before_anything_is_read() -> None:
    decoder = decoder_of()
    with pytest.raises(TokenizerError, match="token id 13 is outside"):
        decoder.score([[1, 2], [13], []])
    with pytest.raises(ValueError, match="must be a list of token ids"):
        decoder.score([[1, 2]])
    assert decoder.scores.full().isnan().all()
