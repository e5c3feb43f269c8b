"""`Decoder`: every token sees exactly its predecessors of the memory, whatever way a text is fed, and rows are on their own."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import assert_close, examples, tiny_model
from tests.inference.test_reader import graphs_only  # noqa: F401
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation import fastest
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.session_file import RowState
from transformer_xl.inference.ways import compiled_functions
from transformer_xl.model.transformer_xl import TransformerXL

IDS = torch.randint(0, 13, (1, 40), generator=torch.Generator().manual_seed(3))
KEPT: dict[str, dict[str, Any]] = {
    "paper": {},
    "same_length": {"same_length": True},
    "same_length besides self": {"same_length": True, "same_length_besides_self": True, "clamp_len": 3},
    "pre_lnorm": {"pre_lnorm": True, "d_embed": 6, "final_norm": True},
    "untied": {"untie_r": True, "clamp_len": 9, "activation": "gelu"},
    "long memory": {"mem_len": 50},
    "one position": {"mem_len": 1},
    "zero_first_memory": {"zero_first_memory": True},
    "shaw": {"attention": "shaw", "max_klen": 4},
    "shaw, zeros": {"attention": "shaw", "max_klen": 9, "same_length": True, "zero_first_memory": True},
    "rotary": {"attention": "rotary"},
    "rotary, zeros": {"attention": "rotary", "zero_first_memory": True, "pre_lnorm": True},
    "alibi": {"attention": "alibi", "clamp_len": 3},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2},
}
AGAIN: dict[str, dict[str, Any]] = {
    "vaswani": {"attention": "vaswani"},
    "al_rfou": {"attention": "al_rfou", "max_klen": 11, "n_head": 2, "d_head": 5},
    "al_rfou, no memory": {"attention": "al_rfou", "max_klen": 6, "n_head": 2, "d_head": 5, "mem_len": 0},
    "no memory": {"mem_len": 0},
}


@cache
def model_of(name: str) -> TransformerXL:
    torch.manual_seed(0)
    return tiny_model(**{**KEPT, **AGAIN}[name])


@cache
def one_by_one(name: str, mem_len: int | None = None) -> Tensor:
    """Scores (40, V) of the model reading IDS token by token, with hidden states for a memory."""
    model, mems, rows = model_of(name).with_context(mem_len=mem_len), None, []
    with torch.no_grad():
        for token in IDS.split(1, dim=1):
            out = model(token, mems=mems)
            mems = out.mems
            assert out.logits is not None
            rows.append(out.logits[0, 0])
    return torch.stack(rows)


def cut(ids: Sequence[int], at: list[int]) -> list[list[int]]:
    """Pieces of a text, empty ones too, where a border comes twice."""
    return [list(ids[first:last]) for first, last in itertools.pairwise([0, *sorted(at), len(ids)])]


def rows_of(decoder: Decoder) -> list[RowState]:
    return [decoder.take(row) for row in range(decoder.batch_size)]


def state(decoder: Decoder) -> list[Tensor]:
    """Everything that a decoder knows, copied."""
    kept = [decoder.kept.memory.state_dict()] if decoder.kept else [row.tensors for row in rows_of(decoder)]
    return [*(x.clone() for tensors in kept for x in tensors.values()), decoder.scores.full()]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(one, other, strict=True))


# what a token sees


@pytest.mark.parametrize("name", KEPT)
def test_single_tokens_see_what_the_model_sees(name: str) -> None:
    decoder = Decoder(model_of(name), tgt_len=6)
    for at, token in enumerate(IDS.split(1, dim=1)):
        assert_close(f"token {at}", decoder.feed(token), one_by_one(name)[at : at + 1], 1e-5)
        assert torch.equal(decoder.scores.full(), decoder.scores.full())


@settings(max_examples=examples(60))
@given(name=st.sampled_from(sorted(KEPT)), tgt_len=st.integers(1, 45), at=st.lists(st.integers(0, 40), max_size=9))
def test_no_cut_makes_a_difference(name: str, tgt_len: int, at: list[int]) -> None:
    """Fed as tensors and as lists, the text cut anywhere, read in pieces of any length."""
    tensors, lists, n_read = Decoder(model_of(name), tgt_len=tgt_len), Decoder(model_of(name), tgt_len=tgt_len), 0
    for piece in cut(IDS[0].tolist(), at):
        if piece:
            n_read += len(piece)
            expected = one_by_one(name)[n_read - 1 : n_read]
            assert_close("tensor", tensors.feed(torch.tensor([piece])), expected, 1e-5)
            assert_close("list", lists.feed([piece]), expected, 1e-5)
            assert_close("scores", lists.scores.full(), expected, 1e-5)


@pytest.mark.parametrize(("options", "n_seen"), [({}, 5), ({"same_length": True}, 4), ({"mem_len": 1}, 1)])
@pytest.mark.parametrize("size", [1, 4, 15])
def test_memory_ends_exactly_where_it_should(options: dict[str, Any], n_seen: int, size: int) -> None:
    """With one layer, what lies farther back than the memory does not change a bit, and the farthest token in it does."""
    model, last = tiny_model(n_layer=1, **options), 30
    texts = IDS.repeat(3, 1)
    texts[1, last - n_seen] = (texts[1, last - n_seen] + 1) % 13
    texts[2, : last - n_seen] = (texts[2, : last - n_seen] + 1) % 13
    scores = []
    for text in texts:
        decoder = Decoder(model, tgt_len=7)
        for piece in text[: last + 1].split(size):
            decoder.feed(piece.unsqueeze(0))
        scores.append(decoder.scores.full())
    assert (scores[1] - scores[0]).abs().max() > 1e-4
    assert torch.equal(scores[2], scores[0])


@pytest.mark.parametrize(
    ("name", "mem_len"),
    [*(("paper", n) for n in (1, 3, 11)), *((name, 3) for name in ("same_length", "shaw", "rotary", "zero_first_memory"))],
)
def test_another_memory_than_in_training(name: str, mem_len: int) -> None:
    decoder = Decoder(model_of(name), mem_len=mem_len, tgt_len=9)
    assert decoder.mem_len == mem_len and model_of(name).mem_len == 5
    for piece, last in zip(IDS.split(8, dim=1), range(7, 40, 8), strict=True):
        assert_close("scores", decoder.feed(piece), one_by_one(name, mem_len)[last : last + 1], 1e-5)


# rows


@pytest.mark.parametrize("name", ["paper", "adaptive", "no memory", "vaswani"])
def test_rows_of_different_age_read_a_tensor_as_they_read_lists(name: str) -> None:
    decoder, other = (Decoder(model_of(name), batch_size=2, tgt_len=6) for _ in range(2))
    rows = torch.randint(0, 13, (2, 9))
    for each in (decoder, other):
        each.feed([[1, 2, 3], []])
    assert torch.equal(decoder.feed(rows), other.feed(rows.tolist()))
    assert same(state(decoder), state(other))


def test_scores_stay_what_they_were() -> None:
    """Tails that are computed only when more has been read are those of the time when the scores were made."""
    decoder = Decoder(model_of("adaptive"), batch_size=2, tgt_len=4)
    twin = Decoder(model_of("adaptive"), batch_size=2, tgt_len=4)
    pieces: list[Any] = [torch.tensor([[1, 2, 3], [4, 5, 6]]), [[7], []], [[], [8, 9]], torch.tensor([[1], [2]])]
    kept = [decoder.read(piece) for piece in pieces]
    decoder.reset()
    decoder.feed(torch.tensor([[3], [4]]))
    for scores, piece in zip(kept, pieces, strict=True):
        assert torch.equal(scores.full(), twin.feed(piece))


@pytest.mark.parametrize("name", ["paper", "adaptive", "vaswani"])
def test_of_a_long_piece_the_last_position_alone_is_kept_for_its_scores(name: str, tmp_path: Path) -> None:
    """As numbers of their own, so that a decoder that loads them computes the very same."""
    decoder, other = (Decoder(model_of(name), batch_size=3, tgt_len=30) for _ in range(2))
    for length in range(2, 30, 3):
        scores = decoder.feed(torch.randint(0, 13, (3, length)))
        assert decoder._hidden.untyped_storage().nbytes() == 3 * 10 * 4
        decoder.save(tmp_path / "session")
        other.load(tmp_path / "session")
        assert torch.equal(other.scores.full(), scores)


# reset


# what is refused


OUTSIDE = (13, -1, 2**40)
IN_LISTS: list[Any] = [
    *([[1, 2, 3, 4, wrong], []] for wrong in OUTSIDE),
    *([[1], [2, wrong, 3]] for wrong in OUTSIDE),
    *([[], [wrong]] for wrong in OUTSIDE),
    *(torch.tensor([[1, 2, 3, 4], [1, 2, 3, wrong]]) for wrong in OUTSIDE),
    *(torch.tensor([[wrong], [1]]) for wrong in OUTSIDE),
]
NO_IDS: list[Any] = [
    torch.tensor([[1.0], [2.0]]),  # would be rounded
    torch.tensor([[True], [False]]),
    *([[1.0], [2]], [["a"], ["b"]], "ab", [[[1]], [[2]]], [1, 2], [[1], None], [[2**70], [1]], [[], []], [[1], [2], [3]]),
    *(torch.zeros(shape, dtype=torch.int64) for shape in ((2, 0), (3, 1), (2, 1, 1))),
]
NO_MASK: list[Any] = [[True], [True, False, True], [[True, False]], [0, 1], [1.0, 0.0]]  # indices, above all
NO_MASK += [*map(torch.tensor, NO_MASK), ["a", "b"], "ab", True, [True, None]]
OUTSIDE_ROW: list[Any] = [[1, wrong] for wrong in OUTSIDE]
NO_ROW: list[Any] = [[1.0, 2.0], torch.tensor([1.0, 2.0]), "ab", [[1], [2]], [1, 2, 3]]


@pytest.mark.parametrize(
    ("call", "values", "error", "match"),
    [
        (Decoder.read, IN_LISTS, TokenizerError, r"^token id \S+ is outside the vocabulary \(13\)"),
        (
            Decoder.feed,
            [[each, [1]] for each in OUTSIDE_ROW],
            TokenizerError,
            r"^token id \S+ is outside the vocabulary \(13\)",
        ),
        (lambda decoder, ids: decoder.advance(0, ids), OUTSIDE_ROW, TokenizerError, r"^token id \S+ is outside the vocabulary"),
        (Decoder.step, OUTSIDE_ROW, TokenizerError, r"^token id \S+ is outside the vocabulary \(13\)"),
        (Decoder.read, NO_IDS, ValueError, r"^ids( of row \d)?, .*, must (be|have shape) "),
        (Decoder.step, NO_ROW, ValueError, r"^ids, .*, must be (integers|2, one for each row)"),
        (Decoder.reset, NO_MASK, ValueError, r"^rows, .*, must be bool of shape \(2,\)"),
        (lambda decoder, mask: decoder.step([1, 2], active=mask), NO_MASK, ValueError, r"^active, .*, must be bool of shape"),
    ],
    ids=[
        "ids",
        "ids to score",
        "ids to advance by",
        "ids of a step",
        "no ids",
        "no ids of a step",
        "no rows",
        "no active rows",
    ],
)
def test_what_cannot_be_read_is_refused_and_nothing_done(
    call: Callable[[Decoder, Any], Any], values: list[Any], error: type[Exception], match: str
) -> None:
    for name in ("paper", "no memory"):
        decoder = Decoder(model_of(name), batch_size=2, tgt_len=3)
        decoder.feed([[1, 2, 3, 4], [5]])
        before = state(decoder)
        for value in values:
            with pytest.raises(error, match=match):
                call(decoder, value)
            assert same(state(decoder), before), value


@pytest.mark.parametrize("name", ["paper", "vaswani"])
def test_lists_and_arrays_may_stand_for_tensors(name: str) -> None:
    decoder, other = (Decoder(model_of(name), batch_size=2) for _ in range(2))
    fixed = np.array([[3, 4, 5], [6, 7, 8]], dtype=np.uint16)
    fixed.flags.writeable = False  # as of a file
    pairs: list[tuple[Any, Any]] = [
        (lambda: decoder.feed([(1, 2), range(3)]), lambda: other.feed([[1, 2], [0, 1, 2]])),
        (lambda: decoder.feed(fixed), lambda: other.feed([[3, 4, 5], [6, 7, 8]])),
        (lambda: decoder.feed([fixed[0][::-1], torch.tensor([1])]), lambda: other.feed([[5, 4, 3], [1]])),
        (lambda: decoder.feed(torch.ones(2, 3, dtype=torch.uint8)), lambda: other.feed(torch.ones(2, 3, dtype=torch.int64))),
        (lambda: decoder.step([1, 2]).full(), lambda: other.step(torch.tensor([1, 2])).full()),
        (lambda: decoder.step(fixed[:, 0]).full(), lambda: other.step(torch.tensor([3, 6])).full()),
        (
            lambda: decoder.step((1, 2), active=[False, True]).full(),
            lambda: other.step(torch.tensor([1, 2]), active=torch.tensor([False, True])).full(),
        ),
    ]
    for given_one, tensors in pairs:
        assert torch.equal(given_one(), tensors())
    decoder.reset([True, False])
    other.reset(torch.tensor([True, False]))
    assert same(state(decoder), state(other))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({"batch_size": size}, rf"batch_size \({size}\) must be at least 1 .*a whole number") for size in (0, 1.5, True)),
        ({"tgt_len": 0}, r"tgt_len \(0\)"),
        *(({"mem_len": size}, rf"mem_len \({size}\) must be at least 0 .*a whole number") for size in (-1, 2.5)),
        ({"compile": "off"}, r"compile \('off'\) must be True, False or 'auto'"),
        ({"mem_len": 0, "precision": "int8"}, r"precision \(int8\) needs keys that stay the same, .* mem_len \(0\)"),
        ({"mem_len": 0, "compile": True}, r"compile \(True\) needs keys that stay the same, .* mem_len \(0\)"),
    ],
)
def test_decoders_that_cannot_be_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Decoder(tiny_model(), **options)


# models that read again


@pytest.mark.parametrize("size", [1, 4, 13])
@pytest.mark.parametrize("name", AGAIN)
def test_where_positions_count_from_the_end_segments_are_read_as_in_training(name: str, size: int) -> None:
    """Whole segments go to memory; the tokens of the open one are read again together, without a memory the last ones."""
    model, T, tokens = model_of(name), 6, IDS[:, :20]
    decoder, lists, n_read = Decoder(model, tgt_len=T), Decoder(model, tgt_len=T), 0
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
        assert torch.equal(lists.feed(piece.tolist()), actual)


def test_a_table_of_positions_tells_how_long_segments_were() -> None:
    assert Decoder(model_of("al_rfou")).tgt_len == 6
    assert Decoder(model_of("paper")).tgt_len == Decoder(model_of("vaswani")).tgt_len == 64


# surroundings


@pytest.mark.parametrize("name", ["paper", "vaswani", "no memory"])
def test_decoding_leaves_gradients_and_random_state_alone(name: str) -> None:
    model = tiny_model(dropout=0.5, dropatt=0.5, **{**KEPT, **AGAIN}[name]).train()
    random_state = torch.get_rng_state()
    logits = Decoder(model).feed(IDS)
    assert not logits.requires_grad and all(p.grad is None and p.requires_grad for p in model.parameters())
    decoder = Decoder(model)
    assert torch.equal(logits, decoder.feed(IDS))
    assert not decoder.step(IDS[:, 0]).full().requires_grad
    assert not any(x.requires_grad for x in state(decoder))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not model.training


def test_decoders_of_one_model_do_not_see_each_other() -> None:
    model = model_of("paper")
    one, other = Decoder(model), Decoder(model, mem_len=9)
    for at in range(40):
        other.feed([[3]])
        assert_close("scores", one.feed(IDS[:, at : at + 1]), one_by_one("paper")[at : at + 1], 1e-5)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_narrow_scores_come_as_fp32_and_are_near(precision: Any) -> None:
    decoder, full = Decoder(tiny_model(), precision=precision), one_by_one("paper")
    scores = decoder.feed(IDS)
    assert scores.dtype == torch.float32 and decoder.precision == precision
    assert 0 < (scores[0].log_softmax(-1) - full[-1].log_softmax(-1)).abs().max() < 0.1
    assert Decoder(model_of("no memory"), precision="bf16").feed(IDS).dtype == torch.float32


def test_fp64_models_are_read_in_fp64() -> None:
    decoder = Decoder(tiny_model().double())
    scores = decoder.feed(IDS)
    assert scores.dtype == torch.float32
    assert decoder.kept is not None
    assert {x.dtype for x in (*decoder.kept.memory.keys, *decoder.kept.memory.values)} == {torch.float64}


@pytest.mark.usefixtures("graphs_only")
def test_compiling_changes_nothing_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler runs when a decoder is made, on nothing."""
    monkeypatch.setattr(fastest, "cannot_compile", lambda device: None)
    compiled, plain = Decoder(model_of("adaptive"), batch_size=2, compile=True), Decoder(model_of("adaptive"), batch_size=2)
    assert compiled.compiled and not plain.compiled
    assert compiled.scores.full().isnan().all()
    calls: list[Any] = [[[1], []], [[2, 3], [4]], torch.tensor([[5], [6]]), torch.tensor([[5, 6], [7, 8]])]
    for ids in calls * 10:
        actual, expected = compiled.feed(ids), plain.feed(ids)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert_close("compiled", actual.nan_to_num(0.0), expected.nan_to_num(0.0), 1e-5)


