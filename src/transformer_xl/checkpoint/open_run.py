"""Open a run or an exported model for use: the model on its device, its tokenizer, and the texts that it reads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.config.model import read_segment
from transformer_xl.config.run import RunConfig
from transformer_xl.console import warn
from transformer_xl.data.named import SplitName
from transformer_xl.data.text import Text, file_text, split_text
from transformer_xl.data.text_files import EVERY_LINE
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.device import choose_device
from transformer_xl.model.base import LanguageModel, SequenceModel
from transformer_xl.model.pretrained import CONFIG_FILE, resolve
from transformer_xl.reading.reading import Reading
from transformer_xl.tokenizers.base import Tokenizer

Which = Literal["best", "last", "average"]
"""Which weights of a run: those with the best validation, the last ones, or the last average."""


@dataclass(frozen=True)
class Opened:
    """A run or an exported model, ready to use."""

    source: str  # as the user gave it
    any_model: SequenceModel  # on its device, in evaluation mode
    tokenizer: Tokenizer
    config: RunConfig  # of an exported model: the model's settings, its segment, and defaults for the rest
    is_run: bool  # a run has its own corpus

    @property
    def model(self) -> LanguageModel:
        """The model, if it reads from left to right."""
        if isinstance(self.any_model, LanguageModel):
            return self.any_model
        self.check_not_fine_tuned()
        kind = type(self.any_model).__name__
        raise ConfigError(
            f"'{self.source}' is an {kind}, which fills gaps with both sides in sight and cannot write or read from left to "
            f"right; txl eval says how well it fills them, txl score scores texts by gaps, and txl finetune teaches it a task"
        )

    def check_not_fine_tuned(self) -> None:
        """Refuse a fine-tuned model, for what needs one that predicts tokens."""
        if head := self.any_model.config.head:
            raise ConfigError(
                f"'{self.source}' is fine-tuned ({head.kind}) and predicts no tokens; txl predict gives what it was tuned for"
            )

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.any_model.device

    @cached_property
    def n_parameter(self) -> int:
        """The model's number of parameters."""
        return sum(parameter.numel() for parameter in self.any_model.parameters())

    def reading(self, **changes: Any) -> Reading:
        """Return the way in which `txl eval` reads, with changes; see `Reading.of_run`."""
        return Reading.of_run(self.config, **changes)

    def text(
        self,
        *,
        file: Path | None = None,
        split: SplitName | None = None,
        corpus: str | None = None,
        limit: int | None = None,
    ) -> Text:
        """Return a file, or else a split of the run's corpus or of another one; see `file_text` and `split_text`.

        Raises:
            ConfigError: neither a file nor a corpus for a model without one.
            CorpusError: a text that cannot be read.
        """
        if file is not None:
            separator = EVERY_LINE if self.config.train.loss == "answer" else None
            return file_text(file, self.tokenizer, separator=separator)
        if not self.is_run and corpus is None:
            raise ConfigError(f"'{self.source}' is a model without a corpus of its own; give --file or --corpus")
        return split_text(self.config, self.tokenizer, split=split, corpus=corpus, limit=limit)


def open_run(
    source: str | Path,
    *,
    which: Which = "best",
    device: str = "auto",
    on_damaged: Callable[[str], None] = warn,
    any_model: bool = False,
) -> Opened:
    """Open a run, an exported model or a hub id; see `load`. Without `any_model`, it must read from left to right.

    Raises:
        CheckpointError: there is nothing, everything is damaged, or weights are not finite.
        ConfigError: this machine has no such device, or the model does not read from left to right.
    """
    place = choose_device(device)  # complain before a large model is loaded
    model, tokenizer = load(source, which=which, on_damaged=on_damaged)
    model = model.to(place)
    directory = RunDirectory(source)
    config = directory.config() if directory.holds_run else RunConfig(model=model.config)
    if not directory.holds_run and (segment := read_segment(resolve(source) / CONFIG_FILE)):
        config = config.changed(train={"tgt_len": segment})
    opened = Opened(str(source), model, tokenizer, config, directory.holds_run)
    if not any_model:
        _ = opened.model  # refuses another one
    return opened
