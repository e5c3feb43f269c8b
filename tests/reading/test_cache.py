"""The neural cache against a second transcription; lanes, segments and padding make no difference."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers import default_dtype, examples, tiny_model
from tests.reading.test_dynamic import lstm, nats_of, vanilla
from tests.reading.test_evaluation import some_ids
from tests.reference.reading_loops import cache_nats
from transformer_xl.errors import ConfigError
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.cache import Cache, CacheRows
from transformer_xl.reading.dynamic import Dynamic, LearningState
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.reading.segments import Lanes


@torch.no_grad()
def transcribed(model: LanguageModel, ids: np.ndarray, cache: Cache, *, tgt_len: int, ext_len: int = 0) -> list[float]:
    """Nats of ids[1:] from the states that segments of the model itself give, one lane from beginning to end."""
    view, states, log_p = model.with_context(ext_len=ext_len), [], []
    mems = view.init_mems(1)
    for segment in Lanes(ids, 1, tgt_len=tgt_len, ext_len=ext_len).segments(pad_left=True):
        h_BTD, mems = view.read(segment.ids, mems=mems)
        new = h_BTD[:, segment.n_context :]
        states += list(new[0])
        log_p += list(view.softmax.logits(new, view.embedding)[0].log_softmax(-1))
    theta = cache.theta / math.sqrt(model.config.d_model)
    return cache_nats(states, log_p, ids[1:].tolist(), size=cache.size, weight=cache.weight, theta=theta)


KINDS = {
    "paper": lambda: tiny_model(),
    "clusters": lambda: tiny_model(cutoffs=(4, 9), div_val=2),
    "no memory": lambda: tiny_model(mem_len=0),
    "lstm": lstm,
    "vanilla": vanilla,
}


@pytest.mark.parametrize(("kind", "ext_len"), [*((kind, 0) for kind in KINDS), ("paper", 3), ("lstm", 3)])
@pytest.mark.parametrize("cache", [Cache(1, 0.3, 2.0), Cache(9, 0.2, 1.0), Cache(100, 0.6, 0.0)])
def test_the_cache_is_that_of_the_paper(kind: str, ext_len: int, cache: Cache) -> None:
    with default_dtype(torch.float64):
        model, ids = KINDS[kind](), some_ids(40)
        score = evaluate(model, ids, tgt_len=6, ext_len=ext_len, cache=cache, per_token=True)
        expected = transcribed(model, ids, cache, tgt_len=6, ext_len=ext_len)
        np.testing.assert_allclose(nats_of(score), expected, atol=1e-6)
        assert score.nats == pytest.approx(sum(expected), abs=1e-9)


@settings(max_examples=examples(60))
@given(
    n=st.integers(2, 90),
    batch_size=st.integers(1, 9),
    size=st.integers(1, 30),
    ext_len=st.integers(0, 5),
    kind=st.sampled_from([{}, {"mem_len": 0}, {"attention": "al_rfou", "max_klen": 12, "n_head": 2, "d_head": 5}]),
)
@example(n=25, batch_size=3, size=2, ext_len=0, kind={})  # kept states need the whole reach of memory before them
def test_lanes_score_as_one_lane(n: int, batch_size: int, size: int, ext_len: int, kind: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, ids, cache = tiny_model(**{"mem_len": 3, **kind}), some_ids(n), Cache(size, 0.4, 2.0)
    one, many = (
        evaluate(model, ids, tgt_len=4, ext_len=ext_len, batch_size=lanes, cache=cache, per_token=True)
        for lanes in (1, batch_size)
    )
    np.testing.assert_allclose(nats_of(many), nats_of(one), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_different_ages_know_nothing_of_each_other(dtype: torch.dtype) -> None:
    """Each row of padded segments gives what it gives alone; padding takes no room in the cache."""
    torch.manual_seed(0)
    cache, lengths = Cache(5, 0.3, 1.5), ([4, 2, 3], [0, 4, 1], [4, 3, 4])
    make = lambda n: CacheRows(cache, n, d_model=6, tgt_len=4, device=torch.device("cpu"), dtype=torch.float32)  # noqa: E731
    together, found, parts = make(3), [[], [], []], [[], [], []]
    for own in lengths:
        h, nats, labels = torch.randn(3, 4, 6).to(dtype), torch.rand(3, 4) + 1, torch.randint(0, 3, (3, 4))
        for row, n in enumerate(own):
            labels[row, : 4 - n] = -100
            parts[row].append((h[row, 4 - n :], nats[row, 4 - n :], labels[row, 4 - n :]))
        mixed = together.mix(nats, h, labels)
        for row, n in enumerate(own):
            assert torch.equal(mixed[row, : 4 - n], nats[row, : 4 - n])
            found[row].append(mixed[row, 4 - n :])
    for row in (0, 1, 2):
        alone = make(1)
        expected = torch.cat([alone.mix(nats[None], h[None], labels[None])[0] for h, nats, labels in parts[row] if len(h)])
        torch.testing.assert_close(torch.cat(found[row]), expected)
        h, nats, labels = (torch.cat(part) for part in zip(*parts[row], strict=True))
        log_p = torch.log((1 - torch.exp(-nats.double()))[:, None].expand(-1, 3) / 2).clone()
        log_p[torch.arange(len(labels)), labels] = -nats.double()
        loops = cache_nats(h.double(), log_p, labels.tolist(), size=5, weight=0.3, theta=1.5 / math.sqrt(6))
        torch.testing.assert_close(expected.double(), torch.tensor(loops, dtype=torch.float64), atol=1e-5, rtol=1e-5)


def test_the_cache_mixes_what_the_weights_of_that_moment_give() -> None:
    """With both, the step is on the model's own loss, and kept states are those of the weights that read them."""
    model, ids, cache, dynamic = tiny_model(), some_ids(30), Cache(8, 0.3, 2.0), Dynamic(lr=0.2)
    stream = LearningState(model, dynamic, tgt_len=5, precision="fp32")
    states, nats = [], []
    for segment in Lanes(ids, 1, tgt_len=5).segments(pad_left=True):
        h_BTD, nll = stream.read_and_score(segment.ids, segment.labels)
        states, nats = [*states, h_BTD], [*nats, nll]
    rows = CacheRows(cache, 1, d_model=model.config.d_model, tgt_len=29, device=model.device, dtype=torch.float32)
    expected = rows.mix(torch.cat(nats, 1), torch.cat(states, 1), torch.from_numpy(ids[None, 1:].astype(np.int64)))
    score = evaluate(model, ids, tgt_len=5, cache=cache, dynamic=dynamic, per_token=True)
    np.testing.assert_allclose(nats_of(score), expected[0], atol=1e-5)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"size": 0}, r"size of a cache \(0\) must be at least 1"),
        ({"weight": 1.0}, r"weight of a cache \(1\) must be between 0 and 1"),
        ({"weight": 0.0}, r"weight of a cache \(0\)"),
        ({"theta": -1.0}, r"theta of a cache \(-1\) must be a number of at least 0"),
        ({"theta": math.inf}, r"theta of a cache \(inf\)"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Cache(**values)
