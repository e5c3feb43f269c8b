"""The kinds of segments that a step can read, a line each: what is cut, counted, and given to the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from transformer_xl.config.run import TrainConfig
from transformer_xl.data.labelled import LabelledBatch
from transformer_xl.data.pairs import PairSegment
from transformer_xl.data.streams import Segment
from transformer_xl.model.call import Regularizers, Rows
from transformer_xl.reading.targets import call_arguments
from transformer_xl.world import World

AnySegment = Segment | PairSegment | LabelledBatch


@dataclass(frozen=True)
class SegmentKind:
    """What a step must know of a kind of segment."""

    # cut: they may be cut at any token; fixed: all are read whole and have `train.tgt_len` tokens; own: all are read whole, and
    # each has a length of its own
    length: Literal["cut", "fixed", "own"]
    are_alike: bool  # whether all processes read and learn from as many tokens in a step, unless they learn from answers
    n_read: Callable[[Any], int]  # how many tokens a segment has
    n_scored: Callable[[Any, TrainConfig], int]  # how many losses are learned from
    # what the model is called with besides ids and memory
    arguments: Callable[[Any, torch.device, TrainConfig], dict[str, Any]]


def kind_of(segment: AnySegment) -> SegmentKind:
    """Return what a step must know of a segment."""
    return _KINDS[type(segment)]


def count(segments: Sequence[AnySegment], config: TrainConfig, world: World) -> tuple[int, int]:
    """Return how many tokens are read, and from how many losses is learned, in all processes."""
    kind = kind_of(segments[0])
    n_read = sum(map(kind.n_read, segments))
    n_scored = sum(kind.n_scored(segment, config) for segment in segments)
    if kind.are_alike and config.loss != "answer":
        return n_read * world.size, n_scored * world.size
    n_read, n_scored = map(round, world.sum(float(n_read), float(n_scored)))
    return n_read, max(n_scored, 1)  # short segments may hold nothing but questions


def tensors_of(segment: AnySegment) -> tuple[Tensor, ...]:
    """Return the tensors of a segment, from which its class makes it again."""
    return tuple(vars(segment).values())


def divided(segment: AnySegment, n_group: int) -> list[AnySegment]:
    """Divide the lanes of a segment into groups."""
    parts = (tensor.chunk(n_group) for tensor in tensors_of(segment))
    return [type(segment)(*group) for group in zip(*parts, strict=True)]


def _first_scored(segment: Segment, config: TrainConfig) -> int:
    return segment.labels.shape[1] // 2 if config.loss == "half" else 0


def _n_labels(segment: Segment, config: TrainConfig) -> int:
    labels = segment.labels[:, _first_scored(segment, config) :]
    return int((labels >= 0).sum()) if config.loss == "answer" else labels.numel()  # only the first waits for a device


def _of_stream(segment: Segment, device: torch.device, config: TrainConfig) -> dict[str, Any]:
    labels = segment.labels.to(device)
    if first := _first_scored(segment, config):
        labels = labels.where(torch.arange(labels.shape[1], device=device) >= first, -100)
    rows = Rows(document_starts=segment.document_starts.to(device)) if config.reset_at_documents else Rows()
    added = Regularizers(config.label_smoothing, config.activation_penalty, config.temporal_penalty)
    return {"labels": labels, "rows": rows} | ({} if added == Regularizers() else {"regularizers": added})


def _of_task(batch: LabelledBatch, device: torch.device, _: TrainConfig) -> dict[str, Any]:
    return {name: tensor.to(device) for name, tensor in vars(batch).items() if name != "ids"}


def _n_labelled(batch: LabelledBatch) -> int:
    labels = batch.labels.flatten(1) if batch.labels.dim() > 1 else batch.labels[:, None]
    missing = labels.isnan() if labels.is_floating_point() else labels == -100
    return int((~missing.any(1)).sum())


_KINDS: dict[type, SegmentKind] = {
    Segment: SegmentKind(
        "cut",
        are_alike=True,
        n_read=lambda segment: segment.ids.numel(),
        n_scored=_n_labels,
        arguments=_of_stream,
    ),
    PairSegment: SegmentKind(
        "fixed",
        are_alike=False,  # rows have more and fewer targets
        n_read=lambda segment: segment.ids.numel(),
        n_scored=lambda segment, _: int((segment.labels >= 0).sum()),
        arguments=lambda segment, device, _: call_arguments(segment, device),
    ),
    LabelledBatch: SegmentKind(
        "own",
        are_alike=False,
        n_read=lambda batch: batch.ids.numel() - int(batch.n_pad.sum()),
        n_scored=lambda batch, _: _n_labelled(batch),
        arguments=_of_task,
    ),
}
