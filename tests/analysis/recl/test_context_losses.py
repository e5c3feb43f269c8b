"""Losses at a context against a plain loop, one window and one token at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.recl.models import IDS, MAX_LEN, lstm, vanilla
from tests.helpers import tiny_model
from transformer_xl.analysis.recl.losses import Blocks, context_losses, longest_context, spread_blocks
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Mems
from transformer_xl.model.vanilla import Vanilla


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


def by_loop(model: LanguageModel, blocks: Blocks, context: int, tgt_len: int) -> np.ndarray:
    """Token j of a block has a context of `context` + j; a vanilla model makes use of the last `MAX_LEN` of them."""
    nats = []
    for start in blocks.starts:
        for j in range(blocks.size):
            before = context + j
            if isinstance(model, Vanilla):
                before = min(before, MAX_LEN)
            nats.append(nats_of(model, IDS[start + j - before : start + j + 1], tgt_len))
    return np.array(nats)


KINDS = {
    "transformer_xl": lambda: tiny_model(mem_len=50),
    "clamped": lambda: tiny_model(mem_len=50, clamp_len=4),
    "zeros first": lambda: tiny_model(mem_len=50, zero_first_memory=True),
    "shaw": lambda: tiny_model(mem_len=50, attention="shaw", max_klen=60),
    "vaswani": lambda: tiny_model(mem_len=50, attention="vaswani"),
    "vanilla": vanilla,
    "lstm": lstm,
}
WHATEVER_THE_SEGMENTS = set(KINDS) - {"vaswani", "zeros first"}  # these count from a segment's end, or forget zeros as it ends


@pytest.mark.parametrize("context", [1, 3, 6, 7, 8, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_tokens_one_by_one(kind: str, context: int) -> None:
    """With a memory as long as the text a block's tokens have contexts of c to c + s - 1, whatever the segments."""
    model = KINDS[kind]()
    blocks = spread_blocks(len(IDS), longest=30, n_token=20, size=4 if kind in WHATEVER_THE_SEGMENTS else 1)
    found = context_losses(model, IDS, blocks, context=context, tgt_len=9, batch_size=3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, by_loop(model, blocks, context, 9), atol=2e-4)


@pytest.mark.parametrize(
    "options", [{}, {"same_length": True}, {"attention": "al_rfou", "n_head": 2, "d_head": 5, "max_klen": 9}]
)
@pytest.mark.parametrize("context", [1, 4, 5, 13, 22])
def test_a_short_memory_is_filled_in_segments(context: int, options: dict[str, Any]) -> None:
    model = tiny_model(mem_len=5, **options)
    blocks = spread_blocks(len(IDS), longest=30, n_token=9, size=1)
    found = context_losses(model, IDS, blocks, context=context, tgt_len=4)
    np.testing.assert_allclose(found, by_loop(model, blocks, context, 4), atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_outside_the_window_is_not_read(kind: str) -> None:
    """An LSTM begins with a state of zeros, others with an empty memory; nothing comes from before, nor from after."""
    model, blocks = KINDS[kind](), Blocks(np.array([30, 60]), 3)
    others = IDS.copy()
    window = {t for start in blocks.starts for t in range(start - 10, start + 3)}
    others[[t for t in range(len(IDS)) if t not in window]] = 0
    found, again = (context_losses(model, ids, blocks, context=10, tgt_len=6) for ids in (IDS, others))
    np.testing.assert_array_equal(found, again)
    others[20] = (others[20] + 1) % 13
    if kind != "vanilla":  # it sees the last 7 only
        assert (context_losses(model, others, blocks, context=10, tgt_len=6)[:3] != found[:3]).all()


@pytest.mark.parametrize(
    ("model", "size", "longest"),
    [
        (tiny_model(mem_len=5), 1, 4 + 2 * 8),
        (tiny_model(mem_len=5), 3, 4 + 2 * 8 - 2),
        (tiny_model(mem_len=5), 6, 8 + 2 * 8 - 5),
        (tiny_model(mem_len=0), 2, 3),
        (vanilla(), 3, MAX_LEN),
        (lstm().with_context(mem_len=0), 1, 4),
        (lstm(), 1, None),
    ],
)
def test_no_context_matters_beyond_the_longest(model: LanguageModel, size: int, longest: int | None) -> None:
    tgt_len = 4
    assert longest_context(model, tgt_len=tgt_len, size=size) == longest
    if longest is None:
        return
    blocks = spread_blocks(len(IDS), longest=40, n_token=24, size=size)
    at, beyond, below = (context_losses(model, IDS, blocks, context=longest + d, tgt_len=tgt_len) for d in (0, 13, -1))
    np.testing.assert_allclose(at, beyond, atol=1e-4)
    if not (model.mem_len and tgt_len > 1 and model.config.kind == "transformer_xl"):  # what is furthest away may not matter
        assert not np.allclose(at, below, atol=1e-4)


@given(st.integers(1, 400), st.integers(1, 100), st.integers(1, 500), st.integers(1, 9))
def test_blocks_are_spread_evenly(n_id: int, longest: int, n_token: int, size: int) -> None:
    if n_id < longest + size:
        with pytest.raises(
            CorpusError, match=rf"the text has {n_id:,} tokens, and a context of {longest:,} with {size} to score"
        ):
            spread_blocks(n_id, longest=longest, n_token=n_token, size=size)
        return
    blocks = spread_blocks(n_id, longest=longest, n_token=n_token, size=size)
    starts, n = blocks.starts, len(blocks.starts)
    assert starts[0] == longest
    assert starts[-1] + size <= n_id
    assert n == max(1, min(n_token // size, (n_id - longest) // size))
    gaps = np.diff(starts)
    assert (gaps >= size).all()
    assert n < 3 or gaps.max() - gaps.min() <= 1
    assert blocks.n_token == n * size


def test_progress_and_mode() -> None:
    model, seen = tiny_model().train(), []
    blocks = spread_blocks(len(IDS), longest=10, n_token=15, size=3)
    context_losses(model, IDS, blocks, context=5, tgt_len=4, batch_size=2, on_tokens=seen.append)
    assert (seen, model.training) == ([6, 6, 3], True)


def test_what_cannot_be_read() -> None:
    blocks, model = Blocks(np.array([5]), 2), tiny_model()
    with pytest.raises(ConfigError, match=r"context \(6\) reaches beyond the text before the first block \(5\)"):
        context_losses(model, IDS, blocks, context=6, tgt_len=4)
    with pytest.raises(ConfigError, match=r"context \(0\), tgt_len \(4\) and batch_size \(32\) must be at least 1"):
        context_losses(model, IDS, blocks, context=0, tgt_len=4)
    with pytest.raises(TokenizerError, match="token id 13 is outside the vocabulary"):
        context_losses(model, IDS + 1, blocks, context=5, tgt_len=4)
