"""Effective lengths by hand and by loops; losses at a context against one window at a time."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples, tiny_model
from transformer_xl.config.model import LstmConfig, VanillaConfig
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.memory import Mems
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.tools.recl import context_losses, effective_lengths

IDS = np.random.default_rng(0).integers(0, 13, 90).astype(np.uint16)
MAX_LEN = 7


def test_only_what_is_needed_is_asked_for() -> None:
    """All models at each c, for the baseline, and at c + Δ only those that still gain."""
    asked: set[tuple[str, int]] = set()

    def gaining_until(name: str, most: int) -> Callable[[int], np.ndarray]:
        return lambda context: asked.add((name, context)) or np.full(3, 9.0 - min(context, most))

    losses = {"short": gaining_until("short", 2), "long": gaining_until("long", 4)}
    assert effective_lengths(losses, share=1.0, delta=1, max_context=9) == {"short": 2, "long": 4}
    assert asked == {(name, c) for name in losses for c in (1, 2, 3, 4)} | {("long", 5)}
    assert effective_lengths({"a": lambda c: np.full(2, 9.0 - c)}, share=1.0, delta=10, max_context=40) == {"a": 40}


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[list[list[float]]], float, float]:
    """Losses of models by context and token, r and a threshold."""
    n_model, n_context, n_token = draw(st.integers(1, 3)), draw(st.integers(2, 5)), draw(st.integers(1, 12))
    nats = st.integers(0, 24).map(lambda n: n / 8)  # ties are common, sums exact
    tokens = st.lists(nats, min_size=n_token, max_size=n_token)
    contexts = st.lists(tokens, min_size=n_context, max_size=n_context)
    losses = draw(st.lists(contexts, min_size=n_model, max_size=n_model))
    return losses, draw(st.sampled_from([0.1, 0.3, 0.5, 1.0])), draw(st.sampled_from([0.01, 0.1, 0.4]))


def by_loops(losses: list[list[list[float]]], share: float, threshold: float) -> list[int]:
    """The definition, a model at a time."""
    found = []
    for own in losses:
        c = 0
        while c + 1 < len(own):
            baseline = [min(each[c][t] for each in losses) for t in range(len(own[c]))]
            chosen = sorted(range(len(baseline)), key=lambda t: (-baseline[t], t))[: max(1, round(share * len(baseline)))]
            before = math.exp(sum(min(baseline[t], own[c][t]) for t in chosen) / len(chosen))
            after = math.exp(sum(min(baseline[t], own[c + 1][t]) for t in chosen) / len(chosen))
            if (before - after) / before < threshold:
                break
            c += 1
        found.append(c + 1)
    return found


@settings(max_examples=examples(60))
@given(groups())
def test_lengths_are_their_definition(group: tuple[list[list[list[float]]], float, float]) -> None:
    losses, share, threshold = group
    sources = {str(i): (lambda c, own=own: np.array(own[c - 1], np.float32)) for i, own in enumerate(losses)}
    found = effective_lengths(sources, share=share, delta=1, max_context=len(losses[0]), threshold=threshold)
    assert list(found.values()) == by_loops(losses, share, threshold)


def loud(model: LanguageModel) -> LanguageModel:
    """Random weights of a size at which every token of the context matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model.eval()


SMALL: dict[str, Any] = {"vocab_size": 13, "n_layer": 2, "d_model": 6}
KINDS: dict[str, Callable[[], LanguageModel]] = {
    "transformer_xl": lambda: tiny_model(mem_len=50),
    "clamped": lambda: tiny_model(mem_len=50, clamp_len=4),
    "shaw": lambda: tiny_model(mem_len=50, attention="shaw", max_klen=60),
    "vanilla": lambda: loud(Vanilla(VanillaConfig(max_len=MAX_LEN, n_head=2, d_head=5, d_inner=9, **SMALL))),
    "lstm": lambda: loud(Lstm(LstmConfig(d_hidden=10, **SMALL))),
}


@torch.no_grad()
def nats_of(model: LanguageModel, window: np.ndarray, tgt_len: int) -> float:
    """Nats of a window's last token, read in segments that end before it."""
    ids, target = torch.from_numpy(window[None, :-1].astype(np.int64)), int(window[-1])
    mems: Mems | None = None
    first, logits = ids.shape[1] % tgt_len, None
    for segment in ([ids[:, :first]] if first else []) + list(ids[:, first:].split(tgt_len, dim=1)):
        if segment.shape[1]:
            out = model(segment, mems=mems)
            mems, logits = out.mems, out.logits
    assert logits is not None
    return -logits[0, -1].log_softmax(-1)[target].item()


@pytest.mark.parametrize("context", [1, 4, 6, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_tokens_one_by_one(kind: str, context: int) -> None:
    """A block's tokens have contexts of c to c + s - 1; those of a vanilla model end at `MAX_LEN`."""
    model, starts, size = KINDS[kind](), np.array([30, 41, 42, 70]), 4
    found = context_losses(model, IDS, starts, size=size, context=context, tgt_len=9)
    least = min(context, MAX_LEN - size + 1) if kind == "vanilla" else context
    expected = [nats_of(model, IDS[at - least : at + j + 1], 9) for at in starts for j in range(size)]
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("context", [1, 4, 5, 13, 22])
@pytest.mark.parametrize("options", [{}, {"same_length": True}])
def test_a_short_memory_is_filled_in_segments(context: int, options: dict[str, Any]) -> None:
    model, starts = tiny_model(mem_len=5, **options), np.arange(30, 39)
    found = context_losses(model, IDS, starts, size=1, context=context, tgt_len=4)
    np.testing.assert_allclose(found, [nats_of(model, IDS[at - context : at + 1], 4) for at in starts], atol=2e-4)
