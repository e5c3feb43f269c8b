"""What is asked of a run: its directory and its settings. Torch is not needed to refuse them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config.recipes import apply_overrides, load_recipe, load_task
from transformer_xl.config.run import RunConfig, merge
from transformer_xl.data.corpora import choose_corpus, choose_tokenizer
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.model.directory import CONFIG_FILE, RUNS, read_config, resolve

_NOT_WEIGHTS = ("mem_len", "clamp_len", "same_length", "zero_first_memory", "locked_dropout")
"""Settings of a model, besides all of dropout, that may change: shapes of weights do not depend on them."""


def asked_directory(
    recipe: str | RunConfig | None, out: str | Path | None, overrides: Sequence[str], base: str | None = None
) -> RunDirectory:
    """Return the directory of a run; the arguments are those of `train`."""
    return RunDirectory(RUNS / asked_settings(recipe, overrides, base=base).name if out is None else out)


def settle(
    directory: RunDirectory,
    recipe: str | RunConfig | None,
    overrides: Sequence[str],
    corpus: str | None,
    base: str | None = None,
    *,
    goes_on: bool,
    is_named: bool = False,
    must_be_free: bool = True,
) -> RunConfig:
    """Return the settings of a run that starts in a directory or goes on there; refuse what can be refused without the text.

    `recipe` to `base` are those of `train`. `is_named`: `out` names a run to go on with. `must_be_free`: a new run must have a
    place there.

    Raises:
        ConfigError: settings that cannot work.
        CorpusError: no such text.
        CheckpointError: no run to go on with, or another in the way.
    """
    if goes_on:
        config = resumed_settings(directory, recipe, overrides, corpus, base)
        if config.task:
            raise CheckpointError(f"'{directory.path}' is fine-tuned; go on with txl finetune --resume --out {directory.path}")
        return config
    if is_named and recipe is None and corpus is None and base is None:  # nothing else says what the run is
        directory.config()  # there is none, so the name is misspelled
    if must_be_free:
        directory.check_free()
    config = asked_settings(recipe, overrides, corpus, base)
    if config.task:
        raise ConfigError(f"'{config.name}' is a task, which a model is taught that has read much; use txl finetune --task")
    return config


def asked_settings(
    recipe: str | RunConfig | None, overrides: Sequence[str] = (), corpus: str | None = None, base: str | None = None
) -> RunConfig:
    """Return the settings of a new run; the arguments are those of `train`."""
    base = absolute_base(base)
    if base is not None:
        config = _begun_with(base, recipe, overrides)
    elif isinstance(recipe, RunConfig):
        config = apply_overrides(recipe.model_dump(), list(overrides))
    else:
        config = load_recipe("quickstart" if recipe is None else recipe, list(overrides))
    if config.base != base:
        raise ConfigError(f"base ({config.base}) is what --from sets (in Python base=…), which reads the model's settings, too")
    config = config.model_copy(update={"data": choose_corpus(config.data, corpus)})
    return config if base is not None or isinstance(recipe, RunConfig) else choose_tokenizer(config, overrides)


def absolute_base(base: str | None) -> str | None:
    """Return what a run begins with; of a directory, the path by which it is found from anywhere."""
    if base == "":
        raise ConfigError("--from is empty; give a run, an exported directory or a hub id")
    return str(Path(base).expanduser().resolve()) if base is not None and Path(base).expanduser().is_dir() else base


def _begun_with(base: str, recipe: str | RunConfig | None, overrides: Sequence[str]) -> RunConfig:
    """Return the settings of a run that begins with a model: its own [model] and [tokenizer], the recipe's rest."""
    theirs = base_settings(base)
    if theirs["model"]["head"]:
        raise ConfigError(f"'{base}' is fine-tuned and predicts no tokens; begin with the model that it was made from")
    if recipe is None and "train" in theirs:  # a run: as it was trained itself, at the speed of this machine
        values = merge(theirs, {"train": {"threads": None, "precision": "auto"}})
    else:
        own = recipe if isinstance(recipe, RunConfig) else load_recipe("quickstart" if recipe is None else recipe)
        kept = {"name", "description", "source", "data", "optim", "train", "eval", "task"}
        values = {**own.model_dump(include=kept), **{key: theirs[key] for key in ("model", "tokenizer") if key in theirs}}
    if told := next((each for each in overrides if each.strip().startswith("tokenizer.")), None):
        raise ConfigError(f"--set {told}: the tokenizer of '{base}' is used, whose ids its weights know; leave it out")
    config = apply_overrides({**values, "base": base, "compared_with": None}, list(overrides))
    check_weights_fit(base, theirs["model"], config)
    return config


def base_settings(base: str) -> dict[str, Any]:
    """Return the settings of a run, or the model's alone of an exported directory or a hub id."""
    run = RunDirectory(base)
    if run.holds_run:
        return run.config().model_dump()
    model = read_config(resolve(base) / CONFIG_FILE)
    return {"model": {"kind": model.kind, **model.model_dump()}}


