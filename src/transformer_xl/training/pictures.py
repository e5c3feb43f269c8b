"""Pictures of a run: its loss curve, each line named with its split and memory; and which classes are taken for which."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transformer_xl.config.run import RunConfig
from transformer_xl.pictures import Look, PlotLine, draw, new_figure, save_picture
from transformer_xl.reading.reading import memory_in_words

Entry = dict[str, Any]  # of metrics.jsonl

_LOSSES: dict[str, dict[str, str]] = {  # of each kind of entry: the names of its losses, and what they are of
    "train": {"loss": "training"},
    "valid": {"loss": "validation", "average_loss": "validation, averaged weights"},
    "final": {
        "loss": "validation at the end",
        "loss_without_memory": "validation at the end",
        "average_loss": "validation at the end, averaged weights",
    },
}

MOST_CLASSES = 30
"""A matrix of more could not be read, and is not drawn."""


@dataclass(frozen=True)
class Curve:
    """Losses of one kind, all of the same text and with the same memory."""

    kind: Literal["train", "valid", "final"]
    name: str  # what the losses are of: split, weights, number of tokens, memory
    averaged: bool  # of averaged weights
    points: list[tuple[Entry, float]] = field(default_factory=list)  # entry of the log and loss; finite ones only

    @property
    def look(self) -> Look:
        """How its line is drawn."""
        looks: dict[str, Look] = {"train": "thin", "valid": "dashed" if self.averaged else "marked", "final": "end"}
        return looks[self.kind]

    def title(self, factor: float = 1.0) -> str:
        """Return its name, with the last loss times `factor` if it is one of validation."""
        last, loss = self.points[-1]
        if self.kind == "train":
            return self.name
        return f"{self.name}: {factor * loss:.3f}" + (f" at step {last['step']:,}" if self.kind == "valid" else "")


def curves_of(entries: Iterable[Entry], config: RunConfig) -> list[Curve]:
    """Return the curves of a run's log, training first; settings that were changed on resuming begin another curve."""
    found: dict[str, Curve] = {}
    for entry in entries:
        for key, what in _LOSSES.get(entry["kind"], {}).items():
            loss = entry.get(key)
            if loss is None or "tokens" not in entry:
                continue
            mem_len = config.model.mem_len if entry["kind"] == "train" else entry.get("mem_len", config.eval_mem_len)
            if config.task and entry["kind"] == "final":
                what = "validation, best weights" + (f" (step {entry['best_step']:,})" if entry.get("best_step") else "")
            memory = "" if config.task else memory_in_words(config.model, 0 if key == "loss_without_memory" else mem_len)
            name = ", ".join(filter(None, (what, _text_read(entry, config.predicts), memory)))
            found.setdefault(name, Curve(entry["kind"], name, key == "average_loss")).points.append((entry, loss))
    return sorted(found.values(), key=lambda curve: ("train", "valid", "final").index(curve.kind))


def draw_curve(entries: Sequence[Entry], config: RunConfig, path: Path, *, end: str = "") -> Path | None:
    """Draw all losses of a log against tokens read, with a legend below that names each; None: there is no finite loss.

    `end` says how the run ended if it failed, in a few words for the title.
    """
    curves = curves_of(entries, config)
    if all(curve.kind == "final" for curve in curves):
        return None
    xlabel, scale = tokens_axis(max(entry["tokens"] for entry in entries if "tokens" in entry))
    name, lines = path.absolute().parent.name, []
    for curve in curves:
        x, y = zip(*((entry["tokens"] / scale, loss) for entry, loss in curve.points), strict=True)
        if curve.kind == "final":  # larger and hollow, because it may lie upon a validation
            x, y = (_place(curve.points[-1][0], entries) / scale,), y[-1:]
        lines.append(PlotLine(name, curve.title(), x, y, look=curve.look))
    if failures := list(_not_finite(entries)):
        what = ", ".join(dict.fromkeys(what for _, what in failures))
        places = [tokens / scale for tokens, _ in failures]
        lines.append(PlotLine(name, f"not finite: {what}", places, places, look="failed"))
    unit = f"nats per {'text' if config.task else config.predicts}"
    if config.task and config.task.kind == "regression":
        unit = "squared error"
    title = f"{name}: loss while training" + (f", {end}" if end else "")
    return draw(lines, path, title=title, xlabel=xlabel, ylabel=f"loss ({unit})", from_zero=True)


def _place(final: Entry, entries: Iterable[Entry]) -> float:
    """Return after how many tokens the weights were reached that a final score is of."""
    best = final.get("best_step")
    return next((each["tokens"] for each in entries if each["kind"] == "valid" and each["step"] == best), final["tokens"])


def tokens_axis(most: float) -> tuple[str, float]:
    """Return the label of an axis of so many tokens at most, and how many tokens are one on it."""
    unit, scale = ("millions", 1e6) if most >= 1e6 else ("thousands", 1e3)
    return f"training tokens read ({unit})", scale


def _text_read(entry: Entry, predicts: str) -> str:
    """Return what part of the validation split an entry is of; logs of older versions do not say it."""
    scored, total = entry.get("scored"), entry.get("split_tokens")
    if scored is None or total is None:
        return ""
    return f"all {total:,} {predicts}s" if scored == total else f"first {scored:,} of {total:,} {predicts}s"


def _not_finite(entries: Iterable[Entry]) -> Iterator[tuple[float, str]]:
    """Yield where something was not finite, in tokens read, and what it was."""
    skipped = 0
    for entry in entries:
        if entry["kind"] == "train" and (entry.get("skipped") or 0) > skipped:
            skipped = entry["skipped"]
            yield entry["tokens"], "training steps, skipped"
        for key, what in _LOSSES.get(entry["kind"], {}).items():
            if entry["kind"] != "train" and key in entry and entry[key] is None and "tokens" in entry:
                yield entry["tokens"], what + (", no memory" if key == "loss_without_memory" else "")


def draw_confusion(path: Path, confusion: np.ndarray, labels: Sequence[str], *, name: str) -> Path:
    """Draw how many texts or words of each class (row) got each class (column), (n, n)."""
    names, n = [label if len(label) <= 24 else f"{label[:23]}…" for label in labels], len(labels)
    size = max(4.0, 1.6 + 0.42 * n)
    figure = new_figure(width=size + 1.5, height=size + 0.6)
    axes = figure.add_subplot()
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i in range(n):
        for j in range(n):
            if confusion[i, j]:
                color = "white" if shares[i, j] > 0.5 else "black"
                axes.text(j, i, f"{confusion[i, j]:,}", ha="center", va="center", color=color, fontsize=9 if n <= 12 else 6)
    upright = max(map(len, names)) <= 3
    axes.set_xticks(range(n), names, **({} if upright else {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}))
    axes.set_yticks(range(n), names)
    axes.set(xlabel="guess", ylabel="truth", title=f"{name}: each class, and what it was taken for")
    figure.colorbar(image, ax=axes, label="share of the class", shrink=0.8)
    return save_picture(figure, path)
