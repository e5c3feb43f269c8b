"""The directory of a run, and loading a model and its tokenizer.

runs/quickstart/
config.json       every setting, resolved, for people: each checkpoint has its own copy, which is the one that is read
tokenizer.json    the same
checkpoints/      step-00001000/ …, best.json
environment.json  versions, machine, seed and command of each start
loggers.json      the remote runs that it writes to, if any
metrics.jsonl     loss, validation, samples; one JSON object per line
loss.png
.lock             held by the process that trains here
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore, averaged_weights
from transformer_xl.config.model import read_config
from transformer_xl.config.run import RunConfig
from transformer_xl.errors import CheckpointError, ConfigError, beside, one_line
from transformer_xl.files import locked, make_directories, replace_file, stray_name
from transformer_xl.model.adapters import merged
from transformer_xl.model.build import make_model
from transformer_xl.model.pretrained import (
    CONFIG_FILE,
    RUNS,
    TOKENIZER_FILE,
    build,
    manifest_of,
    open_model,
    resolve,
)
from transformer_xl.tokenizers.kinds import Tokenizer, load_tokenizer, read_tokenizer
from transformer_xl.untrusted import parse_json

CHECKPOINTS = "checkpoints"
LOCK_FILE = ".lock"


class RunDirectory:
    """The files of one run; the directory need not exist."""

    def __init__(self, path: str | Path) -> None:
        if path == "":  # as of a variable that is not set; `Path` makes the working directory of it
            raise ConfigError("the path of a run is empty; name a run, an exported directory or a hub id")
        self.path = Path(path)

    @property
    def holds_run(self) -> bool:
        """True if a run has been started here."""
        return (self.path / CONFIG_FILE).is_file() and (self.path / CHECKPOINTS).is_dir()

    def store(self, *, keep: int = 2) -> CheckpointStore:
        """Return the run's checkpoints."""
        return CheckpointStore(self.path / CHECKPOINTS, keep=keep)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here until the block ends; make the directory, and remove it if it stays empty."""

        def refuse() -> None:
            raise CheckpointError(f"another process is training in '{self.path}'; wait until it ends, or choose another --out")

        def remove_if_empty() -> None:
            with suppress(OSError):  # it is not empty
                self.path.rmdir()

        make_directories(self.path)
        with ExitStack() as held:
            held.callback(remove_if_empty)
            held.enter_context(locked(self.path / LOCK_FILE, on_busy=refuse))
            yield

    def check_free(self) -> None:
        """Raise a `CheckpointError` unless the directory is free for a new run."""
        if self.path.exists() and not (self.path.is_dir() and self._is_free()):
            if self.holds_run:
                raise CheckpointError(f"'{self.path}' holds another run; continue it with --resume, or choose another --out")
            what = "is not empty and holds no run" if self.path.is_dir() else "is a file"
            raise CheckpointError(f"'{self.path}' {what}; choose another --out")

    def create(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Write the files of a new run, config.json last; call this while `locked`."""
        self.check_free()
        (self.path / CHECKPOINTS).mkdir(exist_ok=True)
        tokenizer.save(self.path / TOKENIZER_FILE)
        replace_file(self.path / CONFIG_FILE, config_bytes(config))

    def save_config(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Change the run's settings, in its checkpoints too; a kill at any time leaves each with the old or the new ones."""
        self.store().change_copies(copies(config, tokenizer))
        replace_file(self.path / CONFIG_FILE, config_bytes(config))

    def config(self, checkpoint: Checkpoint | None = None) -> RunConfig:
        """Read the settings of a checkpoint; None: of the newest that is sound, or before the first one `config.json`."""
        path = self.path / CONFIG_FILE
        if not path.exists():
            runs = beside(self.path, lambda path: RunDirectory(path).holds_run, also=RUNS)
            raise CheckpointError(
                f"'{self.path}' holds no run: {CONFIG_FILE} is missing; train one with txl train or txl finetune{runs}"
            )
        try:
            return RunConfig(**parse_json(self._content_of(CONFIG_FILE, checkpoint)))
        except (ValueError, TypeError) as error:  # of JSON, or of settings
            raise CheckpointError(f"'{path}': {one_line(error)}") from None

    def tokenizer(self, checkpoint: Checkpoint | None = None) -> Tokenizer:
        """Read the run's tokenizer; see `config`."""
        return read_tokenizer(self._content_of(TOKENIZER_FILE, checkpoint), self.path / TOKENIZER_FILE)

    def _content_of(self, name: str, checkpoint: Checkpoint | None) -> bytes:
        """Return the content of a file as a checkpoint has it; those of version 0.2 have none."""
        known = checkpoint.copies if checkpoint else self.store().newest_copies()
        return known[name] if name in known else (self.path / name).read_bytes()

    def _is_free(self) -> bool:
        """Return whether the directory has no files but those that a killed start leaves: everything before config.json."""
        names = {path.name for path in self.path.iterdir()} - {LOCK_FILE}
        if CHECKPOINTS not in names:
            return not names
        own = (CHECKPOINTS, TOKENIZER_FILE, stray_name(self.path / CONFIG_FILE).name)
        return all(name.startswith(own) for name in names) and not any((self.path / CHECKPOINTS).iterdir())


def short_names(sources: Sequence[str | Path]) -> list[str]:
    """Return names for several runs: those of their directories, or whole paths if two directories have the same name.

    Example:
        >>> short_names(["runs/a", "runs/b"]), short_names(["old/a", "new/a", "new/b"])
        (['a', 'b'], ['old/a', 'new/a', 'new/b'])
    """
    names = [os.path.basename(os.path.realpath(source)) for source in sources]  # noqa: PTH119 - unlike Path, it ignores loops
    return names if len(set(names)) == len(names) else [str(source) for source in sources]


def load(
    source: str | Path,
    *,
    which: Literal["best", "last", "average"] = "best",
    on_damaged: Callable[[str], None] | None = None,
) -> tuple[Any, Tokenizer]:
    """Load a model and its tokenizer from a run, an exported directory or a hub id.

    Args:
        source: a run directory, a directory written by `save_pretrained` that also has the tokenizer, or a hub id.
        which: for a run: the weights with the best validation, plain or averaged; the last ones; or the last average
            (`train.average`).
        on_damaged: called with a one-line message for each damaged checkpoint that is skipped; None: `warnings.warn`.

    Returns:
        The model in evaluation mode, a `LanguageModel` or an `XLNet`, and the tokenizer.

    Raises:
        CheckpointError: there is nothing, everything is damaged, parts do not fit together, or weights are not finite numbers.
        ConfigError: `source` is empty.
    """
    run = RunDirectory(source)
    if run.holds_run:
        newest_or_best = run.store().load_best if which == "best" else run.store().load_newest
        checkpoint = newest_or_best(on_damaged=on_damaged or _warn)
        weights = _weights(run, checkpoint, which)
        settings, tokenizer = run.config(checkpoint), run.tokenizer(checkpoint)
        config, train = settings.model, settings.train
        check_tokenizer(tokenizer, config.vocab_size, str(source))
        if train.lora_rank is not None:
            weights = merged(weights, scale=train.lora_alpha / train.lora_rank)
        return build(make_model, config, weights, f"{run.path / CHECKPOINTS}"), tokenizer
    folder = resolve(source)
    config = read_config(folder / CONFIG_FILE)
    if not (folder / TOKENIZER_FILE).exists():
        raise CheckpointError(
            f"'{folder}' has no {TOKENIZER_FILE}; save the tokenizer there, convert again with --vocabulary FILE, or load "
            "the model alone, with from_pretrained of its class"
        )
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE, manifest=manifest_of(folder))
    check_tokenizer(tokenizer, config.vocab_size, str(source))
    return open_model(make_model, config, folder), tokenizer


