"""What steps and settings are made of a budget."""

from pathlib import Path

import pytest

from tests.training.helpers import write_recipe
from transformer_xl.analysis.ablation.budget import budgeted
from transformer_xl.analysis.ablation.pace import Pace
from transformer_xl.analysis.ablation.plan import Plan, Trial
from transformer_xl.analysis.ablation.variants import Variant
from transformer_xl.config import RunConfig, load_recipe


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_recipe(str(write_recipe(tmp_path / "tiny.toml")))


def with_train(config: RunConfig, **changes: object) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def trial_of(config: RunConfig) -> Trial:
    return Trial(Variant("it", "tiny", {}, config), 7)


def test_equal_time_is_steps_by_pace(config: RunConfig) -> None:
    paces = {"recurrence": Pace(0.5, 0.6), "no-recurrence": Pace(0.25, 0.3)}
    config = with_train(config, max_tokens=77, max_epochs=0.5)
    plan = Plan(tuple(Variant(name, name, {}, config) for name in paces), minutes=2)
    trains = [budgeted(plan, Trial(own, 0), paces).train for own in plan.variants]
    assert [train.max_steps for train in trains] == [240, 480]
    assert {(train.max_minutes, train.max_tokens, train.max_epochs) for train in trains} == {(None, None, None)}


def test_a_recipes_own_minutes_become_steps(config: RunConfig) -> None:
    trial = trial_of(with_train(config, max_steps=None, max_minutes=3))
    train = budgeted(Plan((trial.variant,)), trial, {"it": Pace(1.0, 1.0)}).train
    assert (train.max_steps, train.max_minutes, train.seed) == (180, None, 7)
    trial = trial_of(with_train(config, max_steps=50, max_minutes=3))
    assert budgeted(Plan((trial.variant,)), trial, {"it": Pace(1.0, 1.0)}).train.max_steps == 50


def test_equal_steps_leave_no_other_budget(config: RunConfig) -> None:
    trial = trial_of(with_train(config, max_minutes=3, max_tokens=5))
    train = budgeted(Plan((trial.variant,), steps=12), trial, {}).train
    assert (train.max_steps, train.max_minutes, train.max_tokens) == (12, None, None)


def test_all_variants_are_validated_on_the_same_text(config: RunConfig) -> None:
    short = config.model_copy(update={"eval": config.eval.model_copy(update={"max_tokens": 40})})
    variants = tuple(Variant(name, name, {}, own) for name, own in (("long", config), ("short", short)))
    plan = Plan(variants, steps=5)
    assert [budgeted(plan, Trial(variant, 0), {}).eval.max_tokens for variant in variants] == [40, 40]


def test_validations_are_spread_over_the_budget(config: RunConfig) -> None:
    trial = trial_of(config)
    assert budgeted(Plan((trial.variant,), steps=25, validations=10), trial, {}).train.eval_interval == 3
    assert budgeted(Plan((trial.variant,), steps=25), trial, {}).train.eval_interval == config.train.eval_interval
    own = trial_of(with_train(config, max_epochs=2))
    assert budgeted(Plan((own.variant,), validations=10), own, {}).train.eval_interval == config.train.eval_interval
