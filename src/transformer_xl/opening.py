"""One way to open what a command works on: a run or a model, with its tokenizer, its text, its device and how it is read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.config import RunConfig
from transformer_xl.console import warn
from transformer_xl.data.named import SplitName
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import ConfigError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import choose_device
from transformer_xl.reading.how import Reading
from transformer_xl.texts import Text, file_text, split_text

Which = Literal["best", "last", "average"]
"""Which weights of a run: those with the best validation loss, the last ones, or the last average."""


@dataclass(frozen=True)
class Opened:
    """A run or an exported model, ready to be read with.

    Attributes:
        source: as the user named it.
        model: on its device, in evaluation mode.
        tokenizer: of the model.
        config: of the run; of an exported model, one with its model's settings and defaults for the rest.
        is_run: whether it is a run, and so has a text of its own.
    """

    source: str
    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    is_run: bool

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @cached_property
    def n_parameter(self) -> int:
        """Parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def reading(self, **changes: Any) -> Reading:
        """Return how `txl eval` reads, with changes; see `Reading.of_run`."""
        return Reading.of_run(self.config, **changes)

    def text(
        self,
        *,
        file: Path | None = None,
        split: SplitName | None = None,
        corpus: str | None = None,
        limit: int | None = None,
        check: Callable[[bytes], object] | None = None,
    ) -> Text:
        """Return the text that is asked for: a file, or a split of the run's corpus or of another one.

        Args:
            file: to read; None: a split.
            split: None: test, or valid where there is none.
            corpus: another one, or the directory that holds the run's; None: the run's.
            limit: at most so many predicted tokens of a split.
            check: called with a file's content before it is encoded, to refuse it.

        Raises:
            ConfigError: a file and a split at once, or neither for a model without a corpus of its own.
            CorpusError: a text that cannot be read.
        """
        if file is not None:
            if split is not None or corpus is not None:
                raise ConfigError("--file names a whole file; leave --split and --corpus out")
            return file_text(file, self.tokenizer, check=check)
        if not self.is_run and corpus is None:
            raise ConfigError(f"'{self.source}' is a model without a corpus of its own; give --file or --corpus")
        return split_text(self.config, self.tokenizer, split=split, corpus=corpus, limit=limit)


def open_run(
    source: str | Path, *, which: Which = "best", device: str = "auto", on_damaged: Callable[[str], None] = warn
) -> Opened:
    """Open a run, an exported model or a hub id.

    Args:
        source: a directory or a hub id.
        which: of a run: which weights.
        device: auto, cpu, cuda, cuda:N or mps.
        on_damaged: told, in one line each, of damaged checkpoints that were passed over.

    Raises:
        CheckpointError: nothing there, or everything damaged.
        ConfigError: no such device here.
    """
    place = choose_device(device)  # complain before a large model is loaded
    model, tokenizer = load(source, which=which, on_damaged=on_damaged)
    directory = RunDirectory(source)
    config = directory.config() if directory.holds_run else RunConfig(model=model.config)
    return Opened(str(source), model.to(place), tokenizer, config, directory.holds_run)
