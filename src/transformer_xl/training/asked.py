"""What is asked of a run: its directory and its settings. Torch is not needed to refuse them."""

from collections.abc import Sequence
from pathlib import Path

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config import RunConfig, apply_overrides, load_recipe
from transformer_xl.data.corpora import check_corpus, choose_corpus
from transformer_xl.errors import CheckpointError
from transformer_xl.model.directory import RUNS


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
        return resumed_settings(directory, recipe, overrides, corpus)
    if must_exist:
        directory.config()  # there is none, so the name is misspelled
    if must_be_free:
        directory.check_free()
    config = asked_settings(recipe, overrides, corpus)
    check_corpus(config.data.corpus)
    return config


def asked_settings(recipe: str | RunConfig | None, overrides: Sequence[str] = (), corpus: str | None = None) -> RunConfig:
    """Return the settings of a new run; the arguments are those of `train`."""
    if isinstance(recipe, RunConfig):
        config = apply_overrides(recipe.model_dump(), list(overrides))
    else:
        config = load_recipe("quickstart" if recipe is None else recipe, list(overrides))
    return config.model_copy(update={"data": choose_corpus(config.data, corpus)})


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
    config = asked_settings(saved, overrides, corpus)
    sections = ("model", "tokenizer", "data")
    fixed = [(section, key) for section in sections for key in type(getattr(saved, section)).model_fields]
    fixed.remove(("data", "directory"))  # the same text may lie elsewhere now
    fixed.append(("optim", "optimizer"))
    fixed += [("train", key) for key in ("batch_size", "tgt_len", "accumulate", "seed", "reset_at_documents")]
    for section, key in fixed:
        old, new = getattr(getattr(saved, section), key), getattr(getattr(config, section), key)
        if old != new:
            raise CheckpointError(
                f"{section}.{key} ({new!r}) differs from that of the run in '{directory.path}' ({old!r}); "
                "resume without changing it, or start another run with another --out"
            )
    return config
