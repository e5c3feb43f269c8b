"""`evaluate` against a loop that feeds one token at a time; every token counts once, however the text is divided."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import AtOnce, examples, random_weights, tiny_model
from transformer_xl.config.model import LstmConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError
from transformer_xl.generation.choice import probabilities
from transformer_xl.generation.sampling import Sampling
from transformer_xl.kernels.graphs import Graphs
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.call import Execution
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading import stream as stream_module
from transformer_xl.reading.cache import Cache
from transformer_xl.reading.dynamic import Dynamic
from transformer_xl.reading.evaluation import TEMPERATURES, Score, best_temperature, evaluate, write_token_nats
from transformer_xl.reading.reading import Reading
from transformer_xl.tokenizers.kinds import ByteTokenizer


def some_ids(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 13, n).astype(np.uint16)


@torch.no_grad()
def one_by_one(model: TransformerXL, ids: np.ndarray) -> np.ndarray:
    """Nats of ids[1:], each read alone after a memory of `mem_len` hidden states of single steps."""
    mems, nats = model.init_mems(1), []
    for token, following in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
        out = model(torch.tensor([[token]]), mems=mems)
        assert out.logits is not None
        mems = out.mems
        nats.append(-out.logits[0, 0].log_softmax(-1)[following].item())
    return np.array(nats)


def test_one_token_at_a_time_is_the_naive_loop() -> None:
    model, ids = tiny_model(), some_ids(40)
    score = evaluate(model, ids, tgt_len=1, per_token=True)
    expected = one_by_one(model, ids)
    assert score.token_nats is not None
    np.testing.assert_allclose(score.token_nats, expected, atol=1e-4)
    assert score.nats == pytest.approx(expected.sum(), abs=1e-3)
    assert score.token_nats.dtype == np.float32


@settings(max_examples=examples(40))
@given(n=st.integers(2, 60), tgt_len=st.integers(1, 20), batch_size=st.integers(1, 12), mem_len=st.integers(1, 4))
def test_with_equal_contexts_no_division_matters(n: int, tgt_len: int, batch_size: int, mem_len: int) -> None:
    """`same_length` gives every token the last mem_len tokens per layer, so only exact warm-up of lanes gives equal nats."""
    torch.manual_seed(0)
    model = tiny_model(same_length=True, mem_len=mem_len)
    ids = some_ids(n)
    calls: list[int] = []
    score = evaluate(model, ids, tgt_len=tgt_len, batch_size=batch_size, per_token=True, on_tokens=calls.append)
    assert score.token_nats is not None
    np.testing.assert_allclose(score.token_nats, one_by_one(model, ids), atol=1e-4)
    assert score.tokens == sum(calls) == n - 1
    assert score.nats == pytest.approx(float(score.token_nats.sum(dtype=np.float64)), abs=1e-4)


@torch.no_grad()
def with_extended_context(model: TransformerXL, ids: np.ndarray, tgt_len: int, ext_len: int) -> list[float]:
    """Nats of ids[1:] where every segment begins with the last ext_len tokens again, and memory ends before these."""
    everything = torch.from_numpy(ids.astype(np.int64))[None]
    longer = model.with_context(mem_len=model.mem_len + ext_len)
    mems, nats = longer.init_mems(1, length=0), []
    for at in range(0, len(ids) - 1, tgt_len):
        begin, end = max(at - ext_len, 0), min(at + tgt_len, len(ids) - 1)
        out = longer(everything[:, begin:end], mems=mems)
        scores = out.logits[0, at - begin :].log_softmax(-1)
        nats += (-scores[torch.arange(end - at), everything[0, at + 1 : end + 1]]).tolist()
        length = max(out.mems.length - ext_len, 0)
        hidden = tuple(h[:, max(length - model.mem_len, 0) : length] for h in out.mems.hidden)
        mems = Mems(hidden, torch.tensor([hidden[0].shape[1]]))
    return nats


@settings(max_examples=examples(40))
@given(
    n=st.integers(2, 60),
    tgt_len=st.integers(1, 9),
    ext_len=st.integers(0, 7),
    batch_size=st.integers(1, 9),
    kind=st.sampled_from([{}, {"mem_len": 0}, {"attention": "al_rfou", "max_klen": 12, "n_head": 2, "d_head": 5}]),
)
def test_extended_context_is_read_again_and_remembered_late(
    n: int, tgt_len: int, ext_len: int, batch_size: int, kind: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, ids = tiny_model(**{"mem_len": 3, **kind}), some_ids(n)
    score = evaluate(model, ids, tgt_len=tgt_len, ext_len=ext_len, batch_size=batch_size, per_token=True)
    assert score.token_nats is not None
    np.testing.assert_allclose(score.token_nats, with_extended_context(model, ids, tgt_len, ext_len), atol=1e-4)


@pytest.mark.parametrize("kind", [{}, {"attention": "al_rfou", "max_klen": 12, "n_head": 2, "d_head": 5}])
def test_a_model_in_training_is_read_without_dropout_and_left_as_it_was(kind: dict[str, Any]) -> None:
    model, ids = tiny_model(dropout=0.5, **kind), some_ids(30)
    how: dict[str, Any] = {"tgt_len": 5, "mem_len": 2, "ext_len": 2, "clamp_len": 3}
    random_state = torch.get_rng_state()
    expected = evaluate(model, ids, **how).nats
    assert not model.training and evaluate(model.train(), ids, **how).nats == expected

    def fail(n: int) -> None:
        raise RuntimeError("display gone")

    with pytest.raises(RuntimeError, match="display gone"):
        evaluate(model, ids, on_tokens=fail)
    assert all(module.training for module in model.modules())
    assert (model.mem_len, model.ext_len, model.clamp_len) == (5, 0, None)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_bf16_is_close() -> None:
    model, ids = tiny_model(d_embed=6), some_ids(80)
    fp32 = evaluate(model, ids, tgt_len=8).loss
    assert evaluate(model, ids, tgt_len=8, precision="bf16").loss == pytest.approx(fp32, abs=0.05)


@pytest.mark.parametrize("kind", [{}, {"attention": "vaswani"}])
@pytest.mark.parametrize(("capabilities", "precision"), [({}, "fp32"), ({"amx_bf16": True}, "bf16")])
def test_auto_is_what_the_processor_multiplies_natively(
    kind: dict[str, Any], capabilities: dict[str, bool], precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities, raising=False)
    model, ids = tiny_model(**kind), some_ids(40)
    assert evaluate(model, ids, precision="auto").nats == evaluate(model, ids, precision=precision).nats


def test_units() -> None:
    score = Score(nats=20 * math.log(2), tokens=10, n_characters=5, n_bytes=8, seconds=4.0)
    assert (score.loss, score.bpc, score.bpb, score.tokens_per_second) == pytest.approx((2 * math.log(2), 4.0, 2.5, 2.5))
    assert score.ppl == pytest.approx(4.0)
    assert Score(1.0, 1, 1, None, 1.0).bpb is None
    huge = Score(nats=1e6, tokens=10, n_characters=10, n_bytes=None, seconds=1.0)
    assert huge.ppl == math.inf
    assert huge.as_dict()["ppl"] is None  # JSON has no infinity
    assert list(huge.as_dict())[:2] == ["nats", "tokens"]


def test_counts_are_those_given_or_one_character_a_token() -> None:
    score = evaluate(tiny_model(), some_ids(9), n_characters=4, n_bytes=5)
    assert (score.n_characters, score.n_bytes) == (4, 5)
    score = evaluate(tiny_model(), some_ids(9))
    assert (score.n_characters, score.n_bytes, score.token_nats) == (8, None, None)


@pytest.mark.parametrize(
    ("ids", "settings", "error", "match"),
    [
        ([], {}, CorpusError, "has 0 tokens; at least 2 are needed"),
        ([3], {}, CorpusError, "has 1 token; at least 2 are needed"),
        ([3, 13], {}, TokenizerError, r"token id 13 is outside the vocabulary \(13\); is this the model's tokenizer\?"),
        ([-2, 3], {}, TokenizerError, "token id -2 is outside the vocabulary"),
        ([1, 2], {"tgt_len": 0}, ConfigError, r"tgt_len \(0\) and batch_size \(1\) must be at least 1"),
        ([1, 2], {"batch_size": 0}, ConfigError, r"batch_size \(0\) must be at least 1"),
        ([1, 2], {"mem_len": -1}, ConfigError, r"mem_len \(-1\) must be at least 0"),
        (
            [1, 2],
            {"reading": 64},
            TypeError,
            "^evaluate got a value of type int; how to read is a Reading or attributes of it: .*$",
        ),
        ([1, 2], {"foo": 1, "bar": 2}, TypeError, "^evaluate got bar, foo; how to read is a Reading"),
        ([1, 2], {"clamp_len": 0}, ConfigError, r"clamp_len \(0\) must be at least 1"),
    ],
)
def test_what_cannot_be_scored(ids: list[int], settings: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        evaluate(tiny_model(), np.array(ids, dtype=np.int64), **settings)


@pytest.mark.parametrize("changes", [{}, {"shift": "averages", "d_model": 16}, {"ngram_rows": (50, 60)}])
@pytest.mark.parametrize(("mem_len", "tgt_len"), [(4, 16), (5, 3)])
def test_lanes_score_as_one_lane_whatever_the_segments(mem_len, tgt_len, changes):
    """What memory holds depends on where segments begin, layer by layer; lanes keep these borders and warm up far enough."""
    model = tiny_model(**{"mem_len": mem_len, "n_layer": 3, **changes})
    ids = some_ids(3 * model.reach(tgt_len) + 1)  # as many as three lanes need
    one = evaluate(model, ids, tgt_len=tgt_len, batch_size=1, per_token=True).token_nats
    many = evaluate(model, ids, tgt_len=tgt_len, batch_size=3, per_token=True).token_nats
    assert one is not None and many is not None
    np.testing.assert_allclose(many, one, atol=1e-5)


# how a text is read


def test_a_run_is_read_as_its_settings_say_but_for_what_is_changed() -> None:
    config = load_recipe("quickstart", ["eval.tgt_len=32", "eval.ext_len=3", "eval.same_length=true", "eval.clamp_len=9"])
    own = Reading.of_run(config)
    how = {"batch_size": config.eval.batch_size, "clamp_len": 9, "precision": "auto"}
    assert own == Reading(32, config.eval_mem_len, 3, same_length=True, **how)
    changed = Reading.of_run(config, tgt_len=None, ext_len=0, same_length=False)
    assert changed == Reading(32, config.eval_mem_len, 0, same_length=False, **how)
    assert own.length == config.eval_mem_len + 3


def test_without_memory_there_is_no_number_of_keys_to_keep() -> None:
    own = Reading(tgt_len=4, mem_len=8, ext_len=2, same_length=True)
    without = own.without_memory()
    assert without == Reading(tgt_len=4, mem_len=0, ext_len=2, same_length=True)
    model = tiny_model(mem_len=8)
    assert not without.view(model).same_length
    assert replace(without, mem_len=8).view(model).same_length
    config = load_recipe("quickstart", ["model.same_length=true", "eval.mem_len=0"])
    assert Reading.of_run(config, mem_len=8).view(tiny_model(mem_len=8, same_length=True)).same_length


# segments as graphs, as a GPU launches them

GRAPHED: dict[str, dict[str, Any]] = {
    "one lane": {},
    "lanes": {"batch_size": 4},
    "temperatures": {"temperature": (1.2, 0.8)},
    "temperatures of lanes": {"temperature": (1.2, 1.0), "batch_size": 3},
    "a cache": {"cache": Cache(9)},
    "bf16": {"precision": "bf16", "batch_size": 2},
    "int8": {"precision": "int8"},
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"clamp_len": 4, "same_length": True},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2},
    "shift and pairs": {"shift": "averages", "d_model": 16, "ngram_rows": (40,)},
    "rotary": {"attention": "rotary", "mem_len": 9},
}


def graphed_and_not(
    model: LanguageModel, ids: np.ndarray, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Score, Score, list[Graphs]]:
    """Score a text with graphs and without; a CPU does at once what a graph would hold."""
    made: list[Graphs] = []

    def graphs(device: torch.device) -> Graphs:
        made.append((AtOnce if device.type == "cpu" else Graphs)(device))
        return made[-1]

    scores: list[Score] = []
    for chosen in (graphs, lambda device: None):
        monkeypatch.setattr(stream_module, "_graphs", chosen)
        calls: list[int] = []
        scores.append(evaluate(model, ids, tgt_len=7, per_token=True, on_tokens=calls.append, **options))
        assert sum(calls) == len(ids) - 1
    return scores[0], scores[1], made


def assert_equal(one: Score, other: Score) -> None:
    """To the last bit."""
    assert one.token_nats is not None and other.token_nats is not None
    np.testing.assert_array_equal(one.token_nats, other.token_nats)
    assert (one.nats, one.nats_at) == (other.nats, other.nats_at)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("plain", case) for case in GRAPHED),
        *(("adaptive", case) for case in ("one lane", "temperatures of lanes", "bf16")),
        *((kind, "lanes") for kind in ("shift and pairs", "rotary")),
    ],
)
def test_graphs_give_the_bits_of_single_kernels(kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short segment at the end."""
    model, ids = tiny_model(**MODELS[kind]), some_ids(150)
    one, other, made = graphed_and_not(model, ids, monkeypatch, **GRAPHED[case])
    assert_equal(one, other)
    launched = any(isinstance(each, AtOnce) and each.places for each in made)
    assert launched == (case != "a cache")


