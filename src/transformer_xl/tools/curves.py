"""The lines that `txl plot` draws: losses while runs learn, and by length of memory."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal

from transformer_xl.checkpoint.open_run import Opened
from transformer_xl.data.named import SplitName
from transformer_xl.data.text import Text
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.pictures import PlotLine
from transformer_xl.reading.reading import Reading
from transformer_xl.tools.comparison import ComparedRun, Unit, score
from transformer_xl.tools.lengths import has_length, lengths_of, readings, trained_length
from transformer_xl.training.entries import METRICS_FILE, read_metrics
from transformer_xl.training.pictures import curves_of

Against = Literal["tokens", "steps", "seconds"]

XLABELS: dict[Against, str] = {
    "tokens": "training tokens read (millions)",
    "steps": "training steps",
    "seconds": "seconds of training",
}

_MULTIPLES = tuple(map(Fraction, ("0", "1/4", "1/2", "1", "2", "4", "8")))  # of the trained length


def learning_curves(runs: Sequence[ComparedRun], *, against: Against, unit: Unit) -> list[PlotLine]:
    """Return training and validation loss of runs, of averaged weights too."""
    return [line for run in runs for line in _curves_of_run(run, against, unit)]


def _curves_of_run(run: ComparedRun, against: Against, unit: Unit) -> list[PlotLine]:
    entries = read_metrics(run.path)
    curves = [curve for curve in curves_of(entries, run.config) if curve.kind != "final"]
    if not curves:
        raise CheckpointError(f"'{run.path}' has no losses in {METRICS_FILE} yet; train it further with txl train --resume")
    factor = 1.0 if unit == "nats" else _bits_per_character(run, entries)
    lines = []
    for curve in curves:
        found = [entry for entry, _ in curve.points]
        x = {
            "tokens": [entry["tokens"] / 1e6 for entry in found],
            "steps": [entry["step"] for entry in found],
            "seconds": [entry["seconds"] for entry in found],
        }[against]
        y = [factor * loss for _, loss in curve.points]
        lines.append(PlotLine(run.name, f"{run.name}, {curve.title(factor)}", x, y, look=curve.look))
    return lines


def _bits_per_character(run: ComparedRun, entries: Sequence[dict[str, Any]]) -> float:
    """Return how many bits per character a nat per token is, according to the last validation."""
    for entry in reversed(entries):
        if entry["kind"] == "valid" and entry.get("bpc") and entry["loss"]:
            return entry["bpc"] / entry["loss"]
    raise CheckpointError(
        f"'{run.path}' was not validated yet, so nobody knows how many characters its tokens have; use --unit nats"
    )


def open_texts(
    runs: Sequence[ComparedRun],
    *,
    split: SplitName | None = None,
    corpus: str | None = None,
    limit: int,
    warn: Callable[[str], object],
) -> Iterator[tuple[ComparedRun, Opened, Text]]:
    """Open one run after another, and at most `limit` tokens of a split for each; see `split_text` for `split` and `corpus`.

    If vocabularies differ, it warns that equally many tokens are unequal parts of a text.
    """
    is_whole: dict[str, bool] = {}  # by vocabulary
    warned = False
    for run in runs:
        opened = run.open()
        text = opened.text(split=split, corpus=corpus, limit=limit)
        is_whole[run.tokenizer.fingerprint] = text.is_whole
        if len(is_whole) > 1 and not all(is_whole.values()) and not warned:
            warn(
                f"{limit:,} tokens of one vocabulary are not as much text as of another; --tokens larger than the split "
                "compares the same text"
            )
            warned = True
        yield run, opened, text


def memory_readings(run: ComparedRun, lengths: Sequence[int] | None = None) -> list[Reading]:
    """Return how a run is read for each point of its line; `lengths` of None: multiples of the trained one.

    A model without an attention length is read as `txl eval` does.
    """
    if not has_length(run.config):
        return [Reading.of_run(run.config)]
    found = readings(run.config, lengths_of(run.config, _MULTIPLES) if lengths is None else lengths)
    if not found:
        listed = ",".join(map(str, lengths or ()))
        raise ConfigError(f"'{run.name}' can be read with none of --lengths {listed}, because it has no memory; add 0")
    return found


def memory_line(
    run: ComparedRun,
    opened: Opened,
    text: Text,
    *,
    unit: Unit,
    lengths: Sequence[int] | None = None,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> PlotLine:
    """Score a run with memories of several lengths, see `memory_readings`; without an attention length, the line is level."""
    chosen = memory_readings(run, lengths)
    scores = [score(opened, text, reading, on_tokens=on_tokens) for reading in chosen]
    y = [measured.loss if unit == "nats" else measured.bpc for measured in scores]
    if not has_length(run.config):
        return PlotLine(run.name, run.name, [0], y, look="level")
    remembers = run.config.model.mem_len > 0
    return PlotLine(
        run.name,
        run.name if remembers else f"{run.name} (text read again)",
        [reading.length for reading in chosen],
        y,
        trained=trained_length(run.config) if remembers else 0,
    )
