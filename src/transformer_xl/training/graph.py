"""Training steps as CUDA graphs: a step's kernels are launched together, and the host does not wait for any of them.

A small model's step is thousands of kernels of a few microseconds, which a host launches more slowly than a GPU runs them. A
graph launches them at once. Its shapes and addresses are fixed, so inputs are copied to fixed places first, and whatever a step
changes (weights, moments, memory) is changed in place.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_xl.config import TrainConfig
from transformer_xl.data.streams import SegmentStream
from transformer_xl.errors import ConfigError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import Precision
from transformer_xl.model.sequence_model import SequenceModel
from transformer_xl.training.feed import AnyStream
from transformer_xl.world import World

Compute = Callable[[Sequence[Tensor]], Tensor]
"""What a device does in a step: reads inputs, changes state in place, and returns what the host is told."""

_MOST_GRAPHS = 64
"""Steps of other shapes are launched kernel by kernel; each graph takes memory, and a fraction of a second to capture."""


def why_no_graph(
    model: SequenceModel, stream: AnyStream, *, train: TrainConfig, precision: Precision, world: World, device: torch.device
) -> str | None:
    """Say why steps of a run cannot be captured; None if they can.

    Raises:
        ConfigError: `train.graph` asks for it nevertheless.
    """
    reasons = {
        "train.graph is off": train.graph == "off",
        f"{device.type} has no CUDA graphs": device.type != "cuda",
        "several processes exchange gradients within a step": not world.alone,
        "fp16 scales its losses by what the host has seen": precision == "fp16",
        "layers that are computed again restore random numbers (train.checkpoint_layers)": train.checkpoint_layers,
        "how many losses a step has differs from step to step": not isinstance(stream, SegmentStream) or train.loss == "answer",
        f"an {model.config.kind} is not captured": not (
            isinstance(model, LanguageModel) and model.config.attends and not model.adds_losses
        ),
        "it has a kind of your own, which may look at values": not _is_own(model),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found and train.graph == "on":
        raise ConfigError(f"train.graph (on) cannot be: {found}; use auto")
    return found


def _is_own(model: SequenceModel) -> bool:
    kinds = [type(model), *(type(block) for block in model.attention_blocks())]
    return all(kind.__module__.startswith("transformer_xl.") for kind in kinds)


class Graphs:
    """Runs a step's work on the device; what is asked for again in the same shapes is captured, and replayed from then on.

    The first time gives the same numbers, and makes what only a first step makes, such as moments and compiled kernels.
    Everything runs on one stream beside the default one, as capturing demands.

    Args:
        device: a GPU.
        must: a capture that fails is an error; otherwise all goes on without captures.

    Attributes:
        problem: why a capture failed; None: none did.
    """

    def __init__(self, device: torch.device, *, must: bool = False) -> None:
        self._must = must
        self.problem: str | None = None
        self._stream = torch.cuda.Stream(device)
        self._times: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, _Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> "Told":
        """Start the work for some inputs on the device.

        Args:
            key: the same only for work that differs in nothing but the numbers in its inputs and places.
            compute: the work.
            inputs: on the device.

        Returns:
            What it tells the host, which need not be ready yet.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            is_new = key not in self._captured and self._times[key] > 0
            if is_new and not self.problem and len(self._captured) < _MOST_GRAPHS:
                self._try_to_capture(key, compute, inputs)
            self._times[key] += 1
            found = self._captured[key](inputs) if key in self._captured else compute(inputs)
            told = Told.of(found)
        for tensor in inputs:  # their memory must not be given to others before this work has read them
            tensor.record_stream(self._stream)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return told

    def forget(self) -> None:
        """Drop all graphs, because tensors that they read have been replaced by others."""
        self._captured.clear()
        self._times.clear()

    def _try_to_capture(self, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> None:
        try:
            self._captured[key] = self._capture(compute, inputs)
        except RuntimeError as error:
            self.problem = str(error).strip().partition("\n")[0]
            if self._must:
                raise ConfigError(f"train.graph (on) cannot be: {self.problem}; use auto") from None

    def _capture(self, compute: Compute, inputs: Sequence[Tensor]) -> "_Captured":
        graph, places = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in inputs]
        first = next(iter(self._captured.values()), None)
        pool: Any = None if first is None else first.graph.pool()  # graphs run one at a time, so they may share memory
        self._stream.synchronize()
        # what other threads do meanwhile, such as NCCL's watchdog, is not this one's mistake
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            found = compute(places)
        return _Captured(graph, places, found)


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    places: list[Tensor]
    found: Tensor

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        for place, tensor in zip(self.places, inputs, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return self.found


class Told:
    """Numbers on their way from the device to the host.

    Args:
        there: fp64 (n,) in pinned memory.
        arrived: an event that has happened when they are there; None: they are.
    """

    def __init__(self, there: Tensor, arrived: Any = None) -> None:
        self._there, self._arrived = there, arrived

    @classmethod
    def of(cls, found: Tensor) -> "Told":
        """Begin to copy what lies on a device."""
        there = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        there.copy_(found, non_blocking=True)
        return cls(there, torch.cuda.current_stream(found.device).record_event())

    @cached_property
    def numbers(self) -> list[float]:
        """The numbers; the first look waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._there.tolist()