@pytest.mark.parametrize("n", [2, 9, 60])
def test_what_arrives_late_is_not_lost(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(), some_ids(n)
    right = evaluate(model, ids, tgt_len=7, per_token=True)
    monkeypatch.setattr(stream_module, "_n_late", lambda device: 2)
    calls: list[int] = []
    assert_equal(evaluate(model, ids, tgt_len=7, per_token=True, on_tokens=calls.append), right)
    assert sum(calls) == n - 1 and len(calls) == math.ceil((n - 1) / 7)


# the nats of every token, in a file

TOKEN_IDS, NATS = np.array([*b"xa\n"], np.uint8), np.array([0.5, 2.25], np.float32)


def test_a_table_names_each_predicted_token_and_an_array_has_nothing_but_nats(tmp_path: Path) -> None:
    for name in ("nats.tsv", "nats.npy"):
        write_token_nats(tmp_path / name, TOKEN_IDS, NATS, ByteTokenizer())
    assert (tmp_path / "nats.tsv").read_text() == 'position\tid\tnats\ttoken\n1\t97\t0.500000\t"a"\n2\t10\t2.250000\t"\\n"\n'
    np.testing.assert_array_equal(np.load(tmp_path / "nats.npy", allow_pickle=False), NATS)


def test_segments_are_computed_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation inside training computes as training does, where the model itself reads whole segments."""
    asked: list[str] = []
    backend = TransformerXL.backend

    def watched(model: TransformerXL, name: str, device: torch.device) -> Any:
        asked.append(name)
        return backend(model, name, device)

    monkeypatch.setattr(TransformerXL, "backend", watched)
    model = tiny_model()
    evaluate(model, np.arange(40) % 8, tgt_len=8, ext_len=4, execution=Execution(backend="sdpa"))
    assert set(asked) == {"sdpa"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"cutoffs": (4, 9), "div_val": 2}, {"cutoffs": (4, 9)}, {"mem_len": 0}, {"kind": "lstm"}],
    ids=["plain", "adaptive", "adaptive of one width", "without memory", "lstm"],
)
def test_nats_at_a_temperature_are_those_of_what_is_drawn_at_it(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the softmax: generation and scoring mean the same distribution."""
    if "kind" in changes:
        config = LstmConfig(vocab_size=13, n_layer=1, d_model=8)
        model: LanguageModel = random_weights(Lstm(config).eval())
    else:
        model = tiny_model(**changes)
    monkeypatch.setattr("transformer_xl.inference.softmax._CHUNK_ELEMENTS", 30)  # several chunks in a segment
    ids, mems, drawn = some_ids(30), model.init_mems(1), []
    with torch.no_grad():
        for segment in range(0, 29, 7):
            out = model(torch.from_numpy(ids[None, segment : min(segment + 7, 29)].astype(np.int64)), mems=mems)
            assert out.logits is not None
            mems = out.mems
            drawn.append(probabilities(out.logits[0], Sampling(temperature=1.3)).log())
    expected = -torch.cat(drawn)[torch.arange(29), torch.from_numpy(ids[1:].astype(np.int64))].numpy()
    score = evaluate(model, ids, tgt_len=7, temperature=(1.3, 1.0), per_token=True)
    assert score.token_nats is not None
    np.testing.assert_allclose(score.token_nats, expected, atol=1e-4)
    assert score.nats == score.nats_at[1.3] == pytest.approx(expected.sum(), abs=1e-3)
    plain = evaluate(model, ids, tgt_len=7)
    assert plain.nats_at == {1.0: plain.nats}
    assert score.nats_at[1.0] == pytest.approx(plain.nats, abs=1e-3)
    assert evaluate(model, ids, tgt_len=7, temperature=1.3, batch_size=3).nats == pytest.approx(score.nats, abs=0.5)


def test_lanes_do_not_change_what_a_temperature_gives() -> None:
    model, ids = tiny_model(same_length=True), some_ids(60)
    one, lanes = (evaluate(model, ids, tgt_len=5, batch_size=n, temperature=(0.8,)) for n in (1, 4))
    assert lanes.nats == pytest.approx(one.nats, abs=1e-3)


@pytest.mark.parametrize("sharpness", [0.8, 1.0, 1.37])
def test_the_best_temperature_undoes_a_wrong_sharpness(sharpness: float) -> None:
    """Labels drawn from known scores; a model whose scores are too sharp by a factor is right at that temperature."""
    model = tiny_model(n_layer=1)
    with torch.no_grad():
        model.get_parameter("embedding.weight").zero_()
        model.softmax.bias.mul_(4)
        probabilities = model.softmax.bias.softmax(0)
        ids = torch.multinomial(probabilities, 4000, replacement=True, generator=torch.Generator().manual_seed(1)).numpy()
        counts = torch.from_numpy(np.bincount(ids[1:], minlength=13)).double()
        model.softmax.bias.mul_(sharpness)
    score = evaluate(model, ids, tgt_len=100, temperature=TEMPERATURES)
    chosen = best_temperature(score.nats_at)

    def nats(t: float) -> float:
        return -float(counts @ (model.softmax.bias.detach().double() / t).log_softmax(0))

    finest = min((i / 1000 for i in range(700, 1501)), key=nats)
    assert chosen == pytest.approx(finest, abs=0.003)
    assert nats(chosen) == pytest.approx(nats(finest), rel=1e-6)
    assert chosen == pytest.approx(sharpness, abs=0.1)
    for t in (0.7, 1.15, 1.5):
        assert score.nats_at[t] == pytest.approx(nats(t), rel=1e-5)


def test_the_best_temperature_at_an_end_stays_in_the_range() -> None:
    assert best_temperature({t: t for t in TEMPERATURES}) == 0.7
    assert best_temperature({t: -t for t in TEMPERATURES}) == 1.5
    assert best_temperature(dict.fromkeys((0.9, 1.0, 1.1), 2.0)) in (0.9, 1.0, 1.1)


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan, (), (1.0, 0.0)])
def test_what_is_no_temperature_is_refused(temperature: Any) -> None:
    with pytest.raises(ConfigError, match=r"temperature \(.*\) must be above 0 and finite; 1 changes nothing"):
        evaluate(tiny_model(), some_ids(9), tgt_len=4, temperature=temperature)


@pytest.mark.parametrize("adapts", [{"dynamic": Dynamic()}, {"cache": Cache(5)}])
def test_a_temperature_is_for_a_model_that_stays_as_it_is(adapts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="without dynamic evaluation and without a cache; leave one of them out"):
        evaluate(tiny_model(), some_ids(9), tgt_len=4, temperature=1.1, **adapts)
    assert evaluate(tiny_model(), some_ids(9), tgt_len=4, temperature=1, **adapts).tokens == 8
