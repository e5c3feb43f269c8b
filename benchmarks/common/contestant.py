"""One side of a comparison of training steps: the same clock, the same memory meter and the same order of work for both.

A step is forward, backward and clearing the gradients, with the memory carried on. There is no optimizer in it: both sides
would run the same one of torch, and it would only hide their difference.
"""

import time
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.machine import peak_mb, reset_peak, resident_mb
from common.shapes import SHAPES, Shape

ModelT = TypeVar("ModelT", bound=nn.Module)


class TrainingSide(ABC, Generic[ModelT]):
    """A model that trains on request; see `common.wire`."""

    model: ModelT

    def __init__(self) -> None:
        self._idle_mb = resident_mb()

    @abstractmethod
    def _build(self, shape: Shape, weights: str) -> None:
        """Set `model`; its weights come from the file or are written there."""

    @abstractmethod
    def _loss(self, ids: Tensor) -> Tensor:
        """Return the mean nats of the tokens ids[:, 1:]."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return what runs here."""

    def build(self, shape: str, weights: str, n_threads: int) -> None:
        """Make the model."""
        torch.set_num_threads(n_threads)
        self._shape = SHAPES[shape]
        self._build(self._shape, weights)

    def start(self, segments: list[list[list[int]]], seed: int) -> None:
        """Fill the memory and warm up by training steps; from here on, the peak of the process' memory counts."""
        torch.manual_seed(seed)
        self.model.train()
        for segment in segments:
            self.step(segment)
        reset_peak()

    def step(self, segment: list[list[int]]) -> float:
        """Run a training step and return its seconds."""
        ids = torch.tensor(segment)
        begin = time.perf_counter()
        self._loss(ids).backward()
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - begin

    def memory(self) -> dict[str, float]:
        """Return the peak (MB) since `start`, and what the process held before there was a model."""
        return {"peak": peak_mb(), "idle": self._idle_mb}


class Contestant(TrainingSide[ModelT]):
    """One whose losses after `mems`, which each moves on, and whose gradients are compared."""

    mems: Any

    @abstractmethod
    def _zero_mems(self, shape: Shape) -> Any:
        """Return a memory of zeros, which are attended to."""

    @abstractmethod
    def _peer_named_gradients(self) -> dict[str, Tensor]:
        """Return the gradients by the names that the peer gives them."""

    def read(self, segments: list[list[list[int]]]) -> list[float]:
        """Read segments without dropout, from a memory of zeros on; return their losses, keep the last one's gradients."""
        self.model.eval()
        self.mems = self._zero_mems(self._shape)
        losses = []
        for segment in segments:
            self.model.zero_grad(set_to_none=True)
            loss = self._loss(torch.tensor(segment))
            loss.backward()
            losses.append(loss.item())
        return losses

    def write_gradients(self, path: str) -> None:
        """Save the gradients of the last segment read."""
        save_file({name: gradient.contiguous() for name, gradient in self._peer_named_gradients().items()}, path)

    def gradient_difference(self, path: str) -> float:
        """Return the largest difference from saved gradients: per tensor, the norm of the difference by that of the saved one.

        Norms, for single entries differ more: a ReLU's input that is 0 but for rounding lets a gradient through or not.
        """
        saved, own = load_file(path), self._peer_named_gradients()
        if saved.keys() != own.keys():
            raise ValueError(f"parameters differ: {sorted(saved.keys() ^ own.keys())}")
        return max(((own[name] - saved[name]).norm() / saved[name].norm()).item() for name in saved)
