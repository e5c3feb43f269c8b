"""What an ablation compares, and its plan as it lies in its directory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from transformer_xl.config.recipes import load_recipe
from transformer_xl.errors import ConfigError
from transformer_xl.model.attention.kinds import ATTENTION
from transformer_xl.tools.variants import AblationPlan, axes, make_variants


def test_one_recipe_is_compared_with_all_combinations_its_own_first() -> None:
    variants = make_variants(["quickstart"], overrides=["model.attention=shaw"])
    assert (
        len(variants) == len({variant.name for variant in variants}) == 20
    )  # not al_rfou, which needs heads as wide as the model
    first, last = variants[0], variants[-1]
    assert first.labels == {"recurrence": "yes", "attention": "shaw", "loss": "full"}
    assert first.config == load_recipe("quickstart", ["model.attention=shaw"])
    assert last.name == "no-recurrence-alibi-half"
    assert (last.config.model.mem_len, last.config.eval_mem_len, last.config.train.loss) == (0, 0, "half")
    changes = {"model": {"mem_len": 0, "attention": "alibi"}, "train": {"loss": "half"}, "eval": {"mem_len": 0}}
    assert last.config == first.config.changed(**changes)  # and nothing else


def test_a_registered_kind_of_attention_is_varied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION, "mine", type("Mine", (ATTENTION["shaw"],), {"name": "mine"}))
    assert axes()["attention"][-1] == "mine"
    assert [variant.labels["attention"] for variant in make_variants(["shakespeare-small"], attention=axes()["attention"])][
        -1
    ] == "mine"


def test_kinds_that_cannot_have_a_recipes_sizes_are_left_out_unless_they_are_named() -> None:
    kinds = {variant.labels["attention"] for variant in make_variants(["wt103-base"])}
    assert kinds == {"transformer_xl", "shaw", "vaswani", "al_rfou", "alibi"}
    with pytest.raises(ConfigError, match=r"^variant 'rotary' of recipe 'wt103-base': d_head \(41\) must be even"):
        make_variants(["wt103-base"], attention=["rotary"])


def test_rotary_positions_are_compared_without_a_limit_of_distances() -> None:
    own, rotary = make_variants(["enwik8-base"], attention=["transformer_xl", "rotary"])
    assert (own.config.eval.clamp_len, rotary.config.eval.clamp_len) == (820, None)


def test_memory_of_the_same_length_goes_with_recurrence() -> None:
    (variant,) = make_variants(
        ["quickstart"], recurrence=["no"], overrides=["model.same_length=true", "eval.same_length=true", "eval.mem_len=9"]
    )
    assert not variant.config.model.model_dump()["same_length"]
    assert variant.config.eval.same_length is None
    assert variant.config.eval_mem_len == 0


def test_a_backend_of_the_papers_attention_is_left_out_where_there_is_another() -> None:
    own, other = make_variants(["quickstart"], attention=["transformer_xl", "vaswani"], overrides=["train.attention=equation"])
    assert (own.config.train.attention, other.config.train.attention) == ("equation", "auto")


def test_other_kinds_are_trained_as_they_are(tmp_path: Path) -> None:
    recipe = tmp_path / "lstm.toml"
    recipe.write_text('[model]\nkind = "lstm"\n')
    variants = make_variants([str(recipe), "quickstart"], recurrence=["yes", "no"], loss=["half"])
    assert [variant.name for variant in variants] == [
        "lstm-half",
        "quickstart-recurrence-half",
        "quickstart-no-recurrence-half",
    ]
    assert variants[0].labels == {"loss": "half"}
    assert variants[0].config.train.loss == "half"


def test_a_setting_that_one_of_the_recipes_does_not_have() -> None:
    with pytest.raises(ConfigError, match="recipe 'shakespeare-small-lstm': model: unknown key 'n_head'"):
        make_variants(["shakespeare-small", "shakespeare-small-lstm"], overrides=["model.n_head=3"])


def test_an_axis_that_no_recipe_has(tmp_path: Path) -> None:
    recipe = tmp_path / "plain.toml"
    recipe.write_text('[model]\nkind = "vanilla"\n')
    asked: list[tuple[dict[str, Any], str]] = [
        ({"recurrence": ["yes", "no"], "attention": ["shaw"]}, "--recurrence and --attention"),
        ({"attention": ["shaw"], "loss": ["half"]}, "--attention"),
    ]
    for varied, options in asked:
        with pytest.raises(ConfigError, match=rf"^{options} can vary .* transformer_xl only.*: plain \(vanilla\); leave that"):
            make_variants([str(recipe)], **varied)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"variant 'recurrence' .* model.mem_len \(0\) .*--set model.mem_len=N"):
        make_variants(["quickstart"], recurrence=["yes"], overrides=["model.mem_len=0"])
    with pytest.raises(ConfigError, match="variant 'al_rfou' of recipe 'quickstart': attention 'al_rfou' adds positions"):
        make_variants(["quickstart"], attention=["al_rfou"], overrides=["model.d_head=32"])
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(ConfigError, match="would both be called 'quickstart'"):
        make_variants(["quickstart", str(tmp_path / "quickstart.toml")])


def test_a_plan_survives_its_file() -> None:
    plan = AblationPlan(make_variants(["quickstart"], recurrence=["yes", "no"]), seeds=2, minutes=3, lengths=(0, 9), tokens=7)
    stored = json.loads(json.dumps(plan.as_dict()))
    assert AblationPlan.from_dict(stored) == plan
    assert list(stored) == ["variants", "seeds", "steps", "minutes", "validations", "lengths", "tokens"]
    assert list(stored["variants"][0]) == ["name", "recipe", "labels", "config"]  # files of today are read tomorrow


def test_a_plan_differs_by_a_setting_of_a_variant_but_not_by_where_its_text_lies() -> None:
    plan = AblationPlan(make_variants(["quickstart"], recurrence=["yes", "no"]))
    first, second = plan.variants
    elsewhere = replace(second, config=second.config.changed(data={"directory": "elsewhere"}))
    assert plan.difference(replace(plan, variants=(first, elsewhere))) is None
    other = replace(second, config=second.config.changed(optim={"lr": 0.5}))
    lr = second.config.optim.lr
    assert plan.difference(replace(plan, variants=(first, other))) == (
        f"optim.lr of 'no-recurrence' (0.5) differs from what it was ({lr})"
    )


def test_seeds_follow_each_other_and_every_variant_has_its_turn_first() -> None:
    plan = AblationPlan(make_variants(["quickstart"], recurrence=["yes", "no"], overrides=["train.seed=4"]), seeds=2)
    assert [trial.name for trial in plan.trials] == [
        "recurrence-seed4",
        "no-recurrence-seed4",
        "recurrence-seed5",
        "no-recurrence-seed5",
    ]


def test_time_is_a_budget_of_those_that_have_no_other() -> None:
    variants = make_variants(["quickstart"], recurrence=["yes", "no"], overrides=["train.max_minutes=5"])
    assert AblationPlan(variants).paced == list(variants)
    assert [AblationPlan(variants, minutes=2).minutes_of(variant) for variant in variants] == [2, 2]
    assert AblationPlan(variants, steps=8, minutes=2).paced == []
