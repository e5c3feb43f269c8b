"""Work on a GPU that is captured and launched again as one CUDA graph, without the program that launched its kernels.

Shapes and addresses of a graph are fixed. So inputs are copied to fixed places first, and whatever the work changes (weights,
moments, memory) is changed in place. `Captured` is one such function. `Graphs` are many, one for each shape. What goes to the
device (`sent`) and back (`Readback`) does not make the host wait.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

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


class Captured:
    """A function that always does the same to the same tensors, as one CUDA graph; elsewhere it is simply called.

    Args:
        function: reads and writes tensors that stay where they are, and asks for no value of one. It is called `warm_ups` times
            first and once more while it is captured, so those calls must change nothing.
        device: where the tensors are.
        inputs: what it takes; later ones, of the same shapes, are copied to where copies of these lie.
        stream: where it is captured; None: one of its own.
        beside: another graph that never runs at the same time, to share memory with.
        warm_ups: calls in which libraries allot what they need and kernels are compiled.

    Raises:
        RuntimeError: what the function does cannot be captured.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        device: torch.device,
        inputs: Sequence[Tensor] = (),
        *,
        stream: torch.cuda.Stream | None = None,
        beside: "Captured | None" = None,
        warm_ups: int = 3,
    ) -> None:
        self._function, self._places = function, [tensor.clone() for tensor in inputs]
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            stream = stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(warm_ups):
                    function(*self._places)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            pool: Any = None if beside is None or beside._graph is None else beside._graph.pool()
            # what other threads do meanwhile, such as NCCL's watchdog or allotting memory, is not this one's mistake;
            # by default the stream would be one of another GPU
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._outputs = function(*self._places)
        self._graph = graph

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run it, and return copies of its results: the next run writes to the same places."""
        for place, tensor in zip(self._places, inputs, strict=True):
            place.copy_(tensor)
        if self._graph is None:
            outputs = self._function(*self._places)
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
        self._captured: dict[Hashable, Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

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
            found = compute(inputs) if captured is None else captured.run(*inputs)[0]
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

    def _graph_of(self, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> Captured | None:
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

    def _capture(self, compute: Compute, inputs: Sequence[Tensor]) -> Captured:
        first = next(iter(self._captured.values()), None)
        device = self._stream.device
        return Captured(lambda *places: (compute(places),), device, inputs, stream=self._stream, beside=first, warm_ups=0)


class Readback:
    """Numbers on their way from a device to the host; only a GPU lets the host go on meanwhile."""

    def __init__(self, there: Tensor) -> None:
        self._arrived: Any = None
        self._numbers = there
        if there.device.type == "cuda":
            self._numbers = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._numbers.copy_(there, non_blocking=True)
            self._arrived = torch.cuda.current_stream(there.device).record_event()

    @property
    def tensor(self) -> Tensor:
        """The numbers on the CPU; to look at them is to wait for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers

    @property
    def numbers(self) -> list[float]:
        """The same as a list."""
        return self.tensor.tolist()


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of what lies on the CPU on a device; a GPU gets it when it is there, and the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and x.device.type == "cpu" else x.to(device)
