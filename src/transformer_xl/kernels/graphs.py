"""Work on a GPU that is captured and launched again as one CUDA graph, without the program that launched its kernels.

Shapes and addresses of a graph are fixed. So inputs are copied to fixed places first, and whatever the work changes (weights,
moments, memory) is changed in place. `Captured` is one function of such places. `Graphs` are many, one for each shape.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_xl.errors import ConfigError

Compute = Callable[[Sequence[Tensor]], Tensor]
"""What a device does: reads inputs, changes state in place, and returns what was found."""

_MOST_GRAPHS = 64
"""Each takes memory, and a fraction of a second to capture."""

_LAUNCHES_OF_A_CAPTURE = 8
"""Where there is no room, work is launched so often kernel by kernel before its graph takes the place of the one that was used
longest ago. That takes about as long as a capture, so shapes that take turns never cost much more than they would without."""

_WARM_UPS = 3
"""Calls before a capture, in which libraries allot what they need and kernels are compiled."""


class Captured:
    """A function that always does the same to the same tensors, as one CUDA graph; elsewhere it is simply called.

    Args:
        function: takes its inputs from tensors that stay where they are, and may write these in place; asks for no value of a
            tensor. It is called three times first and once more while it is captured, so those calls must change nothing.
        device: where the tensors are.

    Raises:
        RuntimeError: what the function does cannot be captured.
    """

    def __init__(self, function: Callable[[], tuple[Tensor, ...]], device: torch.device) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            self._function = function
            return
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # what other threads do meanwhile, such as allotting memory, is not their mistake
            with torch.cuda.graph(
                graph, stream=stream, capture_error_mode="thread_local"
            ):  # by default a stream of another GPU
                self._outputs = function()
        self._graph = graph

    def run(self) -> tuple[Tensor, ...]:
        """Run it, and return copies of its results: the next run writes to the same places."""
        if self._graph is None:
            outputs = self._function()
        else:
            self._graph.replay()
            outputs = self._outputs
        return tuple(x.clone() for x in outputs)


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
        """Start the work for some inputs, as `launch` does, and return what it tells the host, which need not be ready yet."""
        return Told.of(self.launch(key, compute, inputs))

    def launch(self, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> Tensor:
        """Start the work for some inputs on the device.

        Args:
            key: the same only for work that differs in nothing but the numbers in its inputs and places.
            compute: the work.
            inputs: on the device.

        Returns:
            What it found, on the device; later work leaves it alone.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            captured = self._graph_of(key, compute, inputs)
            found = compute(inputs) if captured is None else captured(inputs).clone()
        for tensor in inputs:  # their memory must not be given to others before this work has read them
            tensor.record_stream(self._stream)
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        found.record_stream(current)
        return found

    def forget(self) -> None:
        """Drop all graphs, because tensors that they read have been replaced by others."""
        self._captured.clear()
        self._times.clear()

    def _graph_of(self, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> "_Captured | None":
        """Return the graph of some work, captured now if it has come often enough; None: its kernels are launched."""
        is_full = len(self._captured) >= _MOST_GRAPHS
        enough = _LAUNCHES_OF_A_CAPTURE if is_full else 1
        if key not in self._captured and not self.problem and self._times[key] >= enough:
            self._try_to_capture(key, compute, inputs)
        if key not in self._captured:
            self._times[key] += 1
            return None
        self._captured[key] = captured = self._captured.pop(key)  # the last in order is the one used last
        return captured

    def _try_to_capture(self, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> None:
        try:
            captured = self._capture(compute, inputs)
        except RuntimeError as error:
            self.problem = str(error).strip().partition("\n")[0]
            if self._must:
                raise ConfigError(f"train.graph (on) cannot be: {self.problem}; use auto") from None
            return
        if len(self._captured) >= _MOST_GRAPHS:  # the device is idle, and the others hold the memory that all share
            oldest = next(iter(self._captured))
            del self._captured[oldest], self._times[oldest]
        self._captured[key] = captured

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
        there: in pinned memory.
        arrived: an event that has happened when they are there; None: they are.
    """

    def __init__(self, there: Tensor, arrived: Any = None) -> None:
        self._there, self._arrived = there, arrived

    @classmethod
    def of(cls, found: Tensor) -> "Told":
        """Begin to copy what lies on a device; only a GPU lets the host go on meanwhile."""
        if found.device.type != "cuda":
            return cls(found.cpu())
        there = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        there.copy_(found, non_blocking=True)
        return cls(there, torch.cuda.current_stream(found.device).record_event())

    @cached_property
    def tensor(self) -> Tensor:
        """The numbers on the CPU; the first look waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._there

    @property
    def numbers(self) -> list[float]:
        """The same as a list."""
        return self.tensor.tolist()


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of what lies on the CPU on a device; a GPU gets it when it is there, and the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and x.device.type == "cpu" else x.to(device)
