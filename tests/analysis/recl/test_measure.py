"""The measure against hand-computed cases, against its definition by loops, and on sources whose reach is known."""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.recl.oracle import Oracle, repeating
from tests.helpers import examples
from transformer_xl.analysis.recl.losses import CachedLosses, spread_blocks
from transformer_xl.analysis.recl.measure import EffectiveLength, Recl, hardest, measure, relative_gain
from transformer_xl.errors import ConfigError
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model_config import TransformerXLConfig


def last(found: Iterator[Recl]) -> Recl:
    *_, result = found
    return result


def table(rows: dict[int, list[float]]) -> Callable[[int], np.ndarray]:
    return lambda context: np.array(rows[context], np.float32)


def test_two_models_by_hand() -> None:
    """b_10 = (4, 3, 1, 1); with r = 0.5 the first two tokens count."""
    losses = {
        "a": table({10: [4, 4, 1, 2], 20: [3, 3, 9, 9], 30: [3, 2.99, 0, 0]}),
        "b": table({10: [5, 3, 2, 1], 20: [9, 1, 0, 0], 30: [9, 9, 9, 9]}),
    }
    found = last(measure(losses, shares=[0.5, 1.0], delta=10, max_context=30, threshold=0.1))
    gains = {name: {share: list(each.items()) for share, each in own.items()} for name, own in found.gains.items()}
    near = pytest.approx
    # b_20 = (3, 1, 0, 0), of which b's own context of 30 makes nothing better
    assert gains["a"][0.5] == [(20, near(1 - math.exp((3 + 3) / 2 - (4 + 3) / 2))), (30, near(0))]
    assert gains["b"][0.5] == [(20, near(1 - math.exp((4 + 1) / 2 - (4 + 3) / 2))), (30, near(0))]
    assert gains["a"][1.0] == [(20, near(1 - math.exp(-1 / 4))), (30, near(0))]
    assert gains["b"][1.0] == [(20, near(1 - math.exp((4 + 1 + 0 + 0 - 9) / 4))), (30, near(0))]
    assert found.lengths == {name: dict.fromkeys((0.5, 1.0), EffectiveLength(20, at_least=False)) for name in "ab"}
    assert found.losses["a"] == {10: 2.75, 20: 6.0, 30: near(5.99 / 4)}


def test_the_baseline_is_that_of_the_group() -> None:
    """Alone, the worse model gains; beside one that knew all along, it gains nothing."""
    worse, better = table({1: [5.0, 5.0], 2: [4.0, 4.0], 3: [4.0, 4.0]}), table({c: [3.0, 3.0] for c in (1, 2, 3)})
    options = {"shares": [1.0], "delta": 1, "max_context": 3}
    assert last(measure({"worse": worse}, **options)).lengths["worse"][1.0] == EffectiveLength(2, at_least=False)
    both = last(measure({"worse": worse, "better": better}, **options))
    assert both.lengths["worse"][1.0] == EffectiveLength(1, at_least=False)


def test_only_what_is_needed_is_asked_for() -> None:
    """All models at each c, for the baseline, and at c + Δ only those that still gain."""
    asked: list[tuple[str, int]] = []

    def gaining_until(name: str, most: int) -> Callable[[int], np.ndarray]:
        return lambda context: asked.append((name, context)) or np.full(3, 9.0 - min(context, most))

    # "short" is worse by nothing, so both gain until one of them no longer does
    losses = {"short": gaining_until("short", 2), "long": gaining_until("long", 4)}
    found = last(measure(losses, shares=[1.0], delta=1, max_context=9))
    assert {name: own[1.0].context for name, own in found.lengths.items()} == {"short": 2, "long": 4}
    assert list(dict.fromkeys(asked)) == [
        *itertools.product(["short", "long"], [1]), *itertools.product(["short", "long"], [2]),
        *itertools.product(["short", "long"], [3]), ("long", 4), ("short", 4), ("long", 5),
    ]  # fmt: skip
    assert set(found.gains["short"][1.0]) == {2, 3, 4}  # known without being asked for


