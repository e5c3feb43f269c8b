"""The plan of an ablation, as it lies in its directory."""

import json

from transformer_xl.analysis.ablation.plan import Plan
from transformer_xl.analysis.ablation.variants import make_variants


def test_a_plan_survives_its_file() -> None:
    plan = Plan(
        make_variants(["quickstart"], recurrence=["yes", "no"]), seeds=2, minutes=3, lengths=(0, 9), exact=True, tokens=7
    )
    stored = json.loads(json.dumps(plan.as_dict()))
    assert Plan.from_dict(stored) == plan
    assert list(stored) == ["variants", "seeds", "steps", "minutes", "validations", "lengths", "exact", "tokens"]
    assert list(stored["variants"][0]) == ["name", "recipe", "labels", "config"]  # files of today are read tomorrow


def test_seeds_follow_each_other_and_every_variant_has_its_turn_first() -> None:
    plan = Plan(make_variants(["quickstart"], recurrence=["yes", "no"], overrides=["train.seed=4"]), seeds=2)
    assert [trial.name for trial in plan.trials] == [
        "recurrence-seed4",
        "no-recurrence-seed4",
        "recurrence-seed5",
        "no-recurrence-seed5",
    ]


def test_time_is_a_budget_of_those_that_have_no_other() -> None:
    variants = make_variants(["quickstart"], recurrence=["yes", "no"], overrides=["train.max_minutes=5"])
    assert Plan(variants).paced == list(variants)
    assert [Plan(variants, minutes=2).minutes_of(variant) for variant in variants] == [2, 2]
    assert Plan(variants, steps=8, minutes=2).paced == []
