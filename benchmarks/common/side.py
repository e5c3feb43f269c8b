"""One side of a comparison, in a process of its own: the same clock, memory meter and order of work for all."""

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.machine import peak_mb, reset_peak, resident_mb

PREFIX_PIECE = 256
"""Tokens read at once before those that are compared one by one."""


class Side(ABC):
    """A model that works on request; see `common.wire`."""

    model: Any

    def __init__(self) -> None:
        self._idle_mb, self._life_mb = resident_mb(), 0.0

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return what runs here: its `name`, `torch`, and `precision` with the reason for it."""

    @abstractmethod
    def _build(self, weights: str) -> None:
        """Set `model`; its weights come from the file or are written there."""

    def build(self, config: dict[str, Any], weights: str, n_threads: int) -> None:
        """Make the model; the settings are those of a `config.json` of the peer's."""
        torch.set_num_threads(n_threads)
        self.config = config
        self._build(weights)

    def forget_peak(self) -> None:
        """From here on, the peak of the process' memory counts."""
        self._life_mb = peak_mb()
        reset_peak()

    def memory(self) -> dict[str, float]:
        """Return the peaks (MB) since `forget_peak` and of the whole life, and what the process held before it had a model."""
        peak = peak_mb()
        return {"peak": peak, "life": max(peak, self._life_mb), "idle": self._idle_mb}


class TrainingSide(Side):
    """One that takes training steps: forward, backward and clearing the gradients, with the memory carried on.

    There is no optimizer in a step: all sides would run the same one of torch, and it would only hide their difference. A batch
    has `ids` (B, T), and what else a model reads.
    """

    mems: Any = None
    least_norm = 0.0
    """Gradients of less than this share of the largest norm are compared as if they had it."""

    @abstractmethod
    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean nats of a batch after `mems`, and move `mems` on."""

    def _zero_mems(self, n_row: int) -> Any:
        """Return a memory of zeros, which are attended to."""

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients by the names that the peer gives them."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def read(self, batches: list[dict[str, Any]]) -> list[float]:
        """Read without dropout, from a memory of zeros on; return the losses, and keep the gradients of the last one."""
        self.model.eval()
        self._begin(batches[0])
        losses = []
        for batch in batches:
            self.model.zero_grad(set_to_none=True)
            loss = self._loss(tensors(batch))
            loss.backward()
            losses.append(loss.item())
        return losses

    def write_gradients(self, path: str) -> None:
        """Save the gradients of what was read last."""
        save_file({name: gradient.contiguous() for name, gradient in self._gradients().items()}, path)

    def gradient_difference(self, path: str) -> float:
        """Return the largest difference from saved gradients: per tensor, the norm of the difference by that of the saved one.

        Norms, for single entries differ more: a ReLU's input that is 0 but for rounding lets a gradient through or not.
        """
        saved, own = load_file(path), self._gradients()
        if missing := saved.keys() - own.keys():
            raise ValueError(f"parameters without a gradient here: {sorted(missing)}")
        least = self.least_norm * max(gradient.norm().item() for gradient in saved.values())
        return max(((own[name] - saved[name]).norm() / max(saved[name].norm().item(), least)).item() for name in saved)

    def start(self, batches: list[dict[str, Any]]) -> None:
        """Warm up by training steps; from here on, the peak of the process' memory counts."""
        torch.manual_seed(0)
        self.model.train()
        for batch in batches:
            self.step(batch)
        self.forget_peak()

    def step(self, batch: dict[str, Any]) -> float:
        """Take a training step and return its seconds."""
        rows = tensors(batch)
        begin = time.perf_counter()
        self._loss(rows).backward()
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - begin

    def failure(self, batch: dict[str, Any]) -> str | None:
        """Take a step and return why it fails; None if it does not."""
        self._begin(batch)
        try:
            self.step(batch)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            self.model.zero_grad(set_to_none=True)
            self._begin(batch)
        return None

    def _begin(self, batch: dict[str, Any]) -> None:
        self.mems = self._zero_mems(len(batch["ids"]))


class ReadingSide(Side):
    """One that reads without gradients, one token or several at a time."""

    @abstractmethod
    def _start(self) -> None:
        """Begin a new stream."""

    @abstractmethod
    def _read_piece(self, ids: Tensor) -> None:
        """Read ids (1, T)."""

    @abstractmethod
    def _read_token(self, ids: Tensor) -> Tensor:
        """Read ids (1,), and return the scores of all tokens for what comes next, (V,)."""

    def _choose(self, ids: Tensor) -> int:
        """Read ids (1,), and return the likeliest next token."""
        return int(self._read_token(ids).argmax())

    def build(self, config: dict[str, Any], weights: str, n_threads: int) -> None:
        torch.set_grad_enabled(False)
        super().build(config, weights, n_threads)

    def read(self, prefix: list[int], ids: list[int], path: str) -> None:
        """Read a new stream, the end of it token by token, and save the log-probabilities after each of `ids`."""
        save_file({"log_probs": self._log_probs(prefix, ids)}, path)

    def compare(self, prefix: list[int], ids: list[int], path: str) -> dict[str, float]:
        """Do the same, and compare with what another side saved.

        Returns:
            Largest difference of a log-probability; the mean nats that this side would lose on text written by the other (the
            divergence of their distributions, which needs no text to be true to); and the share of tokens after which both
            find the same one likeliest.
        """
        theirs, own = load_file(path)["log_probs"].double(), self._log_probs(prefix, ids).double()
        return {
            "log_prob": (own - theirs).abs().max().item(),
            "nats": max(0.0, (theirs.exp() * (theirs - own)).sum(1).mean().item()),
            "agree": (own.argmax(1) == theirs.argmax(1)).float().mean().item(),
        }

    def tokens(self, ids: list[int]) -> float:
        """Read on token by token, each time finding the likeliest next one, and return the mean seconds."""
        tokens = torch.tensor(ids).unsqueeze(1)
        begin = time.perf_counter()
        for token in tokens:
            self._choose(token)
        return (time.perf_counter() - begin) / len(ids)

    def _log_probs(self, prefix: list[int], ids: list[int]) -> Tensor:
        self._start()
        for piece in torch.tensor([prefix]).split(PREFIX_PIECE, dim=1):
            self._read_piece(piece)
        # clones: some scores are views of what the next token overwrites
        return torch.stack([self._read_token(torch.tensor([i])).float().log_softmax(-1).clone() for i in ids])


def tensors(batch: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(values) for name, values in batch.items()}


def states_loss(states: Tensor) -> Tensor:
    """Return a number of states (B, T, D) that gives each a gradient: any head, and a cheap one."""
    return (states.float() * torch.linspace(-1, 1, states.shape[-1])).mean()
