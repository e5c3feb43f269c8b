"""The settings of a run: asked for, or those of the run that goes on."""

from collections.abc import Sequence
from typing import Any

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config import RunConfig, apply_overrides, load_recipe
from transformer_xl.data.corpora import choose_corpus
from transformer_xl.data.prepare import PreparedCorpus
from transformer_xl.errors import CheckpointError
from transformer_xl.version import __version__

_FIXED_SECTIONS = ("model", "tokenizer", "data")  # what a checkpoint depends on: a resumed run cannot change it
_FIXED_KEYS = ("batch_size", "tgt_len", "accumulate", "seed", "reset_at_documents")


def asked_settings(recipe: str | RunConfig | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings of a new run: a recipe's, by default the quickstart's, with overrides."""
    if isinstance(recipe, RunConfig):
        return apply_overrides(recipe.model_dump(), list(overrides))
    return load_recipe(recipe or "quickstart", list(overrides))


def resumed_settings(
    directory: RunDirectory, recipe: str | RunConfig | None, overrides: Sequence[str], corpus: str | None
) -> RunConfig:
    """Return the run's own settings with overrides, after checking that nothing it rests on changes."""
    saved = directory.config()
    if recipe is not None and (name := asked_settings(recipe).name) != saved.name:
        raise CheckpointError(
            f"'{directory.path}' is a run of recipe '{saved.name}', not '{recipe if isinstance(recipe, str) else name}'; "
            "leave the recipe out, or choose another --out"
        )
    config = apply_overrides(saved.model_dump(), list(overrides))
    config = with_corpus(config, corpus)
    pairs = [(section, key) for section in _FIXED_SECTIONS for key in type(getattr(saved, section)).model_fields]
    pairs.remove(("data", "directory"))  # the same text may lie elsewhere now
    pairs += [("optim", "optimizer"), *(("train", key) for key in _FIXED_KEYS)]
    for section, key in pairs:
        old, new = getattr(getattr(saved, section), key), getattr(getattr(config, section), key)
        if old != new:
            raise CheckpointError(
                f"{section}.{key} ({new!r}) differs from that of the run in '{directory.path}' ({old!r}); "
                "resume without changing it, or start another run with another --out"
            )
    return config


def with_corpus(config: RunConfig, corpus: str | None) -> RunConfig:
    """Return the settings with the corpus that the user named."""
    return config.model_copy(update={"data": choose_corpus(config.data, corpus)})


def what_all_share(config: RunConfig, corpus: PreparedCorpus) -> dict[str, Any]:
    """Return what must be the same in all processes; where the corpus lies may differ."""
    settings = config.model_dump(mode="json", exclude={"data": {"directory"}})
    sizes = {name: len(split.ids) for name, split in corpus.splits.items()}
    text = {"text": corpus.training_sha256, "tokens": sizes, "vocabulary": corpus.tokenizer.fingerprint}
    return settings | text | {"version": __version__}
