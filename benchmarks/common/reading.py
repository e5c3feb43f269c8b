"""One side of a comparison of readers: it reads the same tokens, with the same clock, as the other sides do."""

import time
from abc import ABC, abstractmethod

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.machine import peak_mb, reset_peak, resident_mb
from common.reading_shapes import READING_SHAPES, ReadingShape

PREFIX_PIECE = 256
"""Tokens read at once before those that are compared one by one."""


class ReadingSide(ABC):
    """A model that reads on request; see `common.wire`."""

    shape: ReadingShape

    def __init__(self) -> None:
        self._idle_mb = resident_mb()
        self._life_mb = 0.0

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return what runs here."""

    @abstractmethod
    def _build(self, weights: str) -> None:
        """Make the model of `shape`; its weights come from the file or are written there."""

    @abstractmethod
    def _start(self) -> None:
        """Begin a new stream."""

    @abstractmethod
    def _read_piece(self, ids: Tensor) -> None:
        """Read ids (1, T)."""

    @abstractmethod
    def _read_token(self, ids: Tensor) -> Tensor:
        """Read ids (1,), and return the scores of all tokens for what comes next, (V,)."""

    @abstractmethod
    def _choose(self, ids: Tensor) -> int:
        """Read ids (1,), and return the likeliest next token."""

    def build(self, shape: str, weights: str, n_threads: int) -> None:
        """Make the model."""
        torch.set_num_threads(n_threads)
        torch.set_grad_enabled(False)
        self.shape = READING_SHAPES[shape]
        self._build(weights)

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

    def tokens(self, ids: list[int]) -> list[float]:
        """Read on token by token, each time finding the likeliest next one, and return the seconds of each."""
        seconds = []
        for i in ids:
            token = torch.tensor([i])
            begin = time.perf_counter()
            self._choose(token)
            seconds.append(time.perf_counter() - begin)
        return seconds

    def forget_peak(self) -> None:
        """From here on, the peak of the process' memory counts."""
        self._life_mb = peak_mb()
        reset_peak()

    def memory(self) -> dict[str, float]:
        """Return the peaks (MB) since `forget_peak` and of the whole life, and what the process held before it had a model."""
        peak = peak_mb()
        return {"peak": peak, "life": max(peak, self._life_mb), "idle": self._idle_mb}

    def _log_probs(self, prefix: list[int], ids: list[int]) -> Tensor:
        self._start()
        for piece in torch.tensor([prefix]).split(PREFIX_PIECE, dim=1):
            self._read_piece(piece)
        # clones: some scores are views of what the next token overwrites
        return torch.stack([self._read_token(torch.tensor([i])).float().log_softmax(-1).clone() for i in ids])


class ScoringSide(ReadingSide):
    """One that also scores a whole stream, segment by segment, as a plain program would."""

    @abstractmethod
    def _segment_nats(self, ids: Tensor, labels: Tensor) -> float:
        """Read ids (1, T) and return the summed nats of labels (1, T)."""

    def score(self, ids: list[int]) -> dict[str, list[float]]:
        """Score a new stream, every token but the first; return nats and seconds of each segment."""
        self._start()
        nats, seconds = [], []
        inputs, labels = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
        for i, label in zip(inputs.split(self.shape.tgt_len, 1), labels.split(self.shape.tgt_len, 1), strict=True):
            begin = time.perf_counter()
            nats.append(self._segment_nats(i, label))
            seconds.append(time.perf_counter() - begin)
        return {"nats": nats, "seconds": seconds}
