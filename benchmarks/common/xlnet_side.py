"""One side of a comparison of XLNets: the same clock, the same memory meter and the same order of work for both.

A training step is forward, backward and clearing the gradients, with dropout; there is no optimizer in it.
"""

import time
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.machine import peak_mb, reset_peak, resident_mb
from common.xlnet_shapes import XLNET_SHAPES, XLNetShape, rows_of

ModelT = TypeVar("ModelT", bound=nn.Module)
N_WARM_UP = 2


class XLNetSide(ABC, Generic[ModelT]):
    """A model that works on request; see `common.wire`. A process measures one part."""

    model: ModelT
    mems: Any

    def __init__(self) -> None:
        self._idle_mb = resident_mb()

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return what runs here."""

    @abstractmethod
    def _build(self, shape: XLNetShape, weights: str) -> None:
        """Set `model`; its weights come from the file or are written there."""

    @abstractmethod
    def _zero_mems(self, shape: XLNetShape) -> Any:
        """Return a memory of zeros, which are attended to."""

    @abstractmethod
    def _nll(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the mean nats of the targets after `mems`, and move `mems` on."""

    @abstractmethod
    def _states(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the last states of content, (B, T, D), without memory."""

    @abstractmethod
    def _read(self, ids: Tensor) -> None:
        """Read a document."""

    @abstractmethod
    def _peer_named_gradients(self) -> dict[str, Tensor]:
        """Return those gradients that there are, by the names that the peer gives them."""

    def build(self, shape: str, part: str, weights: str, n_threads: int) -> None:
        """Make the model."""
        torch.set_num_threads(n_threads)
        self._shape, self._part = XLNET_SHAPES[shape], part
        self._build(self._shape, weights)
        self.mems = self._zero_mems(self._shape)

    def read(self, seeds: list[int]) -> list[float]:
        """Take steps without dropout; return their losses, keep the last one's gradients."""
        self.model.eval()
        losses = []
        for seed in seeds:
            self.model.zero_grad(set_to_none=True)
            loss = self._loss(self._rows(seed))
            loss.backward()
            losses.append(loss.item())
        return losses

    def write_gradients(self, path: str) -> None:
        """Save the gradients of the last step."""
        save_file({name: gradient.contiguous() for name, gradient in self._peer_named_gradients().items()}, path)

    def gradient_difference(self, path: str) -> float:
        """Return the largest difference from saved gradients: the norm of the difference by that of all of them together."""
        saved, own = load_file(path), self._peer_named_gradients()
        missing = sorted(saved.keys() - own.keys())
        if missing:
            raise ValueError(f"parameters without a gradient here: {missing}")
        whole = max(gradient.norm() for gradient in saved.values())
        return max(((own[name] - saved[name]).norm() / max(saved[name].norm(), 1e-3 * whole)).item() for name in saved)

    def start(self) -> None:
        """Warm up; from here on, the peak of the process' memory counts."""
        torch.manual_seed(0)
        self.model.train(self._part != "document")
        for seed in range(1 if self._part == "document" else N_WARM_UP):
            self.step(seed)
        reset_peak()

    def step(self, seed: int) -> float:
        """Take a step and return its seconds."""
        rows = self._rows(seed)
        begin = time.perf_counter()
        if self._part == "document":
            with torch.no_grad():
                self._read(rows["ids"])
        else:
            self._loss(rows).backward()
            self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - begin

    def memory(self) -> dict[str, float]:
        """Return the peak (MB) since `start`, and what the process held before there was a model."""
        return {"peak": peak_mb(), "idle": self._idle_mb}

    def failure(self) -> str | None:
        """Take a step and return why it fails; None if it does not."""
        try:
            self.step(0)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            self.model.zero_grad(set_to_none=True)
            self.mems = self._zero_mems(self._shape)
        return None

    def _rows(self, seed: int) -> dict[str, Tensor]:
        return {name: torch.tensor(values) for name, values in rows_of(self._shape, self._part, seed).items()}

    def _loss(self, rows: dict[str, Tensor]) -> Tensor:
        if self._part == "pretrain":
            return self._nll(rows)
        states = self._states(rows).float()
        return (states * torch.linspace(-1, 1, states.shape[-1])).mean()  # any head, and a cheap one
