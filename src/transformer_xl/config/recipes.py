"""Recipes and tasks: TOML files of settings, changed by `section.key=value` overrides.

Order of precedence: defaults < recipe < `--set section.key=value`. A recipe is data (`recipes/*.toml`), never code.
"""

import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic.fields import FieldInfo

from transformer_xl.config.model import KINDS, ModelConfig, TransformerXLConfig
from transformer_xl.config.run import RunConfig, merge
from transformer_xl.config.settings import Settings
from transformer_xl.errors import ConfigError, did_you_mean, nearest, one_line, shown


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return _names("recipes")


def task_names() -> list[str]:
    """Return the names of the tasks that come with the package, which `txl finetune` teaches."""
    return _names("tasks")


def _names(folder: str) -> list[str]:
    entries = (resources.files("transformer_xl") / folder).iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml"))


def load_recipe(recipe: str, overrides: list[str] | None = None) -> RunConfig:
    """Read a recipe by name or path and apply `section.key=value` overrides.

    Args:
        recipe: a name from `recipe_names()`, or the path of a TOML file.
        overrides: for example `["train.max_minutes=1", "model.dropout=0"]`; values are TOML, `none` clears a value (or is one,
            as of `train.average`), and what is not TOML is taken as text.

    Returns:
        The validated run.

    Raises:
        OSError: no such file.
        ConfigError: no such recipe, unreadable TOML, an unknown key, or a value that cannot work.

    Example:
        >>> load_recipe("quickstart", ["train.max_minutes=0.5"]).train.max_minutes
        0.5
    """
    return apply_overrides(_read_settings(recipe, "recipe", listed_by="txl recipes"), overrides or [])


_TASKS_BY_SUBJECT = {
    **dict.fromkeys(("ner", "pos", "tagging", "chunking"), "token-classification"),
    **dict.fromkeys(("qa", "question-answering"), "squad"),
    **dict.fromkeys(("sentiment", "text-classification"), "classification"),
}
"""What tasks are called elsewhere."""


def load_task(task: str) -> dict[str, Any]:
    """Read the settings of a task by name or path: those of a run without its model, vocabulary and text.

    Example:
        >>> load_task("imdb")["task"]["kind"]
        'classification'
    """
    values = _read_settings(task, "task", listed_by="docs/finetuning.md")
    own = values.get("task")
    if not isinstance(own, dict) or "kind" not in own:
        raise ConfigError(f"task '{task}' does not say its kind; begin it with [task] and kind = \"classification\"")
    return values


def _read_settings(name: str, what: Literal["recipe", "task"], *, listed_by: str) -> dict[str, Any]:
    """Read a TOML file by name or path, as tables with the name that the run gets."""
    known = _names(f"{what}s")
    if name.endswith(".toml"):
        data = Path(name).read_bytes()
    elif name in known:
        data = (resources.files("transformer_xl") / f"{what}s" / f"{name}.toml").read_bytes()
    else:
        usual = _TASKS_BY_SUBJECT.get(name.lower()) if what == "task" else None
        near = f"did you mean '{usual}'?" if usual else did_you_mean(name, known, listed_by=listed_by)
        if name.partition(".")[0] in RunConfig.model_fields or name in {each.rpartition(".")[2] for each in setting_names()}:
            near = f"it looks like a setting: txl settings | grep {shown(name)}"
        elif (Path(name) / "config.json").is_file():
            near = f"it is a run or a model: txl info {shown(name)}"
        raise ConfigError(f"unknown {what} {shown(name)}; {near}")
    try:
        return {"name": Path(name).stem, **tomllib.loads(data.decode())}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} '{name}' is not valid TOML: {one_line(error)}") from None


def apply_overrides(values: dict[str, Any], overrides: list[str]) -> RunConfig:
    """Validate `values` as a run after applying `section.key=value` overrides.

    If they ask for another kind of model, settings that this kind does not have are left out of `values`.

    Raises:
        ConfigError: an override without its section, an unknown key, or a value that cannot work.
    """
    changes: dict[str, Any] = {}
    for override in overrides:
        change = parse_override(override)
        _refuse_misplaced(override)
        changes = merge(changes, change)
    return RunConfig(**merge(_of_kind(values, changes), changes))


