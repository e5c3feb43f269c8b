"""Dynamic evaluation against a second transcription; and the model stays as it is."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import assert_close, default_dtype, random_weights, tiny_model
from tests.reading.test_evaluation import some_ids
from tests.reference.reading_loops import dynamic_nats, mean_of_squares
from transformer_xl.config.model import LstmConfig, VanillaConfig
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError, TrainingError
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.reading.cache import Cache
from transformer_xl.reading.dynamic import Dynamic, LearningState, mean_squares
from transformer_xl.reading.evaluation import Score, evaluate
from transformer_xl.reading.segments import Lanes
from transformer_xl.world import World


def nats_of(score: Score) -> np.ndarray:
    assert score.token_nats is not None
    return score.token_nats


def weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def lstm() -> LanguageModel:
    config = LstmConfig(vocab_size=13, n_layer=2, d_model=7, dropout=0.3)
    return random_weights(Lstm(config)).eval()


def vanilla() -> LanguageModel:
    config = VanillaConfig(vocab_size=13, n_layer=2, d_model=6, n_head=2, d_head=3, d_inner=9, max_len=12)
    return random_weights(Vanilla(config)).eval()


KINDS = {
    "paper": {},
    "pre_lnorm, final_norm": {"pre_lnorm": True, "final_norm": True, "activation": "relu2"},
    "clusters": {"cutoffs": (4, 9), "div_val": 2, "untie_r": True},
    "long memory, same_length": {"mem_len": 9, "same_length": True},
    "no memory": {"mem_len": 0},
}
RULES = {"sgd": {"lr": 0.3}, "sgd, decay": {"lr": 0.3, "decay": 0.2}, "rms": {"lr": 0.02, "decay": 0.4, "epsilon": 0.05}}


@pytest.mark.parametrize(
    ("kind", "rule"), [*((kind, list(RULES)[i % 3]) for i, kind in enumerate(KINDS)), ("paper", "sgd, decay"), ("paper", "rms")]
)
def test_each_step_is_that_of_the_paper(kind: str, rule: str) -> None:
    with default_dtype(torch.float64):
        model, ids = tiny_model(**KINDS[kind]), some_ids(14)
        squares = mean_of_squares(some_ids(11, 1).tolist(), weights(model), model.config, tgt_len=5) if rule == "rms" else None
        expected, left = dynamic_nats(ids.tolist(), weights(model), model.config, tgt_len=6, squares=squares, **RULES[rule])
        dynamic = Dynamic(**RULES[rule], mean_squares=squares)
        score = evaluate(model, ids, tgt_len=6, dynamic=dynamic, per_token=True)
        np.testing.assert_allclose(nats_of(score), expected, atol=1e-6)
        assert score.nats == pytest.approx(sum(expected), abs=1e-9)
        stream = LearningState(model, dynamic, tgt_len=6, precision="fp32")
        for segment in Lanes(ids, 1, tgt_len=6).segments(pad_left=True):
            stream.score(segment.ids, segment.labels)
        for name, x in left.items():
            assert_close(name, stream.weights[name], x, 1e-9)
        assert dynamic.rule == rule[:3]


@pytest.mark.parametrize("kind", KINDS)
def test_mean_squares_are_those_of_single_segments(kind: str) -> None:
    with default_dtype(torch.float64):
        model, ids = tiny_model(**KINDS[kind]), some_ids(13)
        expected = mean_of_squares(ids.tolist(), weights(model), model.config, tgt_len=5)
        found = mean_squares(model, ids, tgt_len=5)
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert_close(name, found[name], x, 1e-10, least=x.abs().max().item())


@pytest.mark.parametrize("make", [lstm, vanilla, tiny_model])
@pytest.mark.parametrize("ext_len", [0, 3])
def test_all_kinds_learn_as_an_optimizer_of_torch_lets_them(make: Callable[[], LanguageModel], ext_len: int) -> None:
    """With an extended context, only tokens that are scored teach, each once."""
    model, ids = make(), torch.from_numpy(some_ids(23).astype(np.int64))
    learner = copy.deepcopy(model).with_context(ext_len=ext_len)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.2)
    mems, expected = learner.init_mems(1), []
    for at in range(0, 22, 5):
        begin, end = max(at - ext_len, 0), min(at + 5, 22)
        labels = ids[begin + 1 : end + 1].clone()
        labels[: at - begin] = -100
        out = learner(ids[None, begin:end], mems=mems, labels=labels[None])
        mems = out.mems
        expected += out.nll[0, at - begin :].tolist()
        optimizer.zero_grad()
        out.nll[0, at - begin :].mean().backward()
        optimizer.step()
    score = evaluate(model, ids, tgt_len=5, ext_len=ext_len, dynamic=Dynamic(lr=0.2), per_token=True)
    np.testing.assert_allclose(nats_of(score), expected, atol=1e-5)


def test_a_text_that_repeats_itself_is_learned() -> None:
    model, ids = tiny_model(mem_len=0), np.tile(some_ids(7), 20)
    plain = evaluate(model, ids, tgt_len=7)
    squares = mean_squares(model, some_ids(50), tgt_len=7)
    for dynamic in (Dynamic(lr=0.1), Dynamic(lr=0.1, mean_squares=squares)):
        score = evaluate(model, ids, tgt_len=7, dynamic=dynamic, per_token=True)
        assert score.loss < plain.loss - 0.3
        assert nats_of(score)[-7:].mean() < nats_of(score)[:7].mean() - 1


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_stays_as_it_is_however_reading_ends(end: type[BaseException] | None, training: bool) -> None:
    model = tiny_model(dropout=0.5).train(training).requires_grad_(False)
    before, random_state, calls = copy.deepcopy(model.state_dict()), torch.get_rng_state(), []

    def on_tokens(n: int) -> None:
        calls.append(n)
        if end and len(calls) == 3:
            raise end

    read = lambda: evaluate(model, some_ids(30), tgt_len=5, dynamic=Dynamic(lr=1.0), cache=Cache(3), on_tokens=on_tokens)  # noqa: E731
    if end is None:
        read()
    else:
        with pytest.raises(end):
            read()
    assert len(calls) >= 3
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None and not x.requires_grad for x in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (model.training, torch.is_grad_enabled()) == (training, True)


def test_bf16_is_close_and_weights_in_bf16_are_taught_in_fp32() -> None:
    model, ids = tiny_model(), some_ids(60)
    fp32 = evaluate(model, ids, tgt_len=8, dynamic=Dynamic(lr=0.1)).loss
    assert evaluate(model, ids, tgt_len=8, dynamic=Dynamic(lr=0.1), precision="bf16").loss == pytest.approx(fp32, abs=0.1)
    narrow = tiny_model().to(torch.bfloat16)
    stream = LearningState(narrow, Dynamic(lr=1e-5), tgt_len=8, precision="fp32")
    stream.score(*(torch.from_numpy(ids[None, first : first + 8].astype(np.int64)) for first in (0, 1)))
    changed = [not torch.equal(stream.weights[name], x.float()) for name, x in narrow.named_parameters()]
    assert all(changed)
    assert narrow.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"precision": "int8"}, ConfigError, "dynamic evaluation needs .*, and precision is int8, in which weights are frozen"),
        ({"precision": "fp16"}, ConfigError, "precision is fp16, in which gradients vanish"),
        ({"batch_size": 2}, ConfigError, r"reads from beginning to end in one lane; set batch_size \(2\) to 1"),
        ({"world": World(rank=0, size=2)}, ConfigError, "dynamic evaluation reads in one process, not in 2"),
        ({"dynamic": Dynamic(mean_squares={"a": torch.zeros(1)})}, ValueError, "are missing or unknown"),
        ({"dynamic": Dynamic(lr=1e20)}, TrainingError, r"diverged: .*; lower lr \(1e\+20, --dynamic-lr\)"),
    ],
)
def test_what_cannot_learn_is_refused(how: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        evaluate(tiny_model(), some_ids(60), **{"dynamic": Dynamic(lr=0.1), "tgt_len": 5, **how})


def test_mean_squares_that_are_none_are_refused() -> None:
    model = tiny_model()
    nothing = {name: torch.zeros_like(x) for name, x in model.named_parameters()}
    with pytest.raises(ConfigError, match="mean squares must be numbers that are not all 0"):
        evaluate(model, some_ids(20), dynamic=Dynamic(mean_squares=nothing))
    with pytest.raises(CorpusError, match="the training text has 1 token; at least 2 are needed"):
        mean_squares(model, some_ids(1))
    with pytest.raises(TokenizerError, match="token id 13 is outside the vocabulary"):
        mean_squares(model, np.array([1, 13]))
    with pytest.raises(ConfigError, match="precision is int8"):
        mean_squares(model, some_ids(9), precision="int8")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"lr": 0.0}, r"lr \(0\) and epsilon \(1\) .* must be numbers above 0"),
        ({"lr": float("nan")}, r"lr \(nan\)"),
        ({"epsilon": 0.0}, r"epsilon \(0\)"),
        ({"decay": 1.5}, r"decay \(1.5\) .* must be from 0 to 1"),
        ({"decay": -0.1}, r"decay \(-0.1\)"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Dynamic(**values)
