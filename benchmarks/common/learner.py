"""One side of a comparison of training steps on one device: the same loss, update and clock for all.

A step is forward, backward and, unless it is left out, an update: clipping, and Adam in one kernel per group of tensors. All
ways of ours share one set of weights.
"""

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from transformer_xl.model.call import Execution, RunLayer, run_layer
from transformer_xl.model.memory import Mems
from transformer_xl.model.precision import Precision, autocast
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model_config import TransformerXLConfig

CLIP, RATE = 0.25, 1e-5
N_WARM_UP = 3
FP16_SCALE = 2.0**12
"""Of the loss where gradients are compared: small ones would vanish in fp16, and larger scales overflow."""


class Learner(Protocol):
    """A model with a memory."""

    @property
    def model(self) -> nn.Module: ...

    def loss(self, segment: Tensor) -> Tensor:
        """Return the mean nats of segment[:, 1:], (B, T + 1), after the memory, and move the memory on."""
        ...

    def fixed_memory(self) -> Callable[[], None]:
        """Keep the memory where it is from now on; return what copies a new one there."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by the names of our parameters."""
        ...


class OurLearner:
    """Ours.

    Args:
        model: shared by others.
        rows: B.
        backend: of attention.
        run: calls a layer; perhaps compiled.
    """

    def __init__(self, model: TransformerXL, rows: int, backend: str, run: RunLayer = run_layer) -> None:
        self._model, self._execution = model, Execution(backend, run_layer=run)
        self.mems = full_memory(model.config, rows, model.device)

    @property
    def model(self) -> TransformerXL:
        return self._model

    def loss(self, segment: Tensor) -> Tensor:
        out = self.model(segment[:, :-1], mems=self.mems, labels=segment[:, 1:], execution=self._execution)
        self.mems = out.mems
        assert out.nll is not None
        return out.nll.mean()

    def fixed_memory(self) -> Callable[[], None]:
        place = Mems(tuple(hidden.clone() for hidden in self.mems.hidden), self.mems.n_valid.clone())
        self.mems = place

        def settle() -> None:
            for old, new in zip((*place.hidden, place.n_valid), (*self.mems.hidden, self.mems.n_valid), strict=True):
                old.copy_(new)
            self.mems = place

        return settle

    def gradients(self) -> dict[str, Tensor]:
        return {name: gradient_of(parameter) for name, parameter in self.model.named_parameters()}


def full_memory(config: TransformerXLConfig, rows: int, device: torch.device) -> Mems:
    """Return a memory of random states, the same for all; every state is attended to."""
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(rows, config.mem_len, config.d_model, generator=generator) for _ in range(config.n_layer))
    return Mems(tuple(h.to(device) for h in hidden), torch.full((rows,), config.mem_len, device=device))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Update:
    """What follows a backward pass; one for all sides that share a model.

    Args:
        model: whose weights are updated.
        does: False: gradients are cleared, and that is all.
    """

    def __init__(self, model: nn.Module, *, does: bool) -> None:
        self.parameters = list(model.parameters())
        # one kernel for many tensors, which waits for nothing: fp16 overflows, too, are found on the device
        self._adam = torch.optim.Adam(self.parameters, lr=RATE, fused=True) if does else None
        if self._adam is not None:  # moments from the start, so that no side's memory seems to have grown by them
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            self._adam.step()
            self.clear()

    def __call__(self, scaler: torch.amp.GradScaler) -> None:
        if self._adam is not None:
            scaler.unscale_(self._adam)
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
            scaler.step(self._adam)
            scaler.update()
        self.clear()

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def n_bytes(self) -> int:
        """Bytes of weights and moments."""
        states = [] if self._adam is None else self._adam.state.values()
        moments = (x for state in states for x in state.values() if isinstance(x, Tensor))
        return sum(x.nbytes for x in (*self.parameters, *moments))


class Step:
    """Takes training steps, kernel by kernel.

    Args:
        learner: what learns.
        update: of its model.
        precision: of the matrix products.
        segments: (B, T + 1) each, read in turn, again and again.
    """

    def __init__(self, learner: Learner, update: Update, precision: Precision, segments: list[Tensor]) -> None:
        self.device = segments[0].device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.update = update
        self._learner = learner
        self._precision: Precision = precision
        self._segments = itertools.cycle(segments)
        learner.model.train()

    def __call__(self) -> Tensor:
        """Take one step and return its loss."""
        loss = self._forward_backward(next(self._segments))
        self.update(self.scaler)
        return loss

    def _forward_backward(self, segment: Tensor) -> Tensor:
        with autocast(self.device, self._precision):
            loss = self._learner.loss(segment)
        self.scaler.scale(loss).backward()
        return loss.detach()


class GraphStep(Step):
    """Takes training steps whose forward and backward pass is one CUDA graph, which nobody launches kernel by kernel.

    The update stays outside, for it is a handful of kernels. Segment, memory and gradients have fixed places. Shapes must not
    depend on values, nor may anybody wait for the device.

    Raises:
        RuntimeError: something waits for the device.
    """

    def __init__(self, learner: Learner, update: Update, precision: Precision, segments: list[Tensor]) -> None:
        super().__init__(learner, update, precision, segments)
        self._place = segments[0].clone()
        settle = learner.fixed_memory()
        beside = torch.cuda.Stream(self.device)  # as torch demands: what is done once is done before, on another stream
        beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(beside):
            for _ in range(N_WARM_UP):
                self._forward_backward(self._place)
                settle()
                update.clear()
        torch.cuda.current_stream(self.device).wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._forward_backward(self._place)
            settle()  # after the backward pass, which multiplies by the old memory
        self._gradients = [parameter.grad for parameter in update.parameters]
        update.clear()

    def __call__(self) -> Tensor:
        """Take one step and return its loss."""
        self._place.copy_(next(self._segments))
        self._graph.replay()
        for parameter, gradient in zip(self.update.parameters, self._gradients, strict=True):
            parameter.grad = gradient  # written, not added to: there was none when the graph was captured
        self.update(self.scaler)
        return self._loss


def no_graph(config: TransformerXLConfig, device: torch.device) -> str | None:
    """Say why a step cannot be captured; None if it can."""
    if device.type != "cuda":
        return f"{device.type} has no CUDA graphs"
    if config.cutoffs:  # `AdaptiveSoftmax.nll` picks the tokens of each tail: nonzero() waits for how many they are
        return (
            "how many tokens belong to each cluster of the softmax is known only on the device, and a graph's shapes are fixed"
        )
    return None


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