def test_a_compiler_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any, inputs: Any, **options: Any) -> None:
        raise RuntimeError("no space left")

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, **options, backend=fail))
    monkeypatch.setattr(fastest, "cannot_compile", lambda device: None)
    compiled_functions.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"the compiler failed \(RuntimeError: no space left\); use"):
            Decoder(model_of("paper"), compile=True)
        decoder = Decoder(model_of("paper"), compile="auto", expected_tokens=10**9)
        assert not decoder.compiled and "the compiler failed" in decoder.reason
        assert_close("scores", decoder.feed(IDS), one_by_one("paper")[-1:], 1e-5)
    finally:
        compiled_functions.cache_clear()


@pytest.mark.parametrize("name", ["paper", "zero_first_memory", "vaswani"])
def test_trials_of_what_is_fastest_read_nothing(name: str) -> None:
    decoder = Decoder(model_of(name), batch_size=2, precision="auto", expected_tokens=1)
    assert decoder.precision in ("fp32", "bf16") and decoder.reason and not decoder.compiled
    assert decoder.scores.full().isnan().all()
    other = Decoder(model_of(name), batch_size=2, precision=decoder.precision)
    assert torch.equal(decoder.feed([[1, 2, 3], [4]]), other.feed([[1, 2, 3], [4]]))
    assert torch.equal(decoder.feed([[5], []]), other.feed([[5], []]))


