"""`txl recipes` and `txl settings`: what can be trained, and what can be set."""

import json
from typing import Annotated, Any

from transformer_xl.cli.options import RECIPES, Json, Overrides
from transformer_xl.console import fitted, table


def recipes(*, json_: Json = False) -> None:
    """List the recipes with what each is for, those for a laptop first.

    Common uses:
        txl recipes
        txl recipes --json

    Args:
        json_: print one JSON object per recipe.
    """
    from transformer_xl.config.recipes import load_recipe, recipe_names

    found = [load_recipe(name) for name in recipe_names()]
    if json_:
        for each in found:
            print(json.dumps({"name": each.name, "description": each.description, "source": each.source}))
        return
    small = sorted((each for each in found if each.train.max_minutes), key=lambda each: each.train.max_minutes or 0)
    ablations = [each for each in found if each.name.startswith("ablation-")]
    published = [each for each in found if each not in small and each not in ablations]
    print("For any computer, without a GPU, too:")
    minutes = [[each.name, f"{each.train.max_minutes:g} min", each.description] for each in small]
    print(table([["recipe", "trains for", "description"], *minutes], n_left=3))
    for heading, group in {
        "For GPUs, most with the settings of published models": published,
        "For GPUs, ablations with the paper's settings": ablations,
    }.items():
        print(fitted(f"\n{heading} (txl plan RECIPE says what most of them need):"))
        print(table([["recipe", "description"], *([each.name, each.description] for each in group)], n_left=2))
    print(fitted("\nTrain one with txl train RECIPE; txl settings RECIPE shows its settings."))


def settings(recipe: Annotated[str | None, RECIPES] = None, /, *, set_: Overrides = None, json_: Json = False) -> None:
    """List all settings, with their defaults or a recipe's values, and what they mean.

    Common uses:
        txl settings                        # defaults
        txl settings wt103-base             # values of a recipe
        txl settings squad2                 # of a task of txl finetune
        txl settings --set model.kind=lstm  # an LSTM has settings of its own

    Args:
        recipe: a recipe or a task of txl finetune, by name, or a recipe in a TOML file. Default: none, which lists defaults.
        set_: section.key=value, overrides it; may be repeated.
        json_: print one JSON object per setting.
    """
    from transformer_xl.config.recipes import apply_overrides, load_recipe, load_task, settings_of, task_names

    if recipe is None or recipe in task_names():
        run = apply_overrides(load_task(recipe) if recipe else {}, set_ or [])
    else:
        run = load_recipe(recipe, set_)
    found = list(settings_of(run))
    if json_:
        for name, value, description in found:
            print(json.dumps({"setting": name, "value": value, "description": description}))
        return
    rows = [[name, _as_set(value), description] for name, value, description in found]
    print(table([["setting", "value" if recipe or set_ else "default", "description"], *rows], n_left=3))
    print(fitted("\nChange one with --set SETTING=VALUE, or in a recipe of your own."))


def _as_set(value: Any) -> str:
    if value is None:
        return "none"
    return value if value and isinstance(value, str) else json.dumps(value)
