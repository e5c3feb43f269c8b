"""Loss against the position in a segment: what a model pays where a segment begins, if it has forgotten what came before.

The paper calls it context fragmentation. Consecutive segments are shown side by side, so that it is seen as a saw-tooth.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from transformer_xl.analysis.plots.lines import Line
from transformer_xl.analysis.plots.opened import OpenRun, Unit
from transformer_xl.analysis.reading.scoring import score
from transformer_xl.errors import CorpusError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model_config import VanillaConfig
from transformer_xl.reading.how import Reading
from transformer_xl.texts import Text

SEGMENTS = 3
"""So many of the longest segments are shown."""

_BAND = 1.96
"""Standard errors on each side of a mean that 95 % of such bands need to hold the truth."""


def segment_readings(run: OpenRun) -> list[tuple[str, Reading]]:
    """Return how a run is read for its lines: with its memory and without, or a vanilla model in its longest segments."""
    config, own = run.config, replace(Reading.of_run(run.config), ext_len=0)
    if isinstance(config.model, VanillaConfig):
        return [("separate segments", replace(own, tgt_len=config.model.max_len or own.tgt_len))]
    if not own.mem_len:  # what it reads at once is a segment, however few tokens of it are scored at a time
        return [("separate segments", replace(own, tgt_len=own.tgt_len + config.eval.ext_len))]
    return [("with memory", own), ("without memory", own.without_memory())]


def position_lines(
    run: OpenRun,
    model: LanguageModel,
    text: Text,
    *,
    span: int,
    unit: Unit,
    on_tokens: Callable[[int], object] | None = None,
) -> list[Line]:
    """Score a text and return the mean loss of each position of consecutive segments, with a band of 95 % confidence.

    Args:
        run: whose model it is.
        model: of the run.
        text: to score.
        span: positions to show; rounded up to whole segments.
        unit: of the losses.
        on_tokens: called with the number of tokens just scored.

    Raises:
        CorpusError: the text is too short for a mean.
    """
    lines = []
    for how, reading in segment_readings(run):
        measured = score(model, text, run.config, reading, per_token=True, on_tokens=on_tokens)
        assert measured.token_nats is not None
        factor = 1.0 if unit == "nats" else measured.tokens / measured.n_characters / math.log(2)
        mean, error = by_position(measured.token_nats, period=math.ceil(span / reading.tgt_len) * reading.tgt_len)
        y, half = factor * mean[:span], factor * _BAND * error[:span]
        look = "dashed" if how == "without memory" else "plain"
        own = {"low": (y - half).tolist(), "high": (y + half).tolist(), "look": look}
        lines.append(Line(run.name, f"{run.name}, {how}", list(range(len(y))), y.tolist(), **own))
    return lines


def by_position(nats: np.ndarray, *, period: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard error of losses at each position of stretches of a text.

    Args:
        nats: of each token, in order; the first stretch begins with the first.
        period: tokens of a stretch; an unfinished last one is left out.

    Returns:
        Two arrays (period,), float64.

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
