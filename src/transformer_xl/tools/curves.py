"""The lines that `txl plot` draws: losses while runs learn, by length of memory, and by position in a segment.

The last one shows what a model without memory loses at the beginning of a segment: the paper's context fragmentation.
Consecutive segments are drawn side by side, so that it looks like a saw-tooth.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from transformer_xl.checkpoint.open_run import Opened
from transformer_xl.config.run import RunConfig
from transformer_xl.data.named import SplitName
from transformer_xl.data.text import Text
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError
from transformer_xl.pictures import PlotLine
from transformer_xl.reading.reading import Reading, memory_in_words
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


def segment_readings(config: RunConfig) -> list[tuple[str, Reading]]:
    """Return the name and reading of each line of a run: with memory and without, or in the longest segments."""
    own = Reading.of_run(config)
    if own.mem_len:
        own = replace(own, ext_len=0)
        return [(memory_in_words(config.model, each.mem_len), each) for each in (own, own.without_memory())]
    # a segment is all that is read at once, even if fewer tokens are scored at a time
    longest = config.model.longest_segment or own.tgt_len + own.ext_len
    return [("separate segments", replace(own, tgt_len=longest, ext_len=0))]


def position_lines(
    run: ComparedRun,
    opened: Opened,
    text: Text,
    *,
    span: int,
    unit: Unit,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> list[PlotLine]:
    """Score a text and return the mean loss of each of `span` positions in consecutive segments, with 95 % confidence."""
    lines = []
    for how, reading in segment_readings(run.config):
        measured = score(opened, text, reading, per_token=True, on_tokens=on_tokens)
        assert measured.token_nats is not None
        factor = 1.0 if unit == "nats" else measured.tokens / measured.n_characters / math.log(2)
        mean, error = by_position(measured.token_nats, period=math.ceil(span / reading.tgt_len) * reading.tgt_len)
        y, half = factor * mean[:span], factor * 1.96 * error[:span]  # 95 % of a normal distribution
        low, high = (y - half).tolist(), (y + half).tolist()
        look = "dashed" if lines else "marked"  # the second is without memory
        lines.append(PlotLine(run.name, f"{run.name}, {how}", list(range(len(y))), y.tolist(), low, high, look))
    return lines


def by_position(nats: np.ndarray, *, period: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard error of losses at each position of stretches of `period` tokens: float64 (period,).

    An unfinished last stretch is left out.

    Example:
        >>> by_position(np.array([1.0, 2.0, 3.0, 4.0, 9.0]), period=2)
        (array([2., 3.]), array([1., 1.]))
    """
    n = len(nats) // period
    if n < 2:
        raise CorpusError(f"{len(nats):,} tokens are too few for means over stretches of {period:,}; score a longer text")
    stretches = nats[: n * period].astype(np.float64).reshape(n, period)
    return stretches.mean(axis=0), stretches.std(axis=0, ddof=1) / math.sqrt(n)