def check_weights_fit(base: str, theirs: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse settings of a model that do not fit the weights of `base`, whose settings `theirs` are."""
    if config.model.kind != theirs["kind"]:
        raise ConfigError(f"model.kind ({config.model.kind}) differs from that of '{base}' ({theirs['kind']}); leave it out")
    for key, old in theirs.items():
        if key in ("kind", "head", *_NOT_WEIGHTS) or key.startswith("drop"):
            continue
        if (new := getattr(config.model, key)) != old:
            raise ConfigError(
                f"model.{key} ({new!r}) differs from that of '{base}' ({old!r}), whose weights would not fit; leave it out"
            )


def _check_same_base(directory: RunDirectory, saved: str | None, asked: str | None) -> None:
    if asked != saved:
        began, other = (f"'{base}'" if base else "random weights" for base in (saved, asked))
        raise CheckpointError(f"'{directory.path}' began with {began}, not {other}; leave it out, or choose another --out")


def resumed_settings(
    directory: RunDirectory,
    recipe: str | RunConfig | None,
    overrides: Sequence[str],
    corpus: str | None,
    base: str | None = None,
) -> RunConfig:
    """Return a run's own settings with overrides.

    Raises:
        CheckpointError: recipe, text, tokenizer or a setting that checkpoints depend on has changed.
    """
    saved = directory.config()
    if recipe is not None and (name := asked_settings(recipe).name) != saved.name:
        raise CheckpointError(
            f"'{directory.path}' is a run of recipe '{saved.name}', not '{recipe if isinstance(recipe, str) else name}'; "
            "leave the recipe out, or choose another --out"
        )
    config = apply_overrides(saved.model_dump(), list(overrides))
    _check_same_base(directory, saved.base, absolute_base(base) if base else config.base)
    return _unchanged(directory, saved, config.model_copy(update={"data": choose_corpus(config.data, corpus)}))


def _unchanged(directory: RunDirectory, saved: RunConfig, config: RunConfig) -> RunConfig:
    """Return the settings of a run that goes on, or refuse those that its checkpoints do not fit."""
    fixed = [(section, key) for section in ("model", "tokenizer", "data") for key in type(getattr(saved, section)).model_fields]
    fixed.remove(("data", "directory"))  # the same text may lie elsewhere now
    fixed.append(("optim", "optimizer"))
    own = ("batch_size", "tgt_len", "accumulate", "seed", "reset_at_documents", "lora_rank", "lora_alpha")
    fixed += [("train", key) for key in own]
    if saved.task and config.task:
        may_change = ("patience", "data", "valid", "test")  # the same texts may lie elsewhere, too
        fixed += [("task", key) for key in type(saved.task).model_fields if key not in may_change]
    for section, key in fixed:
        old, new = getattr(getattr(saved, section), key), getattr(getattr(config, section), key)
        if old != new:
            raise CheckpointError(
                f"{section}.{key} ({new!r}) differs from that of the run in '{directory.path}' ({old!r}); "
                "resume without changing it, or start another run with another --out"
            )
    return config


@dataclass(frozen=True)
class Lesson:
    """What is asked of `finetune`, by its arguments: `base` is its `source`, None if the run goes on.

    `told` are settings of `TaskConfig` that were told by themselves, such as columns; they count more than overrides.
    """

    base: str | None = None
    task: str | None = None
    data: str | None = None
    out: Path | None = None
    overrides: Sequence[str] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    resume: bool = False

    @property
    def directory(self) -> RunDirectory:
        """The directory of the run."""
        if self.out is None and self.task is None:
            raise ConfigError("--task is missing, such as --task classification; or name the run to go on with by --out")
        return RunDirectory(RUNS / load_task(self.task or "")["name"] if self.out is None else self.out)

    @property
    def goes_on(self) -> bool:
        """Whether there is a run to go on with."""
        return self.resume and self.directory.holds_run

    def settings(self, *, must_be_free: bool = True) -> RunConfig:
        """Return the settings of the run, and refuse what can be refused without the texts; torch is not needed.

        Raises:
            ConfigError: settings that cannot work.
            CheckpointError: no model to begin with, no run to go on with, or another in the way.
            CorpusError: no such file of texts.
        """
        return self._resumed() if self.goes_on else self._fresh(must_be_free=must_be_free)

    def _fresh(self, *, must_be_free: bool) -> RunConfig:
        directory = self.directory
        if self.resume and self.base is None:
            directory.config()  # there is none, so the name is misspelled
        if self.base is None:
            raise ConfigError("no model is named that learns the task; give a run, an exported directory or a hub id")
        if self.task is None:
            raise ConfigError("--task is missing, such as --task classification; docs/finetuning.md lists the tasks")
        if must_be_free:
            directory.check_free()
        theirs = base_settings(self.base)
        kept = {key: theirs[key] for key in ("model", "tokenizer", "data") if key in theirs}
        values = merge(merge(kept, {"model": {"head": None}}), load_task(self.task))
        config = apply_overrides(merge(values, {"task": {"base": self.base}}), list(self.overrides))
        config = self._told(config)
        assert config.task
        if not config.task.data:
            raise ConfigError("--data is missing: a file of texts with labels, or a directory of such files")
        check_weights_fit(self.base, theirs["model"], config)
        return config

    def _resumed(self) -> RunConfig:
        directory = self.directory
        saved = directory.config()
        if saved.task is None:
            raise CheckpointError(f"'{directory.path}' is not fine-tuned; go on with txl train --resume --out {directory.path}")
        if self.base is not None:
            _check_same_base(directory, saved.task.base, self.base)
        if self.task is not None and (name := load_task(self.task)["name"]) != saved.name:
            raise CheckpointError(
                f"'{directory.path}' learns the task '{saved.name}', not '{name}'; leave --task out, or choose another --out"
            )
        config = self._told(apply_overrides(saved.model_dump(), list(self.overrides)))
        assert config.task
        return _unchanged(directory, saved, config)

    def _told(self, config: RunConfig) -> RunConfig:
        told = dict(self.told) | ({"data": self.data} if self.data is not None else {})
        seed = {} if self.seed is None else {"seed": self.seed}
        return config.changed(task=told, train=seed)
