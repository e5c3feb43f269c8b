"""The time of a step: how it is measured."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.helpers import write_recipe, write_text
from transformer_xl.analysis.ablation import pace
from transformer_xl.analysis.ablation.pace import Pace, measure_paces, n_parameters
from transformer_xl.config import RunConfig, load_recipe
from transformer_xl.data.prepare import PreparedCorpus, prepare
from transformer_xl.model.kinds import make_model
from transformer_xl.training.trainer import Trainer


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    overrides = [f"data.corpus={write_text(tmp_path / 'text.txt')}"]
    return load_recipe(str(write_recipe(tmp_path / "tiny.toml")), overrides)


@pytest.fixture
def corpus(config: RunConfig, tmp_path: Path) -> PreparedCorpus:
    return prepare(config.data, config.tokenizer, cache=tmp_path / "cache")


def test_a_step_takes_the_shortest_time_seen_and_all_take_turns(
    config: RunConfig, corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: Iterator[float] = iter(
        [
            9, 0.2, 0.3, 0.4,  # one: two steps that are not counted, then as many as half a second has
            9, 0.5, 0.1,  # two
            9, 0.2, 0.6, 0.5,
            9, 0.5, 0.2,
        ]
    )  # fmt: skip
    monkeypatch.setattr(pace, "_timed_step", lambda trainer: next(times))
    turns: list[str] = []
    paces = measure_paces({"one": config, "two": config}, {"one": corpus, "two": corpus}, rounds=2, report=turns.append)
    assert turns == ["one", "two", "one", "two"]
    assert paces["one"] == Pace(seconds=0.3, median=0.45)
    assert paces["two"] == Pace(seconds=0.1, median=pytest.approx(0.15))
    assert next(times, None) is None


def test_steps_are_timed_at_all_times_of_training_where_these_differ(
    config: RunConfig, corpus: PreparedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = config.model_dump()
    model = {"kind": "vanilla", "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12}
    vanilla = RunConfig(**{**values, "model": model | {"intermediate_losses": True}})
    seen: list[float] = []

    def timed(trainer: Trainer) -> float:
        seen.append(trainer.progress)
        return 1.0 if trainer.progress < 0.25 else 0.5

    monkeypatch.setattr(pace, "_timed_step", timed)
    found = measure_paces({"vanilla": vanilla}, {"vanilla": corpus}, rounds=1)["vanilla"]
    assert seen[2:] == [0.125, 0.375, 0.625, 0.875]
    assert found.seconds == pytest.approx((1 + 3 * 0.5) / 4)  # one layer of two predicts in the first quarter only


def test_a_real_step_takes_time(config: RunConfig, corpus: PreparedCorpus) -> None:
    found = measure_paces({"tiny": config}, {"tiny": corpus}, rounds=1)["tiny"]
    assert 1e-4 < found.seconds <= found.median < 10


def test_parameters_are_those_of_the_model(config: RunConfig) -> None:
    model = make_model(config.model.completed(vocab_size=256, tgt_len=5))
    assert n_parameters(config, 256) == sum(p.numel() for p in model.parameters())