def test_gains_until_the_end_are_at_least() -> None:
    found = last(measure({"a": lambda c: np.full(2, 9.0 - c / 10)}, shares=[1.0], delta=10, max_context=45))
    assert (found.lengths["a"][1.0], str(found.lengths["a"][1.0])) == (EffectiveLength(40, at_least=True), "≥ 40")


@pytest.mark.parametrize(("longest", "length"), [(5, 5), (10, 10), (25, 25), (30, 30), (99, 40)])
def test_no_length_is_longer_than_what_is_read(longest: int, length: int) -> None:
    losses = {"a": lambda c: np.full(2, 9.0 - min(c, longest) / 10)}
    found = last(measure(losses, shares=[1.0], delta=10, max_context=40, longest={"a": longest, "another": 1}))
    assert found.lengths["a"][1.0] == EffectiveLength(length, at_least=longest == 99)
    assert max(found.gains["a"][1.0]) == max(found.losses["a"]) == (length if longest != 10 else 10), "measured where it ends"
    if longest == 25:  # later steps, of which nothing comes, do not replace the last one that gained
        assert found.gains["a"][1.0][25] > 0.3


def test_what_is_known_on_the_way() -> None:
    steps = measure({"a": lambda c: np.full(2, 9.0 - c / 10)}, shares=[1.0], delta=10, start=5, max_context=30)
    assert [each.lengths["a"][1.0] for each in steps] == [EffectiveLength(c, at_least=True) for c in (5, 15, 15, 25, 25)]


