"""Facts about tokens, against `evaluate` and against attention computed once more, and the passages that gain most."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.explain.models import make, reading
from tests.helpers import tiny_model
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError, TokenizerError
from transformer_xl.explain import attention
from transformer_xl.explain.attribution import attribute, spearman
from transformer_xl.explain.causes import FOLLOWED, affordable
from transformer_xl.explain.explanation import best_passages, explain, find_facts, remembers
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.tokenizers.ids import IdTokenizer


def facts_of(*arguments: Any, **options: Any) -> Any:
    """What `find_facts` returns, without questions about what may be None."""
    return find_facts(*arguments, **options)


def token_nats(*arguments: Any, **options: Any) -> Any:
    return evaluate(*arguments, **options, per_token=True).token_nats


def stream(n, vocab_size=13):
    return torch.randint(vocab_size, (n,)).numpy()


@pytest.mark.parametrize("kind", ["paper", "same_length, clamp_len", "zero first memory", "shaw", "vaswani", "lstm"])
@pytest.mark.parametrize("ext_len", [0, 3])
def test_nats_are_those_of_evaluate(kind, ext_len):
    model, ids = make(kind), stream(42)
    how = reading(model, ext_len=ext_len)
    facts = facts_of(model, ids, how)
    same = {"same_length": how.same_length, "clamp_len": how.clamp_len, "ext_len": ext_len}
    with_memory = token_nats(model, ids, tgt_len=4, mem_len=how.mem_len, **same)
    without = token_nats(model, ids, tgt_len=4, mem_len=0, **{**same, "same_length": False})
    np.testing.assert_allclose(facts.nats, with_memory, atol=2e-5)
    np.testing.assert_allclose(facts.without, without, atol=2e-5)
    np.testing.assert_allclose(facts.gain, without - with_memory, atol=4e-5)
    assert np.abs(facts.gain).max() > 1e-3  # memory makes a difference, or nothing would be tested


@pytest.mark.parametrize(("tgt_len", "ext_len"), [(4, 0), (8, 0), (1, 7), (3, 5)])
def test_nats_of_a_model_without_memory(tgt_len, ext_len):
    model, ids = make("vanilla"), stream(42)
    how = reading(model, tgt_len=tgt_len, ext_len=ext_len)
    facts = facts_of(model, ids, how)
    expected = token_nats(model, ids, tgt_len=tgt_len, mem_len=0, ext_len=ext_len)
    np.testing.assert_allclose(facts.nats, expected, atol=2e-5)
    assert facts.without is None and facts.gain is None and not remembers(model, how)
    assert facts.details is not None and (facts.details.memory == 0).all()


def test_a_model_read_with_no_memory_has_nothing_to_compare():
    model = make("paper")
    facts = facts_of(model, stream(20), reading(model, mem_len=0, same_length=False))
    assert facts.without is None and facts.distances.memory_share.max() == 0


def test_lengths_are_those_of_the_text_at_most():
    model, ids = make("paper"), stream(20)
    enormous = facts_of(model, ids, reading(model, tgt_len=10**12, mem_len=10**12))
    long = facts_of(model, ids, reading(model, tgt_len=19, mem_len=20))
    np.testing.assert_array_equal(enormous.nats, long.nats)
    np.testing.assert_array_equal(enormous.distances.mass, long.distances.mass)


@pytest.mark.parametrize("changes", [{}, {"cutoffs": (4, 9)}])
def test_preferred_tokens_are_the_likeliest(changes, monkeypatch):
    monkeypatch.setattr("transformer_xl.explain.explanation._SCORES_AT_ONCE", 13 * 3)  # chunks of three tokens
    model, ids = tiny_model(**changes), stream(14)
    facts = facts_of(model, ids, reading(model, tgt_len=13), top=4)
    p = model(torch.from_numpy(ids[None, :-1])).logits[0].softmax(-1).detach()
    np.testing.assert_allclose(facts.top_probabilities, p.topk(4).values, rtol=1e-4)
    np.testing.assert_array_equal(facts.top_ids, p.topk(4).indices)
    own = p.gather(1, torch.from_numpy(ids[1:, None]))
    np.testing.assert_array_equal(facts.rank, (p > own).sum(1))
    np.testing.assert_allclose(np.exp(-facts.nats), own[:, 0], rtol=1e-4)


def looked(model, ids, how, place):
    """Weights (L, N, keys) by which the token at `place` was predicted, and the places of the keys."""
    view, mems = how.view(model), how.view(model).init_mems(1)
    for begin in range(0, len(ids) - 1, how.tgt_len):
        segment = torch.from_numpy(ids[begin : min(begin + how.tgt_len, len(ids) - 1)])[None]
        if begin <= place - 1 < begin + segment.shape[1]:
            found, _ = view.attention_weights(segment, mems=mems)
            n_key = found[0].shape[-1]
            return (
                torch.stack([weight[0, :, place - 1 - begin] for weight in found]),
                begin + segment.shape[1] - n_key + np.arange(n_key),
                begin,
            )
        with torch.no_grad():
            mems = view.read(segment, mems=mems)[1]
    raise AssertionError


@pytest.mark.parametrize("kind", ["paper", "shaw", "same_length, clamp_len"])
def test_details_say_where_the_heads_looked(kind):
    model, ids = make(kind), stream(30)
    how = reading(model)
    found = facts_of(model, ids, how).details
    assert found.places.tolist() == list(range(1, 30))
    for place in (1, 4, 5, 18, 29):
        weights, keys, begin = looked(model, ids, how, place)
        row = place - 1
        expected = weights.flatten(0, 1).numpy()
        heaviest = np.pad(-np.sort(-expected), ((0, 0), (0, attention.KEYS)))[:, : attention.KEYS]
        np.testing.assert_allclose(found.weights[row], heaviest, atol=1e-6)
        for head in range(len(expected)):
            for distance, weight in zip(found.distances[row, head], found.weights[row, head], strict=True):
                if weight > 0:
                    np.testing.assert_allclose(expected[head, keys == place - 1 - distance], weight, atol=1e-6)
        np.testing.assert_allclose(found.memory[row], expected[:, keys < begin].sum(-1), atol=1e-6)


def test_little_room_is_for_the_beginning_and_for_what_gains_most(monkeypatch):
    model, ids = make("paper"), stream(401)
    monkeypatch.setattr(attention.DetailStore.__init__, "__kwdefaults__", {"n_bytes": 8 * 4 * 6 * 25})  # eight segments
    facts = facts_of(model, ids, reading(model))
    gains = facts.gain.reshape(100, 4).sum(1)
    best = {0, 1, *(np.argsort(-gains[2:])[:6] + 2)}
    assert sorted({(place - 1) // 4 for place in facts.details.places.tolist()}) == sorted(best)
    assert len(facts.details.places) == 32


def test_attention_by_distance_is_the_mean_over_queries():
    model, ids = make("paper"), stream(30)
    how = reading(model)
    binned = facts_of(model, ids, how).distances
    assert binned.queries == 29
    np.testing.assert_allclose(binned.mass.sum(-1), 1, atol=1e-6)
    mass, far = np.zeros((2, 3, 9)), np.zeros((2, 3, 9))
    for place in range(1, 30):
        weights, keys, begin = looked(model, ids, how, place)
        for key, weight in zip(keys, weights.unbind(-1), strict=True):
            if key <= place - 1:
                mass[:, :, place - 1 - key] += weight.numpy() / 29
                far[:, :, place - 1 - key] += weight.numpy() / 29 * (key < begin)
    assert binned.edges.tolist() == list(range(10))
    np.testing.assert_allclose(binned.mass, mass, atol=1e-6)
    np.testing.assert_allclose(binned.in_memory, far, atol=1e-6)
    np.testing.assert_allclose(binned.memory_share, far.sum(-1), atol=1e-6)
    assert 0.05 < far.sum() / 6 < 0.95


def test_progress_counts_every_token_of_both_readings_and_the_mode_of_the_model_is_restored():
    model, counts = make("paper").train(), []
    facts = facts_of(model, stream(30), reading(model), top=99, on_tokens=counts.append)
    assert sum(counts) == 2 * 29 and model.training
    assert facts.top_ids.shape == (29, 13)  # no more than there are words


def test_what_cannot_be_read():
    model = make("paper")
    with pytest.raises(CorpusError, match="has 1 token; at least 2"):
        facts_of(model, stream(1), reading(model))
    with pytest.raises(TokenizerError, match="99"):
        facts_of(model, np.array([1, 99]), reading(model))
    with torch.no_grad():
        model.softmax.bias[3] = float("nan")
    with pytest.raises(CheckpointError, match="no finite probabilities"):
        facts_of(model, stream(9), reading(model))


def test_passages_lie_inside_segments_and_the_best_come_first():
    values = np.zeros(300)
    values[[5, 130, 131, 199]] = 3, 2, 2, -9
    first, second = best_passages(values, tgt_len=128)
    assert (first.begin, first.end, first.score, first.best) == (129, 193, 4.0, 131)
    assert (second.begin, second.end, second.score, second.best) == (1, 65, 3.0, 6)
    assert best_passages(-np.ones(5), tgt_len=2) == []
    assert [p.end - p.begin for p in best_passages(np.ones(100), tgt_len=100, n=9)] == [50, 50]


@pytest.mark.parametrize("kind", ["paper", "lstm", "vanilla"])
def test_causes_are_those_that_attribute_finds(kind):
    model, ids = make(kind), stream(42)
    how = reading(model, tgt_len=4)
    found: Any = explain(model, IdTokenizer(13), ids, how, attributed=2, token=41)
    facts, causes = found.facts, found.facts.causes
    gains = (facts.nats if facts.gain is None else facts.gain)[:40].reshape(10, 4).sum(1)
    chosen = sorted({*np.argsort(-gains)[:2].tolist(), 9})
    assert causes.places.tolist() == [place + 1 for i in chosen for place in range(4 * i, min(4 * i + 4, 41))]
    methods = ("leave-out", "leave-out", "gradient") if kind != "lstm" else ("gradient",) * 3
    for place, rival, distances, nats in zip(causes.places, causes.rivals, causes.distances, causes.nats, strict=True):
        assert rival == next(token for token in facts.top_ids[place - 1] if token != ids[place])
        for kept, method in enumerate(methods):
            against = int(rival) if kept == 1 and kind != "lstm" else None
            n_segment = FOLLOWED if method == "gradient" else 1
            whole = attribute(how.view(model), ids, int(place), method=method, contrast=against, tgt_len=4, segments=n_segment)
            all_nats = dict(zip(whole.places.tolist(), whole.nats.tolist(), strict=True))
            if kept == 2 and kind != "lstm":  # from before the memory
                all_nats = {cause: x for cause, x in all_nats.items() if cause < (place - 1) // 4 * 4 - model.mem_len}
            told = {int(place - d): x for d, x in zip(distances[kept], nats[kept], strict=True) if x}
            assert told.keys() <= all_nats.keys()
            np.testing.assert_allclose(list(told.values()), [all_nats[cause] for cause in told], atol=1e-5)
            least = min(map(abs, told.values()), default=0.0) if len(told) == nats.shape[1] else 0.0
            assert all(abs(x) <= least + 1e-5 for cause, x in all_nats.items() if cause not in told)
    assert (causes.trust is None) == (kind == "lstm") and np.abs(causes.nats).max() > 1e-3


def test_trust_is_the_mean_rank_correlation_with_leaving_out():
    model, ids = make("paper"), stream(13)
    how = reading(model, tgt_len=4)
    causes: Any = explain(model, IdTokenizer(13), ids, how, token=10).facts.causes
    expected = []
    for place in causes.places.tolist():
        exact, estimate = (attribute(model, ids, place, method=method, tgt_len=4) for method in ("leave-out", "gradient"))
        weights, keys, _ = looked(model, ids, how, place)
        attention = weights.mean((0, 1)).numpy()[np.isin(keys, exact.places)]
        expected.append([by_ranks(exact.nats, estimate.nats), by_ranks(exact.nats, attention)])
    np.testing.assert_allclose(causes.trust, np.mean(expected, axis=0), atol=1e-6)


def by_ranks(a, b):
    ranks = [[sorted(x.tolist()).index(value) for value in x.tolist()] for x in (a, b)]  # there are no ties
    return np.asarray(np.corrcoef(ranks))[0, 1]


@pytest.mark.parametrize(
    ("a", "b", "rho"), [([1, 2, 3], [10, 30, 20], 0.5), ([1, 1, 2], [0, 0, 5], 1.0), ([1, 2, 3], [7, 7, 7], 0.0)]
)
def test_spearman_is_the_correlation_of_ranks(a, b, rho):
    assert spearman(np.array(a, float), np.array(b, float)) == pytest.approx(rho)


def test_a_text_says_no_causes_unless_asked_and_refuses_a_token_that_nothing_predicts():
    model = make("paper")
    assert explain(model, IdTokenizer(13), stream(9), reading(model)).facts.causes is None
    for token in (1, 10):
        with pytest.raises(ConfigError, match=rf"token \({token}\) must be from 2 to 9"):
            explain(model, IdTokenizer(13), stream(9), reading(model), token=token)


def test_a_larger_model_gets_causes_of_fewer_segments():
    sizes = [affordable(make("paper"), reading(make("paper"), tgt_len=n)) for n in (4, 64, 10**6)]
    assert sizes[0] > sizes[1] > sizes[2] == 0
    few, many = (tiny_model(n_head=n, d_head=16 // n) for n in (1, 8))  # of as many weights
    assert affordable(few, reading(few, tgt_len=64)) > 2 * affordable(many, reading(many, tgt_len=64)) > 0


def test_the_rival_is_another_token_where_one_is_shown():
    model, ids = make("paper"), stream(42)
    one, five = (explain(model, IdTokenizer(13), ids, reading(model), top=top, attributed=9).facts for top in (1, 5))
    assert one.top_ids.shape == one.top_probabilities.shape == (41, 1)
    assert one.causes and five.causes and (one.top_ids[:, 0] == ids[1:]).any()
    np.testing.assert_array_equal(one.causes.rivals, five.causes.rivals)
