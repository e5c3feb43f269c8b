"""Loss against the length of memory at evaluation."""

from collections.abc import Callable, Sequence
from fractions import Fraction

from transformer_xl.analysis.plots.lines import Line
from transformer_xl.analysis.plots.opened import OpenRun, Unit
from transformer_xl.analysis.reading.lengths import lengths_of, readings, trained_length
from transformer_xl.analysis.reading.scoring import score
from transformer_xl.errors import ConfigError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model_config import LstmConfig, VanillaConfig
from transformer_xl.reading.how import Reading
from transformer_xl.texts import Text

MULTIPLES = tuple(map(Fraction, ("0", "1/4", "1/2", "1", "2", "4", "8")))
"""Of the trained length."""


def n_scored(run: OpenRun, lengths: Sequence[int] | None) -> int:
    """Return how often `memory_line` scores a text."""
    return len(readings(run.config, _wanted(run, lengths))) or 1


def memory_line(
    run: OpenRun,
    model: LanguageModel,
    text: Text,
    *,
    unit: Unit,
    lengths: Sequence[int] | None = None,
    on_tokens: Callable[[int], object] | None = None,
) -> Line:
    """Score a run with memories of several lengths; one without a length, such as an LSTM, is level.

    Args:
        run: whose model it is.
        model: of the run.
        text: to score.
        unit: of the losses.
        lengths: of memory; None: multiples of the trained one.
        on_tokens: called with the number of tokens just scored.
    """
    config = run.config
    wanted = readings(config, _wanted(run, lengths))
    level = isinstance(config.model, LstmConfig)
    if not wanted and not level:
        given = ",".join(map(str, lengths or ()))
        raise ConfigError(f"--lengths '{given}' are none that '{run.name}' can be read with, for it has no memory; add 0")
    scores = [score(model, text, config, reading, on_tokens=on_tokens) for reading in wanted or [Reading.of_run(config)]]
    y = [measured.loss if unit == "nats" else measured.bpc for measured in scores]
    if level:
        return Line(run.name, run.name, [0], y, look="level")
    trained = 0 if isinstance(config.model, VanillaConfig) or not config.model.mem_len else trained_length(config)
    how = "" if config.model.mem_len else " (text read again)"
    return Line(run.name, f"{run.name}{how}", [reading.length for reading in wanted], y, trained=trained)


def _wanted(run: OpenRun, lengths: Sequence[int] | None) -> Sequence[int]:
    return lengths_of(run.config, MULTIPLES) if lengths is None else lengths
