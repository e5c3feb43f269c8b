"""The record of a run: `metrics.jsonl`, TensorBoard if it is installed, and the loss curve as a picture."""

import json
import os
from pathlib import Path
from typing import Any

from transformer_xl.errors import CheckpointError

METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"


class Record:
    """Append-only log of a run, one JSON object per line; `kind` is train, valid or sample.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / METRICS_FILE
        self._board: Any = _tensorboard(directory)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one entry.

        Raises:
            CheckpointError: the disk is full or cannot be written.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "step": step, **values}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write '{self.path}': {error.strerror}; free disk space, then --resume") from None
        if self._board:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
                elif name == "text":
                    self._board.add_text(kind, value, step)

    def sync(self) -> None:
        """Make sure that every entry is on the disk, before a checkpoint that counts on them."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Drop the entries after `step`, and a half-written last line: a resumed run writes them again."""
        if not self.path.exists():
            return
        kept = [entry for entry in read_metrics(self.directory) if entry["step"] <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept), encoding="utf-8")
        temporary.replace(self.path)

    def draw(self) -> Path | None:
        """Draw training and validation loss against tokens read; None if there is nothing to draw yet."""
        entries = read_metrics(self.directory)
        if not any(entry["kind"] in ("train", "valid") for entry in entries):
            return None
        return _draw(entries, self.directory / CURVE_FILE)

    def close(self) -> None:
        """Flush and close TensorBoard."""
        if self._board:
            self._board.close()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of a run's `metrics.jsonl`; a half-written last line is left out."""
    entries = []
    for line in (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:  # the process was killed while it wrote this line
            break
    return entries


def _draw(entries: list[dict[str, Any]], path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, style in (("train", {"linewidth": 1, "alpha": 0.6}), ("valid", {"marker": "o", "markersize": 3})):
        points = [(entry["tokens"] / 1e6, entry["loss"]) for entry in entries if entry["kind"] == kind]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, label={"train": "training", "valid": "validation"}[kind], **style)
            if kind == "valid":
                axes.annotate(f"{y[-1]:.3f}", (x[-1], y[-1]), textcoords="offset points", xytext=(4, 6))
    axes.set(xlabel="tokens read (millions)", ylabel="loss (nats per token)", title=f"{path.parent.name}: loss while training")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = path.with_name(f"{path.stem}.tmp.png")
    figure.savefig(temporary)
    temporary.replace(path)
    return path


def _tensorboard(directory: Path) -> Any:
    """Return a TensorBoard writer if the package is installed, else None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory / "tensorboard"))