# what a reader of the code found


@pytest.mark.parametrize("length", [2, 3, 9])
def test_the_last_state_lies_as_that_of_a_step(length: int) -> None:
    """Compiled code is compiled again for other strides."""
    decoder = Decoder(tiny_model())
    decoder.feed(torch.zeros(1, length, dtype=torch.int64))
    assert decoder._hidden.stride() == (decoder.model.config.d_model, 1)


@pytest.mark.parametrize("options", [{}, {"attention": "vaswani"}])
def test_models_in_bf16_keep_wide_states(tmp_path: Path, options: dict[str, Any]) -> None:
    model = tiny_model(**options).to(torch.bfloat16)
    decoder, other = Decoder(model), Decoder(model)
    as_list, as_tensor = decoder.feed([[1, 2, 3]]), other.feed(torch.tensor([[1, 2, 3]]))
    assert torch.equal(as_list, as_tensor) and as_list.dtype == torch.float32
    decoder.save(tmp_path / "session")
    other.reset()
    other.load(tmp_path / "session")
    assert torch.equal(decoder.feed([[4]]), other.feed([[4]]))


def test_memory_can_be_taken_from_a_model_with_a_window() -> None:
    assert Decoder(tiny_model(same_length=True), mem_len=0).feed([[1, 2, 3]]).shape == (1, 13)
