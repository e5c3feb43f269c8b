"""Losses that are kept: computed once, and again where what is on the disk is damaged or of something else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.analysis.recl.models import IDS, MAX_LEN, vanilla
from tests.helpers import tiny_model
from transformer_xl.analysis.recl import losses as losses_module
from transformer_xl.analysis.recl.losses import Blocks, CachedLosses, context_losses, spread_blocks
from transformer_xl.errors import TrainingError
from transformer_xl.model.language_model import LanguageModel


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
        other.softmax.bias[0] += 1  # pyright: ignore
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
        model.softmax.bias[0] = torch.nan  # pyright: ignore
    with pytest.raises(TrainingError, match="'runs/bad' has losses that are not finite after 6 tokens of context"):
        kept(model, name="runs/bad")(6)
    assert not kept.directory.exists()
