"""Runs on one picture: opened, named, and checked for what can be compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformer_xl.checkpoint.run_directory import RunDirectory, short_names
from transformer_xl.config import RunConfig
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import ConfigError
from transformer_xl.texts import text_difference

Unit = Literal["nats", "bpc"]

UNITS: dict[Unit, str] = {"nats": "nats per token", "bpc": "bits per character"}
"""What losses are given in, in words."""


@dataclass(frozen=True)
class OpenRun:
    """A run that is compared with others.

    Attributes:
        name: short, and no other's.
        path: of its directory.
        config: its settings.
        tokenizer: what its ids mean.
    """

    name: str
    path: Path
    config: RunConfig
    tokenizer: Tokenizer


def open_runs(paths: Sequence[Path]) -> list[OpenRun]:
    """Open runs, each once.

    Raises:
        CheckpointError: one is not the directory of a run.
    """
    paths = list(dict.fromkeys(paths))
    runs = []
    for path, name in zip(paths, short_names(paths), strict=True):
        directory = RunDirectory(path)
        runs.append(OpenRun(name, path, directory.config(), directory.tokenizer()))
    return runs


def check_comparable(runs: Sequence[OpenRun], unit: Unit, *, warn: Callable[[str], object]) -> None:
    """Refuse losses that mean different things on one picture, and warn of those of different texts.

    Raises:
        ConfigError: tokens are not the same and losses are per token, or what they do not say differs.
    """
    first = runs[0]
    for run in runs[1:]:
        if run.tokenizer.fingerprint != first.tokenizer.fingerprint:
            sizes = f"'{first.name}' ({_words(first.tokenizer)}) and '{run.name}' ({_words(run.tokenizer)})"
            if unit == "nats":
                raise ConfigError(f"the vocabularies of {sizes} differ, so their nats per token do, too; use --unit bpc")
            if first.tokenizer.loses or run.tokenizer.loses:
                raise ConfigError(
                    f"the vocabularies of {sizes} differ, and one of them leaves parts of the text out, so that bits per "
                    "character differ, too; draw one picture for each"
                )
    for run in runs[1:]:
        if found := text_difference(first.config.data, run.config.data):
            warn(
                f"runs of different texts are on one picture: data.{found[0]} of '{first.name}' is {found[1]}, of '{run.name}' "
                f"{found[2]}; a text may be easier than another"
            )
            return


def check_curves(runs: Sequence[OpenRun], *, warn: Callable[[str], object]) -> None:
    """Warn of validations that read unlike parts of a text, so that their curves are not comparable."""
    read = {run.config.eval.max_tokens: run for run in runs}
    if len(read) > 1:
        sizes = (f"'{run.name}' {'the whole split' if n is None else f'{n:,} tokens at most'}" for n, run in read.items())
        warn(f"validation reads of {', of '.join(sizes)} (eval.max_tokens): levels of their curves cannot be compared")


def _words(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind}, {tokenizer.vocab_size:,}"