def _refuse_misplaced(override: str) -> None:
    """Refuse a setting that is called so in another section, or one without a section whose name is nearly right."""
    path = override.partition("=")[0].strip()
    section, _, key = path.rpartition(".")
    if path in RunConfig.model_fields or path in setting_names():
        return
    homes: dict[str, list[str]] = {}
    for name in setting_names():
        homes.setdefault(name.rpartition(".")[2], []).append(name)
    near = key if section or key in homes else nearest(key, homes)
    if near in homes:
        wrong = "is no setting" if section or near != key else "lacks its section"
        raise ConfigError(f"--set '{override}' {wrong}; did you mean {' or '.join(homes[near])}?")


def _of_kind(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe without the settings that another kind of model, which `changes` asks for, does not have."""
    model, read, change = values.get("model", {}), values.get("eval", {}), changes.get("model", {})
    if not all(isinstance(each, dict) for each in (model, read, change)):  # which validation refuses
        return values
    old = model.get("kind", TransformerXLConfig.kind)
    kind = change.get("kind", old)
    if kind == old or not isinstance(kind, str) or kind not in KINDS:
        return values
    kept = {key: value for key, value in model.items() if key in KINDS[kind].model_fields and key != "mem_len"}
    read = {key: value for key, value in read.items() if key not in ("mem_len", "clamp_len", "same_length")}
    return {**values, "model": kept, "eval": read}


def setting_names() -> list[str]:
    """Return the names of all settings, of every kind of model, with their sections."""
    fields = RunConfig.model_fields
    names = [f"{section}.{key}" for section in fields for each in _sections(section) for key in each.model_fields]
    return list(dict.fromkeys([*names, "model.kind", *(name for name in fields if not _sections(name))]))


def settings_of(run: RunConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the value and the meaning of every setting of a run.

    Example:
        >>> next(setting for setting in settings_of(RunConfig()) if setting[0] == "optim.betas")
        ('optim.betas', (0.9, 0.999), "Adam's and LAMB's decay rates")
    """
    for name, field in RunConfig.model_fields.items():
        value = getattr(run, name)
        if not isinstance(value, Settings):
            yield name, value, field.description or ""
            continue
        if isinstance(value, ModelConfig):
            yield f"{name}.kind", value.kind, f"kind of model: {', '.join(KINDS)}; each has settings of its own"
        for key, own in type(value).model_fields.items():
            yield f"{name}.{key}", getattr(value, key), own.description or ""


def parse_override(override: str) -> dict[str, Any]:
    """Turn `section.key=value` into nested tables; the value is TOML, `none`, or else text.

    `none` clears a value, except where it is itself a value, as of `train.average`.

    Example:
        >>> parse_override("train.max_steps=1000"), parse_override("optim.clip=none"), parse_override("train.average=none")
        ({'train': {'max_steps': 1000}}, {'optim': {'clip': None}}, {'train': {'average': 'none'}})
    """
    key, separator, value = override.partition("=")
    path, text = key.strip().split("."), value.strip()
    if not separator or not all(path) or len(path) > 2:
        raise ConfigError(f"--set '{override}' must have the form section.key=value, such as train.max_steps=1000")
    try:
        parsed = None if text.lower() == "none" else tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        parsed = text
    if parsed is None and len(path) == 2 and any("none" in get_args(field.annotation) for field in _fields(*path)):
        parsed = "none"
    return {path[0]: {path[1]: parsed}} if len(path) == 2 else {path[0]: parsed}


def _fields(section: str, key: str) -> list[FieldInfo]:
    """Return the fields of a name in a section, of every kind of model in `model`."""
    return [each.model_fields[key] for each in _sections(section) if key in each.model_fields]


def _sections(name: str) -> list[type[Settings]]:
    """Return the settings that a field of a run may hold, of every kind of model; none: it is no section."""
    if name == "model":
        return list(KINDS.values())
    annotation = RunConfig.model_fields[name].annotation if name in RunConfig.model_fields else None
    kinds = (annotation, *get_args(annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)]