def config_bytes(config: RunConfig) -> bytes:
    """Return what `config.json` of a run holds."""
    return (json.dumps(config.model_dump(mode="json"), indent=2) + "\n").encode()


def copies(config: RunConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the settings and the tokenizer as checkpoints keep them."""
    return {CONFIG_FILE: config_bytes(config), TOKENIZER_FILE: tokenizer.to_json()}


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int | None, origin: str) -> None:
    """Refuse a tokenizer whose vocabulary is not the model's."""
    if tokenizer.vocab_size != vocab_size:
        raise CheckpointError(
            f"the {TOKENIZER_FILE} of '{origin}' has {tokenizer.vocab_size} tokens, its {CONFIG_FILE} {vocab_size}; "
            "they do not belong together, restore those that the model was trained with"
        )


def _weights(run: RunDirectory, checkpoint: Checkpoint, which: str) -> dict[str, Any]:
    averaged = which == "average"
    if which == "best":  # its average may be what makes it the best
        match checkpoint.state:
            case {"record": {"best": {"step": step, "average": True}}}:
                averaged = step == checkpoint.step
    if averaged and not averaged_weights(checkpoint):
        raise CheckpointError(
            f"checkpoint {checkpoint.step} of '{run.path}' holds no averaged weights; load its best or last ones, or train "
            "with train.average=ema, or swa, which begins at train.average_start"
        )
    return averaged_weights(checkpoint) if averaged else checkpoint.model


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)
