"""`Decoder` and `generate`: whatever way a text is fed, the scores are those of reading it at once."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import assert_close, tiny_model
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.evaluation import evaluate
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.generate import generate

IDS = torch.randint(0, 13, (1, 40), generator=torch.Generator().manual_seed(3))


def scores(decoder: Decoder, pieces: Iterator[Tensor] | list[Tensor]) -> list[Tensor]:
    return [decoder.feed(piece) for piece in pieces]


@pytest.mark.parametrize("options", [{}, {"same_length": True}, {"clamp_len": 3}, {"pre_lnorm": True, "d_embed": 6}])
def test_single_steps_are_the_text_read_at_once(options: dict[str, Any]) -> None:
    model = tiny_model(mem_len=50, **options)
    singles = torch.cat(scores(Decoder(model), list(IDS.split(1, dim=1))))
    with torch.no_grad():
        expected = model(IDS).logits
    assert expected is not None
    assert_close("single steps", singles, expected[0], 1e-4)


@pytest.mark.parametrize("size", [2, 3, 7, 40])
def test_pieces_of_any_size_end_alike(size: int) -> None:
    """With equal contexts: same_length."""
    model = tiny_model(same_length=True, mem_len=4)
    last = scores(Decoder(model), list(IDS.split(1, dim=1)))[-1]
    assert_close("pieces", scores(Decoder(model), list(IDS.split(size, dim=1)))[-1], last, 1e-4)
    assert_close("tgt_len", Decoder(model, tgt_len=size).feed(IDS), last, 1e-4)


def test_what_is_written_scores_as_it_was_drawn() -> None:
    """The nats of the tokens that `generate` chooses are those that `evaluate` finds in the finished text."""
    model = tiny_model(same_length=True, mem_len=6)
    prompt = IDS[0, :11].tolist()
    written = list(generate(model, prompt, max_new_tokens=20, seed=5))
    text = np.array(prompt + written)
    found = evaluate(model, text, tgt_len=9, per_token=True).token_nats
    decoder, nats = Decoder(model), []
    piece = torch.tensor([prompt])
    for token in written:
        nats.append(-decoder.feed(piece)[0].log_softmax(-1)[token].item())
        piece = torch.tensor([[token]])
    assert found is not None
    np.testing.assert_allclose(found[len(prompt) - 1 :], nats, atol=1e-4)


def test_rows_do_not_see_each_other() -> None:
    model = tiny_model()
    rows = torch.randint(0, 13, (3, 12))
    together = Decoder(model, batch_size=3)
    other = Decoder(model, batch_size=3)
    for begin in (0, 5, 9):
        piece = rows[:, begin : begin + 4]
        changed = torch.cat([(piece[:1] + 1) % 13, piece[1:]])
        assert torch.equal(together.feed(piece)[1:], other.feed(changed)[1:])
    alone = Decoder(model)
    alone.feed(rows[1:2, 0:4])
    alone.feed(rows[1:2, 5:9])
    assert_close("alone", alone.feed(rows[1:2, 9:13]), together_last(model, rows)[1:2], 1e-4)


def together_last(model: Any, rows: Tensor) -> Tensor:
    decoder = Decoder(model, batch_size=3)
    return scores(decoder, [rows[:, 0:4], rows[:, 5:9], rows[:, 9:13]])[-1]


def test_reset_rows_begin_anew_and_others_go_on() -> None:
    model = tiny_model()
    rows = torch.randint(0, 13, (2, 9))
    decoder, untouched, fresh = (Decoder(model, batch_size=2) for _ in range(3))
    for each in (decoder, untouched):
        each.feed(rows[:, :5])
    decoder.reset(torch.tensor([True, False]))
    after = decoder.feed(rows[:, 5:])
    assert_close("reset row", after[:1], fresh.feed(rows[:, 5:])[:1], 1e-5)
    assert torch.equal(after[1:], untouched.feed(rows[:, 5:])[1:])
    decoder.reset()
    assert_close("all reset", decoder.feed(rows[:, 5:]), Decoder(model, batch_size=2).feed(rows[:, 5:]), 1e-5)
    assert decoder.mems.n_valid.tolist() == [4, 4]


KINDS: list[dict[str, Any]] = [
    {"attention": "vaswani"},
    {"attention": "al_rfou", "max_klen": 11, "n_head": 2, "d_head": 5},
    {"attention": "al_rfou", "max_klen": 6, "n_head": 2, "d_head": 5, "mem_len": 0},
    {"mem_len": 0},
]


@pytest.mark.parametrize("size", [1, 4, 13])
@pytest.mark.parametrize("options", KINDS)
def test_where_positions_count_from_the_end_segments_are_read_as_in_training(options: dict[str, Any], size: int) -> None:
    """Whole segments go to memory; the tokens of the open one are read again together, without a memory the last ones."""
    model, T, tokens = tiny_model(**options), 6, torch.randint(0, 13, (1, 20))
    decoder, n_read = Decoder(model, tgt_len=T), 0
    for piece in tokens.split(size, dim=1):
        actual = decoder.feed(piece)
        n_read += piece.shape[1]
        first = (n_read - 1) // T * T if model.mem_len else max(n_read - T, 0)
        with torch.no_grad():
            mems = model.init_mems(1)
            for at in range(0, first if model.mem_len else 0, T):
                mems = model(tokens[:, at : at + T], mems=mems).mems
            expected = model(tokens[:, first:n_read], mems=mems).logits
        assert expected is not None
        assert_close(f"after {n_read} tokens", actual, expected[:, -1], 1e-5)


@pytest.mark.parametrize("options", [*KINDS, {"zero_first_memory": True}])
def test_reset_rows_of_every_kind_begin_anew(options: dict[str, Any]) -> None:
    model, rows = tiny_model(**options), torch.randint(0, 13, (2, 9))
    decoder, untouched, fresh = (Decoder(model, batch_size=2, tgt_len=20) for _ in range(3))
    for each in (decoder, untouched):
        each.feed(rows[:, :5])
    decoder.reset(torch.tensor([True, False]))
    after = decoder.feed(rows[:, 5:])
    assert_close("reset row", after[:1], fresh.feed(rows[:, 5:])[:1], 1e-5)
    assert_close("other row", after[1:], untouched.feed(rows[:, 5:])[1:], 1e-5)


def test_a_reset_row_without_memory_sees_all_of_the_last_tokens_again() -> None:
    model, rows = tiny_model(mem_len=0), torch.randint(0, 13, (2, 14))
    decoder = Decoder(model, batch_size=2, tgt_len=6)
    decoder.feed(rows[:, :5])
    decoder.reset(torch.tensor([True, False]))
    for at in range(5, 14):
        after = decoder.feed(rows[:, at : at + 1])
    with torch.no_grad():
        expected = model(rows[:, 8:]).logits
    assert expected is not None
    assert_close("both rows", after, expected[:, -1], 1e-5)


def test_a_table_of_positions_tells_how_long_segments_were() -> None:
    assert Decoder(tiny_model(**KINDS[1])).tgt_len == 6
    assert Decoder(tiny_model()).tgt_len == Decoder(tiny_model(**KINDS[0])).tgt_len == 128


def test_memory_keeps_its_size() -> None:
    decoder = Decoder(tiny_model(), mem_len=3)
    for _ in range(5):
        decoder.feed(torch.zeros(1, 2, dtype=torch.int64))
        assert decoder.mems.length == 3
    assert Decoder(tiny_model(), mem_len=0).feed(IDS).shape == (1, 13)


def test_decoding_leaves_gradients_and_random_state_alone() -> None:
    model = tiny_model(dropout=0.5).train()
    random_state = torch.get_rng_state()
    logits = Decoder(model).feed(IDS)
    assert not logits.requires_grad
    assert torch.equal(logits, Decoder(model).feed(IDS))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_bf16_scores_come_as_fp32() -> None:
    assert Decoder(tiny_model(), precision="bf16").feed(IDS).dtype == torch.float32


def test_an_empty_piece_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ids \(1, 0\) must have shape .* with tgt_len of at least 1"):
        Decoder(tiny_model()).feed(torch.zeros(1, 0, dtype=torch.int64))


# generate


def write(**options: Any) -> list[int]:
    return list(generate(tiny_model(), [1, 2, 3], **{"max_new_tokens": 30, **options}))


def test_a_seed_gives_the_same_text_twice() -> None:
    torch.manual_seed(0)
    model = tiny_model()
    texts = [list(generate(model, [1, 2], max_new_tokens=30, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    unseeded = [tuple(generate(model, [1, 2], max_new_tokens=30)) for _ in range(3)]
    assert len(set(unseeded)) > 1


def test_temperature_0_takes_the_likeliest() -> None:
    model = tiny_model()
    written = list(generate(model, torch.tensor([4, 5]), max_new_tokens=6, temperature=0))
    decoder, piece = Decoder(model), torch.tensor([[4, 5]])
    for token in written:
        assert token == int(decoder.feed(piece).argmax())
        piece = torch.tensor([[token]])
    assert written == list(generate(model, [4, 5], max_new_tokens=6, temperature=0, seed=9))


def test_tokens_come_as_they_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    feed = Decoder.feed
    monkeypatch.setattr(Decoder, "feed", lambda self, ids: (fed.append(ids.shape[1]), feed(self, ids))[1])
    stream = generate(tiny_model(), [1] * 300, max_new_tokens=3)
    assert fed == []
    next(stream)
    assert fed == [300]
    assert len(list(stream)) == 2
    assert fed == [300, 1, 1]  # the last token is not read: nothing comes after it


def test_nothing_to_write() -> None:
    assert write(max_new_tokens=0) == []


@pytest.mark.parametrize(
    ("prompt", "options", "error", "match"),
    [
        ([], {}, TokenizerError, "the prompt is empty; give at least one token"),
        ([1, 13], {}, TokenizerError, r"token id 13 is outside the vocabulary \(13\); is this the model's tokenizer"),
        ([1, -1], {}, TokenizerError, "token id -1 is outside the vocabulary"),
        ([1], {"max_new_tokens": -1}, ConfigError, r"max_new_tokens \(-1\) must be at least 0"),
        ([1], {"temperature": -0.1}, ConfigError, r"temperature \(-0.1\) must be at least 0"),
        ([1], {"temperature": float("nan")}, ConfigError, r"temperature \(nan\)"),
        ([1], {"temperature": float("inf")}, ConfigError, r"temperature \(inf\)"),
        ([1], {"top_k": 0}, ConfigError, r"top_k \(0\) must be at least 1"),
        ([1], {"top_p": 0.0}, ConfigError, r"top_p \(0.0\) must be above 0"),
        ([1], {"top_p": 1.1}, ConfigError, r"top_p \(1.1\) must be above 0 and at most 1"),
        ([1], {"mem_len": -1}, ConfigError, r"mem_len \(-1\) must be at least 0"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(
    prompt: list[int], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        generate(tiny_model(), prompt, **options)
