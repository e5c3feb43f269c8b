"""What is asked of a run: its directory and its settings. Torch is not needed to refuse them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config import RunConfig, TaskConfig, apply_overrides, load_recipe, load_task, merge
from transformer_xl.data.corpora import check_corpus, choose_corpus, choose_tokenizer
from transformer_xl.data.text_files import check_readable
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.model.directory import CONFIG_FILE, RUNS, read_config, resolve


def asked_directory(recipe: str | RunConfig | None, out: str | Path | None, overrides: Sequence[str]) -> RunDirectory:
    """Return the directory of a run; the arguments are those of `train`."""
    return RunDirectory(RUNS / asked_settings(recipe, overrides).name if out is None else out)


def check_request(
    recipe: str | RunConfig | None,
    *,
    out: str | Path | None,
    overrides: Sequence[str],
    corpus: str | None,
    resume: bool,
) -> None:
    """Refuse what `train` would refuse of these arguments, in a moment; it imports torch first."""
    directory = asked_directory(recipe, out, overrides)
    goes_on = resume and directory.holds_run
    must_exist = resume and out is not None and recipe is None and corpus is None
    settle(directory, recipe, overrides, corpus, goes_on=goes_on, must_exist=must_exist)


def settle(
    directory: RunDirectory,
    recipe: str | RunConfig | None,
    overrides: Sequence[str],
    corpus: str | None,
    *,
    goes_on: bool,
    must_exist: bool = False,
    must_be_free: bool = True,
) -> RunConfig:
    """Return the settings of a run that starts in a directory or goes on there; refuse what can be refused without the text.

    Args:
        directory: of the run.
        recipe: see `train`.
        overrides: see `train`.
        corpus: see `train`.
        goes_on: whether the run in the directory goes on.
        must_exist: whether nothing else says what the run is.
        must_be_free: whether to look if a new run has a place there.

    Raises:
        ConfigError: settings that cannot work.
        CorpusError: no such text.
        CheckpointError: no run to go on with, or another in the way.
    """
    if goes_on:
        config = resumed_settings(directory, recipe, overrides, corpus)
        if config.task:
            raise CheckpointError(f"'{directory.path}' is fine-tuned; go on with txl finetune --resume --out {directory.path}")
        return config
    if must_exist:
        directory.config()  # there is none, so the name is misspelled
    if must_be_free:
        directory.check_free()
    config = asked_settings(recipe, overrides, corpus)
    if config.task:
        raise ConfigError(f"'{config.name}' is a task, which a model is taught that has read much; use txl finetune --task")
    check_corpus(config.data.corpus)
    return config


def asked_settings(recipe: str | RunConfig | None, overrides: Sequence[str] = (), corpus: str | None = None) -> RunConfig:
    """Return the settings of a new run; the arguments are those of `train`."""
    if isinstance(recipe, RunConfig):
        config = apply_overrides(recipe.model_dump(), list(overrides))
    else:
        config = load_recipe("quickstart" if recipe is None else recipe, list(overrides))
    config = config.model_copy(update={"data": choose_corpus(config.data, corpus)})
    return config if isinstance(recipe, RunConfig) else choose_tokenizer(config, overrides)


def resumed_settings(
    directory: RunDirectory, recipe: str | RunConfig | None, overrides: Sequence[str], corpus: str | None
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
    return _unchanged(directory, saved, asked_settings(saved, overrides, corpus))


def _unchanged(directory: RunDirectory, saved: RunConfig, config: RunConfig) -> RunConfig:
    """Return the settings of a run that goes on, or refuse those that its checkpoints do not fit."""
    fixed = [(section, key) for section in ("model", "tokenizer", "data") for key in type(getattr(saved, section)).model_fields]
    fixed.remove(("data", "directory"))  # the same text may lie elsewhere now
    fixed.append(("optim", "optimizer"))
    fixed += [("train", key) for key in ("batch_size", "tgt_len", "accumulate", "seed", "reset_at_documents")]
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


def _check_texts(task: TaskConfig) -> None:
    """Refuse paths of texts that are not there."""
    for path in (Path(name) for name in (task.data, task.valid, task.test) if name):
        if not path.is_dir():
            check_readable(path)


_NOT_WEIGHTS = ("mem_len", "mem_lens", "clamp_len", "same_length", "zero_first_memory", "locked_dropout")
"""Settings of a model, besides all of dropout, that fine-tuning may change: shapes of weights do not depend on them."""


@dataclass(frozen=True)
class Lesson:
    """What is asked of `finetune`.

    Attributes:
        base: a run, an exported directory or a hub id; None: the run goes on.
        task: name or TOML file of the task.
        data: see `TaskConfig.data`.
        out: directory of the run; None: `runs/<task>`.
        overrides: `section.key=value`, which replace settings of the task and of the model.
        told: settings of `TaskConfig` that were told by themselves, such as columns; they count more than overrides.
        seed: of order, dropout and the head's first weights.
        resume: go on with the run in `out`.
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
        base = self._base_settings()
        values = merge(merge(base, {"model": {"head": None}}), load_task(self.task))
        config = apply_overrides(merge(values, {"task": {"base": self.base}}), list(self.overrides))
        config = self._told(config)
        assert config.task
        if not config.task.data:
            raise ConfigError("--data is missing: a file of texts with labels, or a directory of such files")
        self._check_model(base["model"], config)
        _check_texts(config.task)
        return config

    def _resumed(self) -> RunConfig:
        directory = self.directory
        saved = directory.config()
        if saved.task is None:
            raise CheckpointError(f"'{directory.path}' is not fine-tuned; go on with txl train --resume --out {directory.path}")
        if self.base is not None and self.base != saved.task.base:
            raise CheckpointError(
                f"'{directory.path}' began with '{saved.task.base}', not '{self.base}'; leave it out, or choose another --out"
            )
        if self.task is not None and (name := load_task(self.task)["name"]) != saved.name:
            raise CheckpointError(
                f"'{directory.path}' learns the task '{saved.name}', not '{name}'; leave --task out, or choose another --out"
            )
        config = self._told(apply_overrides(saved.model_dump(), list(self.overrides)))
        assert config.task
        _check_texts(config.task)
        return _unchanged(directory, saved, config)

    def _told(self, config: RunConfig) -> RunConfig:
        told = dict(self.told) | ({"data": self.data} if self.data is not None else {})
        seed = {} if self.seed is None else {"train": {"seed": self.seed}}
        return RunConfig(**merge(config.model_dump(), {"task": told} | seed))

    def _base_settings(self) -> dict[str, Any]:
        """Return model, vocabulary and text of what fine-tuning begins with."""
        assert self.base is not None
        run = RunDirectory(self.base)
        if run.holds_run:
            return run.config().model_dump(include={"model", "tokenizer", "data"})
        model = read_config(resolve(self.base) / CONFIG_FILE)
        return {"model": {"kind": model.kind, **model.model_dump()}}

    def _check_model(self, base: dict[str, Any], config: RunConfig) -> None:
        """Refuse settings of the model that its weights do not fit."""
        if config.model.kind != base["kind"]:
            raise ConfigError(
                f"model.kind ({config.model.kind}) differs from that of '{self.base}' ({base['kind']}); leave it out"
            )
        for key, old in base.items():
            if key in ("kind", "head", *_NOT_WEIGHTS) or key.startswith("drop"):
                continue
            if (new := getattr(config.model, key)) != old:
                raise ConfigError(
                    f"model.{key} ({new!r}) differs from that of '{self.base}' ({old!r}), whose weights would not fit; "
                    "leave it out"
                )
