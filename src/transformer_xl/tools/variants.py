"""The plan of an ablation: variants of recipes, seeds, a budget, and how they are scored.

A variant is a recipe, or a Transformer-XL without one of its parts (the paper's tables 6, 7 and 10).
"""

import itertools
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, PositiveFloat, TypeAdapter

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.recipes import apply_overrides, load_recipe
from transformer_xl.config.run import RunConfig
from transformer_xl.config.settings import Natural, Positive
from transformer_xl.data.corpora import choose_corpus, switch_to_ids
from transformer_xl.errors import ConfigError
from transformer_xl.model.attention.kinds import ATTENTION, attention_kind

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_MOST_SEEDS = 10_000


def axes() -> dict[str, tuple[str, ...]]:
    """Return what can be varied, and its values; kinds of attention that were registered are among them."""
    return {"recurrence": ("yes", "no"), "attention": tuple(ATTENTION), "loss": ("full", "half")}


@dataclass(frozen=True)
class Variant:
    """One of the models that are compared."""

    __pydantic_config__: ClassVar = _STRICT

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]  # begins the names of files
    recipe: str
    labels: dict[str, str]  # its value on each axis that its kind of model has
    config: RunConfig  # with budget and seed of the recipe


@dataclass(frozen=True)
class Trial:
    """One run of an ablation: a variant, trained once."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{self.variant.name}-seed{self.seed}"


@dataclass(frozen=True)
class AblationPlan:
    """What is compared, and how; frozen when an ablation begins. Without `steps` and `minutes`, budgets are the recipes'."""

    __pydantic_config__: ClassVar = _STRICT

    variants: tuple[Variant, ...]
    seeds: Annotated[int, Field(ge=1, le=_MOST_SEEDS)] = 1  # for each variant: the recipe's, and those that follow
    steps: Positive | None = None  # budget of each run
    minutes: PositiveFloat | None = None  # budget of each run in training time, turned into steps by the pace of its variant
    validations: Positive | None = None  # in each run, for its curve; None: as the recipe says
    lengths: tuple[Natural, ...] | None = None  # attention lengths to score; None: those around the trained one
    tokens: Positive | None = None  # tokens of the split that are scored, at most; None: all

    @property
    def trials(self) -> list[Trial]:
        """All runs in the order in which they are trained: every variant once, then all with the next seed."""
        return [Trial(variant, variant.config.train.seed + k) for k in range(self.seeds) for variant in self.variants]

    @property
    def paced(self) -> list[Variant]:
        """The variants whose budget is time."""
        return [variant for variant in self.variants if self.minutes_of(variant)]

    def minutes_of(self, variant: Variant) -> float | None:
        """Return the training time of a variant; None: its budget is not time."""
        if self.steps:
            return None
        return self.minutes or variant.config.train.max_minutes

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        variants = [vars(variant) | {"config": variant.config.model_dump(mode="json")} for variant in self.variants]
        return vars(self) | {"variants": variants, "lengths": None if self.lengths is None else list(self.lengths)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AblationPlan":
        """Return the plan that `as_dict` took; a pydantic `ValidationError` says what is wrong with it."""
        return TypeAdapter(cls).validate_json(json.dumps(values))

    def difference(self, other: "AblationPlan") -> str | None:
        """Return the first difference of another plan from this one in words; None if there is none."""
        before, after = _settings(self), _settings(other)
        for name in before | after:
            if before.get(name) != after.get(name):
                return f"{name} ({_in_words(after.get(name))}) differs from what it was ({_in_words(before.get(name))})"
        return None


def _settings(plan: AblationPlan) -> dict[str, Any]:
    """Return everything in a plan by its name, except for the paths of texts."""
    settings = vars(plan) | {"variants": tuple(variant.name for variant in plan.variants)}
    for variant in plan.variants:
        for section, values in variant.config.model_dump(mode="json").items():
            if isinstance(values, dict):
                settings |= {f"{section}.{key} of '{variant.name}'": value for key, value in values.items()}
        del settings[f"data.directory of '{variant.name}'"]
    return settings


def make_variants(
    recipes: Sequence[str],
    *,
    recurrence: Sequence[str] | None = None,
    attention: Sequence[str] | None = None,
    loss: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    corpus: str | None = None,
) -> tuple[Variant, ...]:
    """Return all combinations of values; if an axis is not given, the recipe's own value comes first.

    Models of other kinds than transformer_xl have no `recurrence` and `attention` to vary, so they are taken as they are.

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
        base = switch_to_ids(base.model_copy(update={"data": choose_corpus(base.data, corpus)}), overrides)
        for variant in _of_recipe(base, asked, everything=everything, several=len(recipes) > 1):
            if variant.name in variants:
                raise ConfigError(
                    f"recipes '{variants[variant.name].recipe}' and '{recipe}' would both be called '{variant.name}'; "
                    "give one of them another name"
                )
            variants[variant.name] = variant
    _check_axes(variants.values(), asked)
    return tuple(variants.values())


def _of_recipe(
    base: RunConfig, asked: dict[str, Sequence[str] | None], *, everything: bool, several: bool
) -> Iterable[Variant]:
    """Yield the variants of one recipe; with `several` recipes, names begin with theirs.

    If `everything`, all axes vary, and kinds of attention that cannot have the recipe's sizes are left out.
    """
    own = _labels_of(base)
    axes = {axis: _values(axis, own, asked[axis], everything=everything) for axis in own}
    named = [axis for axis in axes if asked[axis] or len(axes[axis]) > 1]
    for values in itertools.product(*axes.values()):
        labels = dict(zip(axes, values, strict=True))
        parts = [{"yes": "recurrence", "no": "no-recurrence"}.get(labels[axis], labels[axis]) for axis in named]
        if several or not parts:
            parts.insert(0, re.sub(r"[^\w.-]+", "-", base.name))
        try:
            config = apply_overrides(base.model_dump(), _changes(labels, own))
            if isinstance(config.model, TransformerXLConfig):
                attention_kind(config.model.attention).check(config.model)
        except ConfigError as error:
            if everything and labels["attention"] != own["attention"]:
                continue  # a kind that nobody named, and whose heads have other sizes
            raise ConfigError(f"variant '{'-'.join(parts)}' of recipe '{base.name}': {error}") from None
        yield Variant("-".join(parts), base.name, labels, config)


def _check_axes(variants: Collection[Variant], asked: dict[str, Sequence[str] | None]) -> None:
    """Refuse an axis that none of the recipes has, because the comparison would be another one."""
    missing = [f"--{axis}" for axis, values in asked.items() if values and not any(axis in each.labels for each in variants)]
    if missing:
        kinds = {each.recipe: each.config.model.kind for each in variants}
        recipes = ", ".join(f"{recipe} ({kind})" for recipe, kind in kinds.items())
        raise ConfigError(
            f"{' and '.join(missing)} can vary models of kind transformer_xl only, and no recipe has one: "
            f"{recipes}; leave that out, or name such a recipe, too"
        )


def _labels_of(config: RunConfig) -> dict[str, str]:
    """Return a run's value on each axis that its kind of model has."""
    labels = {}
    if config.model.remembers == "positions":
        labels["recurrence"] = "yes" if config.model.mem_len else "no"
    if isinstance(config.model, TransformerXLConfig):
        labels["attention"] = config.model.attention
    return labels | {"loss": config.train.loss}


def _values(axis: str, own: dict[str, str], asked: Sequence[str] | None, *, everything: bool) -> Sequence[str]:
    if asked:
        return asked
    if not everything or (axis == "recurrence" and own[axis] == "no") or len(own) == 1:
        return [own[axis]]
    return sorted(axes()[axis], key=own[axis].__ne__)  # its own value first, the others in order


def _changes(labels: dict[str, str], own: dict[str, str]) -> list[str]:
    changes: list[str] = []
    if labels.get("recurrence") == "no" != own["recurrence"]:
        changes += ["model.mem_len=0", "model.same_length=false", "eval.mem_len=0", "eval.same_length=none"]
    if labels.get("recurrence") == "yes" != own["recurrence"]:
        raise ConfigError("model.mem_len (0) leaves nothing for --recurrence yes; give it one with --set model.mem_len=N")
    if "attention" in labels and labels["attention"] != own["attention"]:
        changes += [f"model.attention={labels['attention']}", "train.attention=auto"]
        if not attention_kind(labels["attention"]).limits_distances:
            changes += ["model.clamp_len=none", "eval.clamp_len=none"]
    if labels["loss"] != own["loss"]:
        changes.append(f"train.loss={labels['loss']}")
    return changes


def _in_words(value: Any) -> str:
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