Group = tuple[list[list[list[float]]], float, float]


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Losses of models by context and token, r and a threshold."""
    n_model, n_context, n_token = draw(st.integers(1, 3)), draw(st.integers(2, 5)), draw(st.integers(1, 12))
    nats = st.integers(0, 24).map(lambda n: n / 8)  # ties are common, sums exact
    tokens = st.lists(nats, min_size=n_token, max_size=n_token)
    contexts = st.lists(tokens, min_size=n_context, max_size=n_context)
    losses = draw(st.lists(contexts, min_size=n_model, max_size=n_model))
    return losses, draw(st.sampled_from([0.1, 0.3, 0.5, 1.0])), draw(st.sampled_from([0.01, 0.1, 0.4]))


def by_loops(losses: list[list[list[float]]], share: float, threshold: float) -> list[tuple[int, bool]]:
    """The definition, a model at a time."""
    found = []
    for own in losses:
        c = 0
        while True:
            if c + 1 == len(own):
                found.append((c + 1, True))
                break
            baseline = [min(each[c][t] for each in losses) for t in range(len(own[c]))]
            chosen = sorted(range(len(baseline)), key=lambda t: (-baseline[t], t))[: max(1, round(share * len(baseline)))]
            before = math.exp(sum(min(baseline[t], own[c][t]) for t in chosen) / len(chosen))
            after = math.exp(sum(min(baseline[t], own[c + 1][t]) for t in chosen) / len(chosen))
            if (before - after) / before < threshold:
                found.append((c + 1, False))
                break
            c += 1
    return found


@settings(max_examples=examples(60))
@given(groups())
def test_measure_is_its_definition(group: Group) -> None:
    losses, share, threshold = group
    sources = {str(i): (lambda c, own=own: np.array(own[c - 1], np.float32)) for i, own in enumerate(losses)}
    found = last(measure(sources, shares=[share], delta=1, max_context=len(losses[0]), threshold=threshold))
    lengths = [found.lengths[str(i)][share] for i in range(len(losses))]
    assert [(length.context, length.at_least) for length in lengths] == by_loops(losses, share, threshold)


@given(st.lists(st.floats(0, 9, width=32), min_size=1, max_size=30), st.floats(0.01, 1))
def test_the_hardest_are_the_hardest(baseline: list[float], share: float) -> None:
    array = np.array(baseline, np.float32)
    chosen = hardest(array, share)
    assert len(set(chosen.tolist())) == len(chosen) == max(1, round(share * len(array)))
    assert array[chosen].min() >= max(np.delete(array, chosen), default=-1)


def test_a_longer_context_that_is_worse_gains_nothing() -> None:
    assert relative_gain(np.ones(3), np.full(3, 2.0), share=1.0) == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"shares": [0.5, 0.0]}, r"r \(0.5, 0\) must be above 0 and at most 1"),
        ({"shares": []}, "1 models and 0 values of r: at least one of each"),
        ({"delta": 0}, r"delta \(0\) and start \(0\) must be at least 1"),
        ({"start": 980}, r"max_context \(1,000\) leaves no step of delta \(50\) after start \(980\); make it at least 1,030"),
        ({"threshold": 1.0}, r"threshold \(1\) must be between 0 and 1"),
    ],
)
def test_what_cannot_work(options: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        next(measure({"a": lambda c: np.ones(2)}, **options))


# --- sources whose reach is known, through the whole pipeline --------------------------------------------------------------


def measured(
    model: Oracle | TransformerXL, ids: np.ndarray, *, size: int, tgt_len: int, **options: int
) -> dict[float, EffectiveLength]:
    blocks = spread_blocks(len(ids), longest=options["max_context"], n_token=400, size=size)
    losses = CachedLosses(model, ids, blocks, tgt_len=tgt_len)
    return last(measure({"model": losses}, **options)).lengths["model"]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("k", [10, 100, 1000])
def test_one_lag_is_found(k: int) -> None:
    """Nothing gains until the token k steps back is in sight, so one step must lead beyond it."""
    found = measured(
        Oracle([k], mem_len=3 * k), repeating([k], 6 * k + 500), size=1, tgt_len=64, delta=k, start=1, max_context=3 * k
    )
    assert {length.context for length in found.values()} == {k + 1}
    assert not any(length.at_least for length in found.values())


@pytest.mark.parametrize("k", [10, 100, 1000])
def test_the_longest_of_several_lags_is_found(k: int) -> None:
    delta = k // 5
    lags = list(range(delta, k + 1, delta))
    ids = repeating(lags, 6 * k + 500)
    options = {"size": max(1, delta // 5), "tgt_len": 64, "delta": delta, "max_context": 2 * k}
    for length in measured(Oracle(lags, mem_len=2 * k), ids, **options).values():
        assert not length.at_least
        assert abs(length.context - k) <= delta


def test_a_memory_that_is_shorter_than_the_lag_hides_it() -> None:
    lags = [20, 40, 60, 80, 100]
    found = measured(Oracle(lags, mem_len=50), repeating(lags, 1500), size=4, tgt_len=10, delta=20, max_context=200)
    assert {length.context for length in found.values()} <= {40, 60}  # of a segment's last token: 50 remembered, 9 before it


def test_a_trained_model_uses_what_its_source_needs() -> None:
    """Four of five tokens repeat the one ten steps back; sixty steps of training are enough to find that out."""
    k, n_step, tgt_len, rng = 10, 60, 24, np.random.default_rng(0)
    ids = rng.integers(0, 4, 16 * (n_step * tgt_len + 1))
    for t in np.flatnonzero(rng.random(len(ids)) < 0.8):
        ids[t] = ids[t - k]
    sizes = {"n_layer": 1, "d_model": 24, "n_head": 1, "d_head": 16, "d_inner": 16, "dropout": 0.0, "mem_len": 12}
    model = TransformerXL(TransformerXLConfig(vocab_size=4, **sizes))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    rows, mems = torch.from_numpy(ids).view(16, -1), None
    for at in range(0, n_step * tgt_len, tgt_len):
        out = model(rows[:, at : at + tgt_len], mems=mems, labels=rows[:, at + 1 : at + tgt_len + 1])
        assert out.nll is not None
        mems = out.mems
        optimizer.zero_grad()
        out.nll.mean().backward()
        optimizer.step()
    found = measured(model, ids, size=1, tgt_len=tgt_len, delta=5, max_context=40)
    assert found[1.0] == found[0.5] == EffectiveLength(k, at_least=False)
