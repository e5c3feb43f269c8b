"""`Captured`: a function of tensors in fixed places, which a GPU runs again without the program that launched its kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

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
