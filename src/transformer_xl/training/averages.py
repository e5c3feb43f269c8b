"""Averages of the weights over the steps of a run. They often predict better than the latest weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from transformer_xl.config import TrainConfig
from transformer_xl.reading.stream import check_like, check_names
from transformer_xl.training.parallel import local, own_part


class Average:
    """The average of the weights after each update.

    Both kinds begin as plain means: `swa` stays one, and `ema` is one for its first 1 / (1 - decay) updates. So neither keeps a
    trace of the random first weights, and `ema` needs no correction.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.weights: dict[str, Tensor] = {}  # by parameter, at least fp32; empty until the average begins
        self.count = 0  # updates in the average

    @torch.no_grad()
    def update(self, model: nn.Module, *, progress: float) -> None:
        """Add the weights after an update to the average. `swa` begins at a certain `progress` (share of the budget)."""
        config = self._config
        if config.average == "none" or (config.average == "swa" and progress < config.average_start):
            return
        self.count += 1
        share = 1 / self.count if config.average == "swa" else max(1 - config.average_decay, 1 / self.count)
        for name, parameter in model.named_parameters():
            latest = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
            if name in self.weights:
                self.weights[name].lerp_(latest, share)
            else:
                self.weights[name] = latest.clone()

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Give a model the averaged weights inside the block; afterwards it has its own weights again, bit by bit."""
        # FSDP finds its parts by their storage, so their content is copied; other parameters just get other data
        own = {
            name: local(parameter).detach().clone() if isinstance(parameter, DTensor) else parameter.data
            for name, parameter in _parameters(model).items()
        }
        try:
            for name, parameter in _parameters(model).items():
                _put(self.weights[name], parameter)
            yield
        finally:
            for name, parameter in _parameters(model).items():
                _put(own[name], parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return kind and count, as JSON scalars; the tensors are in `weights`."""
        return {"kind": self._config.average, "count": self.count}

    def load_state_dict(self, state: dict[str, Any], weights: dict[str, Tensor], model: nn.Module) -> None:
        """Restore a saved average. If the run now asks for another kind, that average begins now.

        Raises:
            ValueError: it is of other weights.
        """
        if state["kind"] == self._config.average:
            self.count = state["count"]
            parameters = dict(model.named_parameters())
            check_names(weights, parameters if self.count else {})
            for name, weight in weights.items():
                check_like(name, weight, torch.promote_types(parameters[name].dtype, torch.float32), parameters[name].shape)
            self.weights = {name: own_part(weight, parameters[name]).clone() for name, weight in weights.items()}


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, divided again: after a pass without gradients, FSDP leaves the outermost ones whole."""
    if isinstance(model, FSDPModule):
        model.reshard()
    return dict(model.named_parameters())


@torch.no_grad()
def _put(weight: Tensor, parameter: Tensor) -> None:
    if isinstance(parameter, DTensor):
        local(parameter).copy_(local(weight))
    else:
        parameter.data = weight.to(parameter.dtype)
