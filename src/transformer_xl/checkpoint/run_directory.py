"""A run on the disk: `config.json`, `tokenizer.json`, `checkpoints/`, and how to load a model and its tokenizer from one.

runs/quickstart/
config.json       every setting, resolved; written once, when the run starts
tokenizer.json
checkpoints/      step-00001000/ …, best.json
metrics.jsonl     loss, validation, samples; one JSON object a line
loss.png
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from transformer_xl.checkpoint.store import CheckpointStore
from transformer_xl.config import RunConfig
from transformer_xl.data.tokenizers import Tokenizer, load_tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, TxlError
from transformer_xl.model.pretrained import CONFIG_FILE, WEIGHTS_FILE, build, read_config, read_weights, resolve
from transformer_xl.model.transformer_xl import TransformerXL

TOKENIZER_FILE = "tokenizer.json"
CHECKPOINTS = "checkpoints"


class RunDirectory:
    """The files of one run.

    Args:
        path: of the directory; need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def holds_run(self) -> bool:
        """True if a run has been started here."""
        return (self.path / CONFIG_FILE).is_file() and (self.path / CHECKPOINTS).is_dir()

    def store(self, *, keep: int = 2) -> CheckpointStore:
        """Return the run's checkpoints."""
        return CheckpointStore(self.path / CHECKPOINTS, keep=keep)

    def create(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Start a run here.

        Raises:
            CheckpointError: the directory holds something already, or cannot be written.
        """
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise CheckpointError(f"'{self.path}' {self._content()}; continue it with --resume, or choose another --out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tokenizer.save(self.path / TOKENIZER_FILE)
            temporary = self.path / f"{CONFIG_FILE}.tmp"
            temporary.write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            temporary.replace(self.path / CONFIG_FILE)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to '{self.path}': {error.strerror}; free disk space or choose another --out"
            ) from None

    def config(self) -> RunConfig:
        """Read the run's settings.

        Raises:
            CheckpointError: missing or damaged.
        """
        return RunConfig(**self._read_json())

    def tokenizer(self) -> Tokenizer:
        """Read the run's tokenizer."""
        return load_tokenizer(self.path / TOKENIZER_FILE)

    def _read_json(self) -> dict[str, Any]:
        path = self.path / CONFIG_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            RunConfig(**values)
        except FileNotFoundError:
            raise CheckpointError(f"'{self.path}' holds no run: {CONFIG_FILE} is missing; train one with txl train") from None
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"'{path}' is damaged: {error}") from None
        return values

    def _content(self) -> str:
        if not self.holds_run:
            return "is not empty and holds no run"
        try:
            steps = self.store().steps()
            return f"holds another run ('{self.config().name}', {f'step {steps[-1]:,}' if steps else 'no checkpoint yet'})"
        except TxlError:
            return "holds another run"


def load(
    source: str | Path,
    *,
    which: Literal["best", "last"] = "best",
    on_damaged: Callable[[str], None] | None = None,
) -> tuple[TransformerXL, Tokenizer]:
    """Load a model and its tokenizer from a run, an exported directory or a hub id.

    Args:
        source: a run directory, a directory written by `save_pretrained` with the tokenizer beside, or a hub id.
        which: of a run: the checkpoint with the best validation loss, or the last one.
        on_damaged: told, in one line each, of damaged checkpoints that were passed over; None: they are warned of.

    Returns:
        The model in evaluation mode, and the tokenizer.

    Raises:
        CheckpointError: nothing there, everything damaged, or parts that do not fit each other.
    """
    run = RunDirectory(source)
    if run.holds_run:
        config, tokenizer = run.config().model, run.tokenizer()
        weights, origin = _run_weights(run, which, on_damaged or _warn), f"{run.path / CHECKPOINTS}"
    else:
        folder = resolve(source)
        config, tokenizer = read_config(folder / CONFIG_FILE), load_tokenizer(folder / TOKENIZER_FILE)
        weights, origin = read_weights(folder / WEIGHTS_FILE), str(folder / WEIGHTS_FILE)
    check_tokenizer(tokenizer, config.vocab_size, str(source))
    return build(TransformerXL, config, weights, origin), tokenizer


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int | None, origin: str) -> None:
    """Refuse a tokenizer whose vocabulary is not the model's."""
    if tokenizer.vocab_size != vocab_size:
        raise CheckpointError(
            f"the tokenizer of '{origin}' has {tokenizer.vocab_size} tokens, its model {vocab_size}; "
            f"they do not belong together, restore the {TOKENIZER_FILE} that the model was trained with"
        )


def _run_weights(run: RunDirectory, which: str, on_damaged: Callable[[str], None]) -> dict[str, Any]:
    store = run.store()
    checkpoint = (store.load_best if which == "best" else store.load_newest)(on_damaged=on_damaged)
    return checkpoint.model


def _warn(message: str) -> None:
    import warnings

    warnings.warn(message, stacklevel=3)


__all__ = ["CHECKPOINTS", "TOKENIZER_FILE", "ConfigError", "RunDirectory", "check_tokenizer", "load"]
