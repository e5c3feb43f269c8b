"""The same ids train the same model, bit by bit, whether they come from a text or from files of ids."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.training.helpers import Lines, differing, entries, run_bits, stop_at
from transformer_xl.data.named import SPLITS
from transformer_xl.errors import CheckpointError
from transformer_xl.training.run import train

OF_THE_TEXT = ("config", "tokenizer", "log", "state")
STEPS = ("train.max_steps=12", "train.eval_interval=6")
pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def corpora(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lines of a text, in three splits, as `text`, `rows` (.npy, one document a split) and `lines` (.jsonl)."""
    home = tmp_path_factory.mktemp("corpora")
    for name in ("text", "rows", "lines"):
        (home / name).mkdir()
    lines = text.read_bytes().splitlines(keepends=True)
    n = len(lines)
    for split, part in zip(SPLITS, (lines[: n // 2], lines[n // 2 : -n // 4], lines[-n // 4 :]), strict=True):
        (home / "text" / f"{split}.txt").write_bytes(b"".join(part))
        np.save(home / "rows" / f"{split}.npy", np.frombuffer(b"".join(part), np.uint8))
        (home / "lines" / f"{split}.jsonl").write_text("".join(f"{json.dumps(list(line))}\n" for line in part))
    return home


@pytest.mark.parametrize(
    ("ids", "settings"),
    [
        ("rows", ()),
        ("lines", ("data.documents=lines", "train.reset_at_documents=true", "data.shuffle=documents")),
    ],
)
def test_ids_train_what_their_text_trains(
    corpora: Path, recipe: str, tmp_path: Path, ids: str, settings: tuple[str, ...]
) -> None:
    overrides = [*STEPS, *settings]
    shown = Lines()
    of_text = train(recipe, out=tmp_path / "text", corpus=str(corpora / "text"), overrides=overrides, display=Lines())
    overrides += ["tokenizer.vocab_size=256"]
    of_ids = train(recipe, out=tmp_path / "ids", corpus=str(corpora / ids), overrides=overrides, display=shown)
    one, other = run_bits(tmp_path / "text"), run_bits(tmp_path / "ids")
    assert set(differing(one, other)) <= set(OF_THE_TEXT)
    losses = [[entry["loss"] for entry in entries(tmp_path / name) if "loss" in entry] for name in ("text", "ids")]
    assert losses[0] == losses[1] and len(losses[0]) > 4
    assert of_text.score and of_ids.score and of_text.score.nats == of_ids.score.nats
    assert "vocabulary 256 (ids)" in shown.said[0]
    assert shown.said[1] == f"{corpora / ids} holds ids, which are read as they are (tokenizer.kind=ids)"
    assert any("bits per id; " in line or "bits per id (" in line for line in shown.said)
    assert not any("character" in line for line in shown.said)


def test_padding_that_is_left_out_is_said_at_every_start(recipe: str, tmp_path: Path) -> None:
    np.save(tmp_path / "it.npy", [[1 + (i + j) % 3 if j < 10 + i % 9 else 7 for j in range(24)] for i in range(200)])
    for out in ("first", "second"):  # which finds the corpus prepared
        train(recipe, out=tmp_path / out, corpus=str(tmp_path / "it.npy"), overrides=STEPS, display=(shown := Lines()))
        ids = "it.npy holds ids, which are read as they are (tokenizer.kind=ids)"
        assert f"{ids}, but for 7 at the ends of rows (tokenizer.pad_id)" in shown.said[1]


def test_a_run_on_ids_goes_on_bit_by_bit(corpora: Path, recipe: str, tmp_path: Path) -> None:
    corpus, steps = str(corpora / "lines"), ["train.max_steps=12", "train.log_interval=1"]
    train(recipe, out=tmp_path / "whole", overrides=steps, corpus=corpus, display=Lines())
    train(recipe, out=tmp_path / "parts", overrides=steps, corpus=corpus, display=stop_at(5))
    train(None, out=tmp_path / "parts", resume=True, display=Lines())
    assert differing(run_bits(tmp_path / "whole"), run_bits(tmp_path / "parts")) == []
    with pytest.raises(CheckpointError, match=r"tokenizer.kind \('byte'\) differs"):
        train(None, out=tmp_path / "parts", overrides=["tokenizer.kind=byte"], resume=True, display=Lines())


def test_lines_that_are_trained_on_as_text_go_on_as_text(corpora: Path, recipe: str, tmp_path: Path) -> None:
    corpus, out = str(corpora / "lines"), tmp_path / "run"
    overrides, shown = ["train.max_steps=2", "tokenizer.kind=byte", "eval.tgt_len=50"], Lines()
    train(recipe, out=out, overrides=overrides, corpus=corpus, display=shown)
    train(None, out=out, overrides=["train.max_steps=3"], resume=True, display=shown)
    assert sum("vocabulary 256 (byte)" in line for line in shown.said) == 2
