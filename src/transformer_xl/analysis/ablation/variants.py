"""What an ablation compares: recipes, and a Transformer-XL without one of its parts (the paper's tables 6, 7 and 10)."""

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformer_xl.config import RunConfig, apply_overrides, load_recipe
from transformer_xl.data.corpora import choose_corpus
from transformer_xl.errors import ConfigError
from transformer_xl.model_config import AttentionKind, TransformerXLConfig

RECURRENCE = ("yes", "no")
ATTENTION = tuple(str(kind) for kind in AttentionKind)
LOSS = ("full", "half")

AXES = {"recurrence": RECURRENCE, "attention": ATTENTION, "loss": LOSS}
"""What can be varied, and how."""

_NO_RECURRENCE = ("model.mem_len=0", "model.same_length=false", "eval.mem_len=0", "eval.same_length=none")


@dataclass(frozen=True)
class Variant:
    """One of the models that are compared.

    Attributes:
        name: of its runs.
        recipe: that it is made of.
        labels: what it is on each axis that its kind of model has.
        config: its settings; budget and seed are those of the recipe.
    """

    name: str
    recipe: str
    labels: dict[str, str]
    config: RunConfig


def make_variants(
    recipes: Sequence[str],
    *,
    recurrence: Sequence[str] | None = None,
    attention: Sequence[str] | None = None,
    loss: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    corpus: str | None = None,
) -> tuple[Variant, ...]:
    """Return all combinations, the recipe's own first where an axis is not given by the caller.

    Args:
        recipes: names or TOML files.
        recurrence: yes, no; models of other kinds than transformer_xl are taken as they are.
        attention: kinds of it; the same holds.
        loss: full, half.
        overrides: `section.key=value` laid over all recipes.
        corpus: name, file, directory or glob instead of the recipes' own.

    Raises:
        ConfigError: an unknown recipe, settings that cannot work, two recipes of one name, or an axis that none of them has.

    Example:
        >>> [variant.name for variant in make_variants(["quickstart"], recurrence=["yes", "no"], loss=["half"])]
        ['recurrence-half', 'no-recurrence-half']
    """
    asked = {"recurrence": recurrence, "attention": attention, "loss": loss}
    recipes = list(dict.fromkeys(recipes))
    everything = len(recipes) == 1 and not any(asked.values())
    variants: dict[str, Variant] = {}
    for recipe in recipes:
        try:
            base = load_recipe(recipe, list(overrides))
        except ConfigError as error:
            if len(recipes) == 1:
                raise
            raise ConfigError(f"recipe '{recipe}': {error}") from None  # each kind of model has settings of its own
        base = base.model_copy(update={"data": choose_corpus(base.data, corpus)})
        for variant in _of_recipe(base, recipe, asked, everything=everything, several=len(recipes) > 1):
            if variant.name in variants:
                raise ConfigError(
                    f"recipes '{variants[variant.name].recipe}' and '{recipe}' would both be called '{variant.name}'; "
                    "give one of them another name"
                )
            variants[variant.name] = variant
    _check_axes(variants.values(), asked)
    return tuple(variants.values())


def _of_recipe(
    base: RunConfig, recipe: str, asked: dict[str, Sequence[str] | None], *, everything: bool, several: bool
) -> Iterable[Variant]:
    own = labels_of(base)
    axes = {axis: _values(axis, own, asked[axis], everything=everything) for axis in own}
    named = [axis for axis in axes if asked[axis] or len(axes[axis]) > 1]
    for values in itertools.product(*axes.values()):
        labels = dict(zip(axes, values, strict=True))
        parts = [_part(axis, labels[axis]) for axis in named]
        if several or not parts:
            parts.insert(0, re.sub(r"[^\w.-]+", "-", base.name))
        try:
            config = apply_overrides(base.model_dump(), _changes(labels, own))
        except ConfigError as error:
            raise ConfigError(f"variant '{'-'.join(parts)}' of recipe '{base.name}': {error}") from None
        yield Variant("-".join(parts), base.name, labels, config)


def _check_axes(variants: Collection[Variant], asked: dict[str, Sequence[str] | None]) -> None:
    """Refuse what is asked of none of the recipes, rather than compare something else."""
    missing = [f"--{axis}" for axis, values in asked.items() if values and not any(axis in own.labels for own in variants)]
    if missing:
        kinds = {own.recipe: own.config.model.kind for own in variants}
        recipes = ", ".join(f"{recipe} ({kind})" for recipe, kind in kinds.items())
        raise ConfigError(
            f"{' and '.join(missing)} can vary models of kind {TransformerXLConfig.kind} only, and no recipe has one: "
            f"{recipes}; leave that out, or name such a recipe, too"
        )


def labels_of(config: RunConfig) -> dict[str, str]:
    """Return where a run stands on each axis that its kind of model has."""
    loss = {"loss": config.train.loss}
    if not isinstance(config.model, TransformerXLConfig):
        return loss
    return {"recurrence": "yes" if config.model.mem_len else "no", "attention": str(config.model.attention), **loss}


def _values(axis: str, own: dict[str, str], asked: Sequence[str] | None, *, everything: bool) -> Sequence[str]:
    if asked:
        return asked
    if not everything or (axis == "recurrence" and own[axis] == "no") or len(own) == 1:
        return [own[axis]]
    return sorted(AXES[axis], key=own[axis].__ne__)  # its own first, the others as they come


def _part(axis: str, value: str) -> str:
    if axis == "recurrence":
        return "recurrence" if value == "yes" else "no-recurrence"
    return value


def _changes(labels: dict[str, str], own: dict[str, str]) -> list[str]:
    """Return the overrides that make a variant of a recipe."""
    changes: list[str] = []
    if labels.get("recurrence") == "no" != own["recurrence"]:
        changes += _NO_RECURRENCE
    if labels.get("recurrence") == "yes" != own["recurrence"]:
        raise ConfigError("model.mem_len (0) leaves nothing for --recurrence yes; give it one with --set model.mem_len=N")
    if "attention" in labels and labels["attention"] != own["attention"]:
        changes += [f"model.attention={labels['attention']}", "train.attention=auto"]
    if labels["loss"] != own["loss"]:
        changes.append(f"train.loss={labels['loss']}")
    return changes


def differences(one: RunConfig, other: RunConfig) -> list[tuple[str, Any, Any]]:
    """Return the settings in which two runs differ, as `section.key` with both values; where the text lies is none."""
    found = []
    for section in ("model", "tokenizer", "data", "optim", "train", "eval"):
        first, second = (config.model_dump(mode="json")[section] for config in (one, other))
        keys = dict.fromkeys([*first, *second])
        found += [
            (f"{section}.{key}", first.get(key), second.get(key))
            for key in keys
            if first.get(key) != second.get(key) and (section, key) != ("data", "directory")
        ]
    return found
