"""What the `state.json` of a checkpoint must be, checked before anything of a run is restored from it.

A checkpoint's hashes say that nobody changed it by accident. Whoever forges it can write hashes, too.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from transformer_xl.settings import Natural, Positive, Settings

_Amount = Annotated[float, Field(ge=0)]


class _Saved(Settings):
    model_config = ConfigDict(extra="ignore")


class _Position(_Saved):
    epoch: Natural
    segment: Natural


class _Average(_Saved):
    kind: Literal["none", "ema", "swa"]
    count: Natural


class _Schedule(_Saved):
    plateau_factor: _Amount
    best_loss: float | None
    waiting: Natural


class SavedState(_Saved):
    """What `Trainer.checkpoint` writes besides tensors.

    Raises:
        ConfigError: a value is missing, or of another type or range.
    """

    tokens: Natural
    seconds: _Amount
    skipped: Natural
    bad_in_a_row: Natural
    stream: _Position
    offset: Natural
    average: _Average
    schedule: _Schedule
    scaler: dict[str, _Amount]
    world_size: Positive
    record: dict[str, Any]


class _Interval(_Saved):
    nats: _Amount
    tokens: Natural
    scored: Natural
    seconds: _Amount


class _Best(_Saved):
    loss: float
    step: Natural
    average: bool = False
    tie_break: float = 0.0


class SavedRecord(_Saved):
    """What a run adds; raises as `SavedState`."""

    interval: _Interval
    best: _Best | None
    training_text: str
    waiting: Natural = 0
    entries: Natural | None = None
