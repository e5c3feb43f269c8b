"""The record of a run: `metrics.jsonl`, whatever else it is logged to, and the loss curve as a picture."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_xl.errors import CheckpointError
from transformer_xl.files import replace_file
from transformer_xl.pictures import new_figure, save_picture
from transformer_xl.training.loggers import open_loggers

METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"
_REMEDY = "free disk space, then --resume"


class Record:
    """Append-only log of a run, one JSON object per line; `kind` is train, valid, sample or final.

    Args:
        directory: of the run.
        loggers: `tensorboard`, `wandb`, `trackio`; none: TensorBoard if it is installed.
        settings: of the run, for those that show them.
        warn: told of a logger that fails, which ends no run.

    Raises:
        ConfigError: an unknown logger, or one that is not installed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        loggers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.directory = directory
        self.path = directory / METRICS_FILE
        self._loggers = open_loggers(loggers, directory, settings or {}, tensorboard=_tensorboard, warn=warn)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one entry.

        Raises:
            CheckpointError: the disk is full or cannot be written.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line({"kind": kind, "step": step, **{name: _storable(value) for name, value in values.items()}}))
        except OSError as error:
            raise self._unwritable(error) from None
        for logger in self._loggers:
            logger.log(kind, step, values)

    def sync(self) -> None:
        """Make sure that every entry is on the disk, before a checkpoint that counts on them."""
        try:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:  # nothing was logged yet
            return
        except OSError as error:
            raise self._unwritable(error) from None

    def rewind(self, step: int) -> None:
        """Drop the entries after `step`, and a half-written last line: a resumed run writes them again.

        Raises:
            CheckpointError: the disk is full or cannot be written; the log is as it was.
        """
        if not self.path.exists():
            return
        entries = read_metrics(self.directory)
        kept = [entry for entry in entries if entry["step"] <= step and entry["kind"] != "final"]
        try:
            replace_file(self.path, "".join(map(_line, kept)).encode())
        except OSError as error:
            raise self._unwritable(error) from None
        for logger in self._loggers:
            logger.rewind(step)

    def draw(self) -> Path | None:
        """Draw training and validation loss against tokens read; None if there is nothing to draw yet."""
        entries = read_metrics(self.directory)
        if not any(entry["kind"] in ("train", "valid") and entry["loss"] is not None for entry in entries):
            return None
        return _draw(entries, self.directory / CURVE_FILE)

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"cannot write to '{self.directory}': {error.strerror or error}; {_REMEDY}")

    def close(self) -> None:
        """Let all loggers send what they have left."""
        for logger in self._loggers:
            logger.close()


def _line(entry: dict[str, Any]) -> str:
    # ASCII: a byte-level model may write lone surrogates, or line ends other than \n
    return json.dumps(entry, allow_nan=False) + "\n"


def _storable(value: Any) -> Any:
    """JSON has no infinity; a perplexity may be."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's `metrics.jsonl`, none if there is none yet; a half-written last line is left out."""
    path, entries = directory / METRICS_FILE, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:  # the process was killed while it wrote this line
            break
    return entries


def _draw(entries: list[dict[str, Any]], path: Path) -> Path:
    figure = new_figure()
    axes = figure.add_subplot()
    for kind, style in (("train", {"linewidth": 1, "alpha": 0.6}), ("valid", {"marker": "o", "markersize": 3})):
        found = [entry for entry in entries if entry["kind"] == kind and entry["loss"] is not None]
        points = [(entry["tokens"] / 1e6, entry["loss"]) for entry in found]
        if points:
            x, y = zip(*points, strict=True)
            name = {"train": "training", "valid": f"validation, {y[-1]:.3f} at the end"}[kind]
            axes.plot(x, y, label=name, **{"marker": "." if len(x) == 1 else "", **style})
    for final in [entry for entry in entries if entry["kind"] == "final" and "loss_without_memory" in entry][-1:]:
        name = f"whole split: {final['loss_without_memory']:.3f} without memory, {final['loss']:.3f} with it"
        axes.axhline(final["loss_without_memory"], label=name, linestyle="--", linewidth=1, color="gray")
    axes.set(xlabel="tokens read (millions)", ylabel="loss (nats per token)", title=f"{path.parent.name}: loss while training")
    axes.grid(alpha=0.3)
    axes.legend()
    return save_picture(figure, path, remedy=_REMEDY)


def _tensorboard(directory: Path, forgotten_from: int | None) -> Any:
    """Return a TensorBoard writer if the package is installed, else None; what was logged from a step on is shown no more."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory / "tensorboard"), purge_step=forgotten_from)
