"""One side of a comparison of training steps on one device: the same text, clipping, Adam and clock for all.

Ours are the steps of a `Trainer`, as `txl train` takes them; all ways of ours share one set of weights.
"""

import itertools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.recipe_shapes import N_SEGMENT
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.run import OptimConfig, TrainConfig
from transformer_xl.data.streams import SegmentStream
from transformer_xl.kernels.device import Precision, autocast
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.training.trainer import Trainer

CLIP, RATE = 0.25, 1e-5
N_REPEAT = 64
N_WARM_UP = 2 * N_SEGMENT
"""A graph is captured when the sizes of a segment's tails come for the second time."""
FP16_SCALE = 2.0**12
"""Of the loss where gradients are compared: small ones would vanish in fp16, and larger scales overflow."""


class Learner(Protocol):
    """A model with a memory."""

    @property
    def model(self) -> nn.Module: ...

    def loss(self, segment: Tensor) -> Tensor:
        """Return the mean nats of segment[:, 1:], (B, T + 1), after the memory, and move the memory on."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by the names of our parameters."""
        ...


class OurLearner:
    """Ours, whose gradients are compared.

    Args:
        model: shared by others.
        rows: B.
        backend: of attention.
    """

    def __init__(self, model: TransformerXL, rows: int, backend: str) -> None:
        self._model, self._execution = model, Execution(backend)
        self.mems = full_memory(model.config, rows, model.device)

    @property
    def model(self) -> TransformerXL:
        return self._model

    def loss(self, segment: Tensor) -> Tensor:
        out = self.model(segment[:, :-1], mems=self.mems, labels=segment[:, 1:], execution=self._execution)
        self.mems = out.mems
        assert out.nll is not None
        return out.nll.mean()

    def gradients(self) -> dict[str, Tensor]:
        return {name: gradient_of(parameter) for name, parameter in self.model.named_parameters()}


def full_memory(config: TransformerXLConfig, rows: int, device: torch.device) -> Mems:
    """Return a memory of random states, the same for all; every state is attended to."""
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(rows, config.mem_len, config.d_model, generator=generator) for _ in range(config.n_layer))
    return Mems(tuple(h.to(device) for h in hidden), torch.full((rows,), config.mem_len, device=device))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class OurStep:
    """Takes the steps of a `Trainer`.

    Args:
        model: shared by others.
        segments: (B, T + 1) each, read in turn, again and again.
        precision: of the matrix products.
        backend: of attention.
        compiled: layers are compiled.
        graph: steps are launched as CUDA graphs.

    Raises:
        ConfigError: that cannot be here.
    """

    def __init__(
        self, model: TransformerXL, segments: list[Tensor], precision: Precision, *, backend: str, compiled: bool, graph: bool
    ) -> None:
        rows, tgt_len = segments[0].shape[0], segments[0].shape[1] - 1
        text = torch.cat([segment[:, :-1] for segment in segments], 1)
        lanes = text.repeat(1, N_REPEAT).flatten()  # memory begins anew where a text ends
        ids = torch.cat([lanes, lanes[:1]]).cpu().numpy()
        how: dict[str, Any] = {"attention": backend, "compile": compiled, "graph": "on" if graph else "off"}
        self._trainer = Trainer(
            model,
            SegmentStream(ids, batch_size=rows, tgt_len=tgt_len),
            train=TrainConfig(batch_size=rows, tgt_len=tgt_len, max_steps=1_000_000, precision=precision, **how),
            optim=OptimConfig(optimizer="adam", lr=RATE, clip=CLIP, schedule="constant"),
            precision=precision,
            device=model.device,
        )

    def __call__(self) -> None:
        """Take one step."""
        self._trainer.train_step()


class PeerStep:
    """Takes training steps of a peer.

    Args:
        learner: what learns.
        precision: of the matrix products.
        segments: (B, T + 1) each, read in turn, again and again.
    """

    def __init__(self, learner: Learner, precision: Precision, segments: list[Tensor]) -> None:
        self._device = segments[0].device
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=precision == "fp16")
        self._learner = learner
        self._precision: Precision = precision
        self._segments = itertools.cycle(segments)
        self._parameters = list(learner.model.parameters())
        self._adam = torch.optim.Adam(self._parameters, lr=RATE, fused=True)
        learner.model.train()

    def __call__(self) -> None:
        """Take one step."""
        with autocast(self._device, self._precision):
            loss = self._learner.loss(next(self._segments))
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._adam)
        nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._scaler.step(self._adam)
        self._scaler.update()
        self._adam.zero_grad()


def gradients_of_one(learner: Learner, segment: Tensor, precision: Precision) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one segment without dropout."""
    learner.model.eval()
    learner.model.zero_grad(set_to_none=True)
    with autocast(segment.device, precision):
        loss = learner.loss(segment)
    scale = FP16_SCALE if precision == "fp16" else 1.0
    (loss * scale).backward()
    found = {name: gradient.detach() / scale for name, gradient in learner.gradients().items()}
    learner.model.zero_grad(set_to_none=True)
    return loss.item(), found


def gradient_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients together, by that of what was expected."""
    above = sum((found[name] - gradient).square().sum().item() for name, gradient in expected.items())
    below = sum(gradient.square().sum().item() for gradient in expected.values())
    return (above / below) ** 0.5


def make_ours(config: TransformerXLConfig, device: torch.device) -> TransformerXL:
    """Return our model with random weights, the same ones in every run."""
    torch.manual_seed(0)
    return TransformerXL(config).to(device)
