"""`txl recipes` and `txl settings`: all of them, as `--set` takes them."""

import json

import pytest

from tests.cli.conftest import Txl
from transformer_xl.config.recipes import apply_overrides, load_recipe, load_task, recipe_names
from transformer_xl.config.run import RunConfig


def test_all_recipes_are_listed_with_a_line_each_and_small_ones_first(txl: Txl) -> None:
    *groups, _ = txl("recipes").out.split("\n\n")
    assert [group.splitlines()[1].split()[0] for group in groups] == ["recipe"] * 3
    lines = [line for group in groups for line in group.splitlines()[2:]]
    assert sorted(line.split()[0] for line in lines) == recipe_names()
    assert lines[0].split()[:3] == ["quickstart", "3", "min"]
    assert all(line.endswith(load_recipe(line.split()[0]).description) for line in lines)
    minutes = [load_recipe(line.split()[0]).train.max_minutes or 0.0 for line in groups[0].splitlines()[2:]]
    assert minutes[0] > 0 and minutes == sorted(minutes)
    others = [line for group in groups[1:] for line in group.splitlines()[2:]]
    assert all(load_recipe(line.split()[0]).train.max_minutes is None for line in others)
    facts = [json.loads(line) for line in txl("recipes", "--json").out.splitlines()]
    assert [fact["name"] for fact in facts] == recipe_names()


@pytest.mark.parametrize("arguments", [(), ("wt103-base",), ("lstm-ptb", "--set", "train.average=swa"), ("squad2",)])
def test_settings_that_are_listed_make_the_same_run(txl: Txl, arguments: tuple[str, ...]) -> None:
    head, *lines = txl("settings", *arguments).out.partition("\n\n")[0].splitlines()
    place = head.index("description")
    found = [line[:place].split(maxsplit=1) for line in lines]
    if arguments == ("squad2",):
        run = apply_overrides(load_task("squad2"), [])
    else:
        run = load_recipe(arguments[0], list(arguments[2:])) if arguments else RunConfig()
    assert head.split()[1] == ("value" if arguments else "default")
    assert apply_overrides({}, [f"{name}={value.strip()}" for name, value in found]) == run
    assert all(len(line) > place for line in lines)  # every one is described
    facts = [json.loads(line) for line in txl("settings", *arguments, "--json").out.splitlines()]
    assert [fact["setting"] for fact in facts] == [name for name, _ in found]


@pytest.mark.parametrize("name", ["optim", "lr", "optim.lr"])
def test_a_setting_or_a_section_is_no_recipe(txl: Txl, name: str) -> None:
    assert txl("settings", name).complaint == f"unknown recipe '{name}'; it looks like a setting: txl settings | grep '{name}'"
