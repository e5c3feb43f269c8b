"""Averages of the weights over the steps of a run. They often predict better than the latest weights."""
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from transformer_xl.config.run import TrainConfig
from transformer_xl.reading.stream import check_like, check_names
from transformer_xl.training.parallel import local, own_part


class Average:
    """The average of the weights after each update.

    Both kinds begin as plain means: `swa` stays one, and `ema` is one for its first 1 / (1 - decay) updates. So neither keeps a
    trace of the random first weights, and `ema` needs no correction.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._weights: dict[str, Tensor] = {}
        self.count: int | Tensor = 0  # updates in the average; on the device if that knows which there were

    @property
    def weights(self) -> dict[str, Tensor]:
        """By parameter, at least fp32; empty until the average begins."""
        return self._weights if self.count else {}

    def is_due(self, progress: float) -> bool:
        """Say whether an update is added; `swa` begins at a certain `progress` (share of the budget)."""
        config = self._config
        return config.average == "ema" or (config.average == "swa" and progress >= config.average_start)

    @torch.no_grad()
    def update(self, model: nn.Module, *, progress: float, found_inf: Tensor | None = None) -> None:
        """Add the weights after an update to the average, if it is due.

        Args:
            model: whose weights they are.
            progress: share of the budget that was used before the update.
            found_inf: fp32 scalar on the device; where it is 1, there was no update, and nothing is added. None: there was one.
        """
        if not self.is_due(progress):
            return
        if found_inf is not None:
            self._update_on_device(model, found_inf)
            return
        config, self.count = self._config, self.count + 1
        share = 1 / self.count if config.average == "swa" else max(1 - config.average_decay, 1 / self.count)
        for name, parameter in model.named_parameters():
            latest = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
            if name in self._weights:
                self._weights[name].lerp_(latest, share)
            else:
                self._weights[name] = latest.clone()

    def _update_on_device(self, model: nn.Module, found_inf: Tensor) -> None:
        """Do as `update` with a few kernels, which find out by themselves whether there was one."""
        config, device = self._config, found_inf.device
        latest = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)) for name, p in model.named_parameters()}
        if not isinstance(self.count, Tensor):
            self.count = torch.tensor(self.count, device=device)
        if not self._weights:
            self._weights = {name: torch.zeros_like(weight) for name, weight in latest.items()}
        self.count += (found_inf == 0).long()
        share = 1 / self.count.clamp(min=1)
        if config.average == "ema":
            share = share.clamp(min=1 - config.average_decay)
        # w - lr (g + decay w) with a decay of -1 is a lerp from w to g, and this kernel leaves alone what `found_inf` says
        plain: dict[str, Any] = {"momentum": 0, "dampening": 0, "nesterov": False, "maximize": False, "is_first_step": False}
        average = [self._weights[name] for name in latest]  # a checkpoint may have them in another order
        torch._fused_sgd_(
            average, list(latest.values()), [], lr=-share.float(), weight_decay=-1.0, found_inf=found_inf, **plain
        )

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
                _put(self._weights[name], parameter)
            yield
        finally:
            for name, parameter in _parameters(model).items():
                _put(own[name], parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return kind and count, as JSON scalars; the tensors are in `weights`."""
        return {"kind": self._config.average, "count": int(self.count)}

    def load_state_dict(self, state: dict[str, Any], weights: dict[str, Tensor], model: nn.Module) -> None:
        """Restore a saved average. If the run now asks for another kind, that average begins now."""
        if state["kind"] == self._config.average:
            self.count = state["count"]
            parameters = dict(model.named_parameters())
            check_names(weights, parameters if self.count else {})
            for name, weight in weights.items():
                check_like(name, weight, torch.promote_types(parameters[name].dtype, torch.float32), parameters[name].shape)
            self._weights = {name: own_part(weight, parameters[name]).clone() for name, weight in weights.items()}


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
