"""What is left to do of an ablation is done once, by whoever comes first, and a run that fails does not stop the others."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked
from tests.training.helpers import write_recipe, write_text
from transformer_xl.checkpoint.open_run import Opened
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.reading.evaluation import Score
from transformer_xl.tools import worker
from transformer_xl.tools.ablation import Ablation
from transformer_xl.tools.table import as_text, make_table
from transformer_xl.tools.variants import AblationPlan, make_variants
from transformer_xl.tools.worker import Worker
from transformer_xl.training import record
from transformer_xl.training.trainer import Trainer


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "_tensorboard", lambda *_: None)
    monkeypatch.setattr(record, "draw_curve", lambda entries, config, path, **_: path)  # takes longer than to train
    return tmp_path


def begun(place: Path, *recurrence: str, seeds: int = 1) -> Ablation:
    """A tiny recipe with recurrence, without, or both."""
    recipe, text = write_recipe(place / "tiny.toml"), write_text(place / "text.txt")
    overrides = ["train.eval_interval=99", "train.checkpoint_interval=99"]
    variants = make_variants([str(recipe)], recurrence=recurrence, overrides=overrides, corpus=str(text))
    ablation = Ablation(place / "ablation", AblationPlan(variants, seeds=seeds, steps=3, lengths=(0,), tokens=60))
    ablation.begin()
    return ablation


def finish(directory: str) -> list[str]:
    """Do what is left, in a process of its own; returns the runs that others are at."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    record._tensorboard = lambda *_: None
    record.draw_curve = lambda entries, config, path, **_: path
    return Worker(Ablation.open(Path(directory)), quiet=True).go_on()


def test_two_processes_share_the_runs(place: Path) -> None:
    ablation = begun(place, "yes", seeds=2)
    both = run_forked(f"{__name__}:finish", 2, str(ablation.directory))
    assert [] in both  # the last one sees all of them done
    for trial in ablation.plan.trials:
        result = ablation.result(trial)
        assert result is not None
        assert result["done"]
        starts = json.loads((ablation.path_of(trial) / "environment.json").read_text())
        assert len(starts) == 1  # trained once
    assert as_text(make_table(ablation)).count("±") > 2


def test_a_run_that_fails_is_noted_and_the_others_go_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.train_step

    def failing(self: Trainer) -> Any:
        if self.model.mem_len:
            raise CorpusError("it came to nothing")
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", failing)
    ablation = begun(place, "yes", "no")
    assert Worker(ablation).go_on() == []
    messages = capsys.readouterr().err
    file = ablation.result_path(ablation.plan.trials[0])
    assert f"recurrence-seed0 failed: it came to nothing; to try again, delete {file}" in messages
    first, second = make_table(ablation).rows
    assert (first.failed, first.loss, second.failed) == (1, None, 0)
    assert second.loss is not None
    Worker(ablation).go_on()
    assert capsys.readouterr().err.splitlines() == [f"{ablation.directory}: 2 variants, 2 runs, 2 of them done"]


def test_a_run_that_cannot_be_scored_is_noted_and_the_others_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = worker.score

    def failing(opened: Opened, *arguments: Any, **options: Any) -> Score:
        if opened.model.mem_len:
            raise ConfigError("it has no length")
        return score(opened, *arguments, **options)

    monkeypatch.setattr(worker, "score", failing)
    ablation = begun(place, "yes", "no")
    Worker(ablation, quiet=True).go_on()
    results = [ablation.result(trial) for trial in ablation.plan.trials]
    assert [result and result.get("failed") for result in results] == ["it has no length", None]
    assert "Failed, and left out of the means: 1 of recurrence." in as_text(make_table(ablation))


def test_losses_that_are_no_numbers_are_a_failure(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "score", lambda *_, **__: Score(math.nan, 9, 9, 9, 1.0))
    ablation = begun(place, "yes", "no")
    Worker(ablation, quiet=True).go_on()
    result = ablation.result(ablation.plan.trials[0])
    assert result is not None
    assert result["failed"] == "losses with an attention length of 6 are not finite"
    assert "Failed, and left out of the means: 1 of recurrence, 1 of no-recurrence." in as_text(make_table(ablation))
