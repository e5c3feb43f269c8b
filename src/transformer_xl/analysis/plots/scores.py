"""Losses of a text against the length of memory, and against the position in a segment.

The second shows what a model without memory loses where a segment begins: the paper's context fragmentation. Consecutive
segments are shown side by side, where it looks like a saw-tooth.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from transformer_xl.analysis.comparison import Run, Unit, score
from transformer_xl.analysis.lengths import has_length, lengths_of, readings, trained_length
from transformer_xl.analysis.plots.lines import Line
from transformer_xl.config import RunConfig
from transformer_xl.data.named import SplitName
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.opening import Opened, Text
from transformer_xl.reading.evaluation import Reading

_MULTIPLES = tuple(map(Fraction, ("0", "1/4", "1/2", "1", "2", "4", "8")))  # of the trained length


def open_texts(
    runs: Sequence[Run],
    *,
    split: SplitName | None = None,
    corpus: str | None = None,
    limit: int,
    warn: Callable[[str], object],
) -> Iterator[tuple[Run, Opened, Text]]:
    """Open one run after another, each with at most `limit` tokens of a split; see `split_text` for `split` and `corpus`.

    Warns if vocabularies differ, because equally many tokens are then unequal parts of a text.
    """
    whole: dict[str, bool] = {}
    warned = False
    for run in runs:
        opened = run.open()
        text = opened.text(split=split, corpus=corpus, limit=limit)
        whole[run.tokenizer.fingerprint] = text.is_whole
        if len(whole) > 1 and not all(whole.values()) and not warned:
            warn(
                f"{limit:,} tokens of one vocabulary are not as much text as of another; --tokens larger than the split "
                "compares the same text"
            )
            warned = True
        yield run, opened, text


def memory_readings(run: Run, lengths: Sequence[int] | None = None) -> list[Reading]:
    """Return how a run is read for its line of memory lengths; None: multiples of the trained one.

    A model without a length is read as `txl eval` does.

    Raises:
        ConfigError: the run can be read with none of the lengths.
    """
    if not has_length(run.config):
        return [Reading.of_run(run.config)]
    found = readings(run.config, lengths_of(run.config, _MULTIPLES) if lengths is None else lengths)
    if not found:
        given = ",".join(map(str, lengths or ()))
        raise ConfigError(f"--lengths '{given}' are none that '{run.name}' can be read with, because it has no memory; add 0")
    return found


def memory_line(
    run: Run,
    opened: Opened,
    text: Text,
    *,
    unit: Unit,
    lengths: Sequence[int] | None = None,
    on_tokens: Callable[[int], object] | None = None,
) -> Line:
    """Score a run with memories of several lengths, see `memory_readings`; without a length, the line is level."""
    wanted = memory_readings(run, lengths)
    scores = [score(opened, text, reading, on_tokens=on_tokens) for reading in wanted]
    y = [measured.loss if unit == "nats" else measured.bpc for measured in scores]
    if not has_length(run.config):
        return Line(run.name, run.name, [0], y, look="level")
    remembers = run.config.model.mem_len > 0
    return Line(
        run.name,
        run.name if remembers else f"{run.name} (text read again)",
        [reading.length for reading in wanted],
        y,
        trained=trained_length(run.config) if remembers else 0,
    )


def segment_readings(config: RunConfig) -> list[tuple[str, Reading]]:
    """Return name and reading of each line of positions: with memory and without, or in the longest segments."""
    own = Reading.of_run(config)
    if own.mem_len:
        own = replace(own, ext_len=0)
        return [("with memory", own), ("without memory", own.without_memory())]
    # a segment is all that is read at once, even if fewer tokens are scored at a time
    longest = config.model.longest_segment or own.tgt_len + own.ext_len
    return [("separate segments", replace(own, tgt_len=longest, ext_len=0))]


def position_lines(
    run: Run,
    opened: Opened,
    text: Text,
    *,
    span: int,
    unit: Unit,
    on_tokens: Callable[[int], object] | None = None,
) -> list[Line]:
    """Score a text and return the mean loss of each of `span` positions in consecutive segments, with 95 % confidence.

    Raises:
        CorpusError: the text is too short for a mean.
    """
    lines = []
    for how, reading in segment_readings(run.config):
        measured = score(opened, text, reading, per_token=True, on_tokens=on_tokens)
        assert measured.token_nats is not None
        factor = 1.0 if unit == "nats" else measured.tokens / measured.n_characters / math.log(2)
        mean, error = by_position(measured.token_nats, period=math.ceil(span / reading.tgt_len) * reading.tgt_len)
        y, half = factor * mean[:span], factor * 1.96 * error[:span]  # 95 % of a normal distribution
        look = "dashed" if how == "without memory" else "plain"
        own = {"low": (y - half).tolist(), "high": (y + half).tolist(), "look": look}
        lines.append(Line(run.name, f"{run.name}, {how}", list(range(len(y))), y.tolist(), **own))
    return lines


def by_position(nats: np.ndarray, *, period: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard error of losses at each position of stretches of `period` tokens: float64 (period,).

    An unfinished last stretch is left out.

    Raises:
        CorpusError: fewer than two stretches.

    Example:
        >>> by_position(np.array([1.0, 2.0, 3.0, 4.0, 9.0]), period=2)
        (array([2., 3.]), array([1., 1.]))
    """
    n = len(nats) // period
    if n < 2:
        raise CorpusError(f"{len(nats):,} tokens are too few for means over stretches of {period:,}; score a longer text")
    stretches = nats[: n * period].astype(np.float64).reshape(n, period)
    return stretches.mean(axis=0), stretches.std(axis=0, ddof=1) / math.sqrt(n)
