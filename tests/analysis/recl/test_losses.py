"""Losses at a context against a plain loop, one window and one token at a time; what is kept of them, and computed again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.recl.models import IDS, MAX_LEN, lstm, vanilla
from tests.helpers import tiny_model
from transformer_xl.analysis.recl import losses as losses_module
from transformer_xl.analysis.recl.losses import Blocks, CachedLosses, context_losses, longest_context, spread_blocks
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError, TrainingError
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


@pytest.mark.parametrize("context", [1, 4, 6, 7, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_tokens_one_by_one(kind: str, context: int) -> None:
    """With a memory as long as the text a block's tokens have contexts of c to c + s - 1, whatever the segments."""
    model = KINDS[kind]()
    blocks = spread_blocks(len(IDS), longest=30, n_token=16, size=4 if kind in WHATEVER_THE_SEGMENTS else 1)
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


# --- losses that are kept ------------------------------------------------------------------------------------------------


class Kept:
    """Losses kept in a directory, how often they were computed, and what was warned of."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.computed, self.warnings = directory, [], []
        self.blocks = spread_blocks(len(IDS), longest=40, n_token=12, size=2)

        def counted(*arguments: Any, context: int, **options: Any) -> np.ndarray:
            self.computed.append(context)
            return context_losses(*arguments, context=context, **options)

        monkeypatch.setattr(losses_module, "context_losses", counted)

    def __call__(self, model: LanguageModel, ids: np.ndarray = IDS, *, tgt_len: int = 4, **options: Any) -> CachedLosses:
        own = {"blocks": self.blocks, "directory": self.directory, "warn": self.warnings.append, **options}
        return CachedLosses(model, ids, tgt_len=tgt_len, **own)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(tmp_path / "new" / "recl", monkeypatch)


def test_losses_are_computed_once(kept: Kept) -> None:
    model = tiny_model()
    first = kept(model)
    expected = context_losses(model, IDS, kept.blocks, context=6, tgt_len=4)
    for losses in (first(6), first(6), kept(model)(6)):
        np.testing.assert_array_equal(losses, expected)
    assert (kept.computed, kept.warnings, len(list(kept.directory.iterdir()))) == ([6], [], 1)
    (file,) = kept.directory.iterdir()
    np.testing.assert_array_equal(np.load(file, allow_pickle=False), expected)  # what follows the array is ignored


def test_losses_of_anything_else_are_others(kept: Kept) -> None:
    model = tiny_model()
    kept(model)(6)
    other = tiny_model()
    other.load_state_dict(model.state_dict())
    kept(other)(6)
    assert kept.computed == [6]
    with torch.no_grad():
        other.softmax.bias[0] += 1
    changed = IDS.copy()
    changed[-1] = (changed[-1] + 1) % 13
    others = [
        kept(other.with_context()),
        kept(model, changed),
        kept(model, tgt_len=5),
        kept(model.with_context(mem_len=4)),
        kept(model.with_context(clamp_len=3)),
        kept(model.with_context(same_length=True)),
        kept(model, blocks=Blocks(kept.blocks.starts + 1, 2)),
        kept(model, blocks=Blocks(kept.blocks.starts, 1)),
    ]
    for losses in others:
        losses(6)
    kept(model)(7)
    assert len(kept.computed) == len(list(kept.directory.iterdir())) == 2 + len(others)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "another's", "pickle"])
def test_damaged_losses_are_computed_again(kept: Kept, damage: str) -> None:
    model = tiny_model()
    expected = kept(model)(6)
    (file,) = kept.directory.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-40] ^= 1
    elif damage in ("another's", "pickle"):  # sound, but not these losses
        array = np.array([None], object) if damage == "pickle" else np.ones(3, np.float32)
        np.save(file.with_suffix(".other.npy"), array, allow_pickle=True)
        content = file.with_suffix(".other.npy").read_bytes()
        data = bytearray(content + losses_module.hashlib.sha256(content).digest())
    file.write_bytes({"empty": b"", "cut": data[:-1]}.get(damage, data))
    np.testing.assert_array_equal(kept(model)(6), expected)
    assert kept.warnings == [f"'{file}' is damaged; computing it again"]
    kept(model)(6)
    assert (kept.computed, len(kept.warnings)) == ([6, 6], 1)


def test_what_cannot_be_kept_is_computed_all_the_same(kept: Kept) -> None:
    kept.directory.parent.mkdir()
    kept.directory.write_text("a file")
    losses = kept(tiny_model())
    assert len(losses(6)) == len(losses(7)) == 12
    assert all(warning.startswith(f"'{kept.directory}/") or str(kept.directory) in warning for warning in kept.warnings)
    assert kept.warnings[-1].endswith("set TXL_CACHE to another place")
    assert len(kept.warnings) == 2  # not again for the second context


@pytest.mark.parametrize(("model", "longest"), [(vanilla(), MAX_LEN), (tiny_model(mem_len=0), 3)])
def test_contexts_that_change_nothing_are_not_computed(kept: Kept, model: LanguageModel, longest: int) -> None:
    losses = kept(model)
    np.testing.assert_array_equal(losses(longest + 20), losses(longest))
    np.testing.assert_array_equal(losses(longest + 30), losses(longest))
    losses(longest - 1)
    assert kept.computed == [longest, longest - 1]


def test_interrupted_losses_are_not_kept(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    model = tiny_model()
    kept(model)(6)
    with pytest.raises(KeyboardInterrupt):
        kept(model, on_tokens=interrupt)(7)
    assert len(list(kept.directory.iterdir())) == 1
    kept(model)(6)
    kept(model)(7)
    assert kept.computed == [6, 7, 7]


def test_losses_that_are_not_finite_are_an_error(kept: Kept) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.softmax.bias[0] = torch.nan
    with pytest.raises(TrainingError, match="'runs/bad' has losses that are not finite after 6 tokens of context"):
        kept(model, name="runs/bad")(6)
    assert not kept.directory.exists()
