"""Runs that are compared: their names, how they are scored, and whether their losses can be compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformer_xl.checkpoint.open_run import Opened, open_run
from transformer_xl.checkpoint.run_directory import RunDirectory, short_names
from transformer_xl.config.run import RunConfig
from transformer_xl.data.text import Text, text_difference
from transformer_xl.errors import ConfigError
from transformer_xl.reading.evaluation import Score, evaluate
from transformer_xl.reading.reading import Reading
from transformer_xl.tokenizers.base import Tokenizer

Unit = Literal["nats", "bpc"]

UNITS: dict[Unit, str] = {"nats": "nats per token", "bpc": "bits per character"}


@dataclass(frozen=True)
class ComparedRun:
    """A run that is compared with others; it may have no checkpoint."""

    name: str  # short and unique
    path: Path
    config: RunConfig
    tokenizer: Tokenizer

    def open(self) -> Opened:
        """Load the best weights onto the device that the run was trained on."""
        return open_run(self.path, device=self.config.train.device)


def find_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs in the directories, each once."""
    paths = list(dict.fromkeys(paths))
    directories = [RunDirectory(path) for path in paths]
    return [
        ComparedRun(name, directory.path, directory.config(), directory.tokenizer())
        for name, directory in zip(short_names(paths), directories, strict=True)
    ]


def score(
    opened: Opened,
    text: Text,
    reading: Reading,
    *,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> Score:
    """Score a text as `txl eval` does; `on_tokens` is called with the number of tokens just scored."""
    return evaluate(
        opened.model,
        text.ids,
        reading,
        n_characters=text.n_characters,
        n_bytes=text.n_bytes,
        on_tokens=on_tokens,
    )


def check_units(runs: Sequence[ComparedRun], unit: Unit, *, warn: Callable[[str], object]) -> None:
    """Refuse losses that cannot be drawn on one axis, and warn if runs read different texts."""
    first, *others = runs
    for run in others:
        both = f"'{first.name}' and '{run.name}'"
        one, other = first.config.predicts, run.config.predicts
        if one != other:
            raise ConfigError(
                f"{both} predict each {one} and each {other}, so losses cannot be compared; draw one picture for each"
            )
        if run.tokenizer.fingerprint == first.tokenizer.fingerprint:
            continue
        if first.tokenizer.loses or run.tokenizer.loses:
            problem = "differ, and one of them leaves parts of the text out, so no unit of loss can be compared"
            raise ConfigError(f"the vocabularies of {both} {problem}; draw one picture for each")
        if unit == "nats":
            raise ConfigError(f"the vocabularies of {both} differ, so nats per token cannot be compared; use --unit bpc")
    for run in others:
        if difference := text_difference(first.config.data, run.config.data):
            name, one, other = difference
            warn(f"texts differ, and one may be easier: data.{name} is {one} for '{first.name}' and {other} for '{run.name}'")
            return


def check_validations(runs: Sequence[ComparedRun], *, warn: Callable[[str], object]) -> None:
    """Warn if validations read different parts of a text, because then their curves cannot be compared."""
    read = {run.config.eval.max_tokens: run for run in runs}
    if len(read) > 1:
        sizes = (f"{'the whole split' if n is None else f'at most {n:,} tokens'} for '{run.name}'" for n, run in read.items())
        warn(f"validation reads {', '.join(sizes)} (eval.max_tokens), so the levels of their curves cannot be compared")
