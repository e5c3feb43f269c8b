"""A run that learns answers goes on bit by bit, in any number of processes, and its best checkpoint predicts answers best."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.training.helpers import Lines, differing, entries, run_bits, stop_at
from transformer_xl.conversion.export import export
from transformer_xl.training.run import train

OVERRIDES = (
    "data.documents=lines",
    "data.shuffle=documents",
    "train.loss=answer",
    "train.label_smoothing=0.1",
    "train.reset_at_documents=true",
    "train.max_steps=12",
    "train.eval_interval=4",
    "train.log_interval=1",
    "train.average=swa",
)
pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of a word, a tab and the word from its end."""
    home, draws = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    words = ["".join(draws.choice(list("abcde"), n)) for n in draws.integers(1, 12, 150)]
    (home / "train.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words[:120]))
    (home / "valid.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words[120:]))
    return home


def test_a_run_goes_on_bit_by_bit(pairs: Path, recipe: str, tmp_path: Path) -> None:
    how = {"overrides": [*OVERRIDES, "train.tbptt_segments=2", "train.accumulate=2"], "corpus": str(pairs)}
    train(recipe, out=tmp_path / "whole", display=Lines(), **how)
    train(recipe, out=tmp_path / "parts", display=stop_at(5), **how)
    train(None, out=tmp_path / "parts", resume=True, display=Lines())
    assert differing(run_bits(tmp_path / "whole"), run_bits(tmp_path / "parts")) == []


def test_what_is_said_and_kept_is_of_answers(pairs: Path, recipe: str, tmp_path: Path) -> None:
    shown = Lines()
    outcome = train(recipe, out=tmp_path / "run", overrides=list(OVERRIDES), corpus=str(pairs), display=shown)
    n = sum(len(line.split("\t")[1]) for line in (pairs / "valid.tsv").read_text().splitlines(keepends=True))
    assert outcome.score and outcome.score_without_memory
    validations = [each for each in entries(tmp_path / "run") if each["kind"] == "valid"]
    assert all(0 < each["scored"] < n and each["bpc"] is None for each in validations)  # as far as eval.max_tokens goes
    best = min((each["loss"], each["step"]) for each in validations)
    assert f"{outcome.score.tokens:,} of about" in "".join(shown.said) and "nats per answer token" in shown.said[-2]
    assert best[1] in (4, 8, 12)
    export(tmp_path / "run", tmp_path / "shared", kind="native")
    assert re.search(r"validation split.*: [0-9.]+ nats per answer token\n", (tmp_path / "shared" / "README.md").read_text())
