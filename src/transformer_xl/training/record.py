"""The record of a run: `metrics.jsonl`, a picture of the loss curve, and other programs that log it.

TensorBoard and Weights & Biases are imported only on request. The run's directory keeps the run's name in W&B, so a resumed
run goes on in the same place. No failure of theirs ends a training, because `metrics.jsonl` has everything.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformer_xl.config.run import RunConfig
from transformer_xl.errors import CheckpointError, ConfigError, did_you_mean, one_line
from transformer_xl.files import canonical_json, naming, replace_file
from transformer_xl.pictures import MISSING, can_draw
from transformer_xl.training.entries import METRICS_FILE, read_metrics
from transformer_xl.training.pictures import draw_curve
from transformer_xl.untrusted import read_json_object

PROJECT = "transformer_xl"

_LOGGERS = ("tensorboard", "wandb")

Warn = Callable[[str], None]  # shows a line of warning


class Record:
    """Log of a run, a JSON object per line; the `kind` of an entry is train, valid, sample or final.

    Without `loggers`, TensorBoard is used if it is installed. A logger that fails causes a warning and ends no run.
    """

    def __init__(
        self,
        directory: Path,
        *,
        loggers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        warn: Warn = warnings.warn,
    ) -> None:
        self.directory = directory
        self.path = directory / METRICS_FILE
        self._warn = warn
        self._loggers: dict[str, _Logger] = {}
        for name in dict.fromkeys(loggers or ("tensorboard",)):
            with self._guarded(name):
                is_board = name == "tensorboard"
                self._loggers[name] = _TensorBoard(directory) if is_board else _WeightsAndBiases(directory, settings or {})

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one entry."""
        entry: dict[str, Any] = {"kind": kind, "step": step}
        for name, value in values.items():  # JSON has no infinity, but a perplexity may be infinite
            entry[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(entry))
        self._call_loggers(lambda logger: logger.log(kind, step, values))

    def sync(self) -> None:
        """Force all entries to the disk. A checkpoint relies on them, so call this before it is saved."""
        with suppress(FileNotFoundError), naming(self.path), self.path.open("rb") as file:  # nothing was logged yet
            os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Drop what a resumed run writes again: the entries after `step`, final scores, and a half-written last line."""
        if not self.path.exists():
            return
        kept = [entry for entry in read_metrics(self.directory) if entry["step"] <= step and entry["kind"] != "final"]
        replace_file(self.path, "".join(map(_line, kept)).encode())
        self._call_loggers(lambda logger: logger.rewind(step))

    def draw(self, config: RunConfig, *, end: str = "") -> Path | None:
        """Draw the loss curve, see `draw_curve`; None if there is nothing to draw yet, or nothing to draw with."""
        if not can_draw():
            self._warn(f"no picture is drawn: {MISSING}")
            return None
        return draw_curve(read_metrics(self.directory), config, self.directory / "loss.png", end=end)

    def close(self) -> None:
        """Let all loggers send their remaining entries."""
        self._call_loggers(lambda logger: logger.close())

    def _call_loggers(self, call: Callable[["_Logger"], object]) -> None:
        for name, logger in list(self._loggers.items()):
            with self._guarded(name):
                call(logger)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Turn a logger's failure into a warning, and drop the logger: training goes on without it."""
        try:
            yield
        except Exception as error:  # other programs raise anything; a network that is gone must not cost a run
            self._loggers.pop(name, None)
            self._warn(
                f"{name} failed ({one_line(error) or type(error).__name__}); it gets nothing more, metrics.jsonl has everything"
            )


def _line(entry: dict[str, Any]) -> str:
    # in ASCII, because a byte-level model may write lone surrogates, or line ends other than \n
    return json.dumps(entry, allow_nan=False) + "\n"


def check_loggers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a logger that is unknown or not installed."""
    for name in names:
        if name not in _LOGGERS:
            raise ConfigError(f"unknown logger '{name}'; {did_you_mean(name, _LOGGERS)}")
        if find_spec(name) is None:
            raise ConfigError(f"logger '{name}' is not installed; pip install {name}, or leave out --logger {name}")


class _TensorBoard:
    """TensorBoard. It opens with the first entry, because only then is it known which old entries it must forget."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._forgotten_from: int | None = None

    @cached_property
    def _writer(self) -> Any:
        return _tensorboard(self._directory, self._forgotten_from)

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if not self._writer:
            return
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{name}", value, step)
            elif name == "text":
                self._writer.add_text(kind, value, step)

    def rewind(self, step: int) -> None:
        self._forgotten_from = step + 1

    def close(self) -> None:
        if self.__dict__.get("_writer"):
            self._writer.close()


class _WeightsAndBiases:
    """A run in W&B, which logs numbers only."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        place: dict[str, Any] = {"project": PROJECT, "name": directory.name, "dir": str(directory)}
        self._run = wandb.init(**place, id=_identity(directory), resume="allow", config=dict(settings))
        # a value carries its step, because W&B's own counter refuses a step that a resumed run logs again
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        numbers: dict[str, float] = {
            f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)
        }
        if numbers:
            self._run.log({**numbers, "step": step})

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


_Logger = _TensorBoard | _WeightsAndBiases


def _tensorboard(directory: Path, forgotten_from: int | None) -> Any:
    """Return a TensorBoard writer that forgets all entries from a step on; None without the package."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory / "tensorboard"), purge_step=forgotten_from)


def _identity(directory: Path) -> str:
    """Return the run's random name in W&B, kept in the run's directory."""
    path = directory / "loggers.json"
    with suppress(CheckpointError, FileNotFoundError, LookupError):  # none yet, or damaged: then the run begins anew there
        return read_json_object(path)["wandb"]
    identity = uuid4().hex[:8]
    replace_file(path, canonical_json({"wandb": identity}))
    return identity
