"""What steps and settings are made of a budget, and how the time of a step is measured."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.helpers import write_recipe, write_text
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import RunConfig
from transformer_xl.data.prepare import PreparedCorpus, prepare
from transformer_xl.tools import budget
from transformer_xl.tools.budget import budgeted, measure_paces
from transformer_xl.tools.variants import AblationPlan, Trial, Variant
from transformer_xl.training.trainer import Trainer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budget")


@pytest.fixture(scope="module")
def config(place: Path) -> RunConfig:
    overrides = [f"data.corpus={write_text(place / 'text.txt')}"]
    return load_recipe(str(write_recipe(place / "tiny.toml")), overrides)


@pytest.fixture(scope="module")
def corpus(config: RunConfig, place: Path) -> PreparedCorpus:
    return prepare(config.data, config.tokenizer, cache=place / "cache")


def with_train(config: RunConfig, **changes: object) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def trial_of(config: RunConfig) -> Trial:
    return Trial(Variant("it", "tiny", {}, config), 7)


def test_equal_time_is_steps_by_pace(config: RunConfig) -> None:
    paces = {"recurrence": 0.5, "no-recurrence": 0.25}
    config = with_train(config, max_tokens=77, max_epochs=0.5)
    plan = AblationPlan(tuple(Variant(name, name, {}, config) for name in paces), minutes=2)
    trains = [budgeted(plan, Trial(own, 0), paces).train for own in plan.variants]
    assert [train.max_steps for train in trains] == [240, 480]
    assert {(train.max_minutes, train.max_tokens, train.max_epochs) for train in trains} == {(None, None, None)}


def test_a_recipes_own_minutes_become_steps(config: RunConfig) -> None:
    trial = trial_of(with_train(config, max_steps=None, max_minutes=3))
    train = budgeted(AblationPlan((trial.variant,)), trial, {"it": 1.0}).train
    assert (train.max_steps, train.max_minutes, train.seed) == (180, None, 7)
    trial = trial_of(with_train(config, max_steps=50, max_minutes=3))
    assert budgeted(AblationPlan((trial.variant,)), trial, {"it": 1.0}).train.max_steps == 50


def test_equal_steps_leave_no_other_budget(config: RunConfig) -> None:
    trial = trial_of(with_train(config, max_minutes=3, max_tokens=5))
    train = budgeted(AblationPlan((trial.variant,), steps=12), trial, {}).train
    assert (train.max_steps, train.max_minutes, train.max_tokens) == (12, None, None)


def test_all_variants_are_validated_on_the_same_text(config: RunConfig) -> None:
    short = config.model_copy(update={"eval": config.eval.model_copy(update={"max_tokens": 40})})
    variants = tuple(Variant(name, name, {}, own) for name, own in (("long", config), ("short", short)))
    plan = AblationPlan(variants, steps=5)
    assert [budgeted(plan, Trial(variant, 0), {}).eval.max_tokens for variant in variants] == [40, 40]


def test_validations_are_spread_over_the_budget(config: RunConfig) -> None:
    trial = trial_of(config)
    assert budgeted(AblationPlan((trial.variant,), steps=25, validations=10), trial, {}).train.eval_interval == 3
    assert budgeted(AblationPlan((trial.variant,), steps=25), trial, {}).train.eval_interval == config.train.eval_interval
    own = trial_of(with_train(config, max_epochs=2))
    assert budgeted(AblationPlan((own.variant,), validations=10), own, {}).train.eval_interval == config.train.eval_interval


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
    monkeypatch.setattr(budget, "_timed_step", lambda trainer: next(times))
    turns: list[str] = []
    paces = measure_paces({"one": config, "two": config}, {"one": corpus, "two": corpus}, rounds=2, report=turns.append)
    assert turns == ["one", "two", "one", "two"]
    assert paces == {"one": 0.3, "two": 0.1}
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

    monkeypatch.setattr(budget, "_timed_step", timed)
    found = measure_paces({"vanilla": vanilla}, {"vanilla": corpus}, rounds=1)["vanilla"]
    assert seen[2:] == [0.125, 0.375, 0.625, 0.875]
    assert found == pytest.approx((1 + 3 * 0.5) / 4)  # one layer of two predicts in the first quarter only


def test_a_real_step_takes_time(config: RunConfig, corpus: PreparedCorpus) -> None:
    found = measure_paces({"tiny": config}, {"tiny": corpus}, rounds=1)["tiny"]
    assert 1e-4 < found < 10
