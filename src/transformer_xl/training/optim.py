"""Optimizers and learning-rate schedules, made from `OptimConfig`."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from transformer_xl.config import OptimConfig
from transformer_xl.training.lamb import Lamb
from transformer_xl.training.muon import Muon
from transformer_xl.training.parallel import own_part


class Optimizers:
    """One or two optimizers that step together.

    `muon` takes the matrices inside the layers and leaves all other parameters to AdamW. The other optimizers take all
    parameters. Adam and AdamW run fused where the device allows it: one pass over memory instead of a dozen.
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        named = dict(model.named_parameters())
        adam: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        if config.optimizer != "lamb" and all(p.device.type in ("cpu", "cuda") for p in named.values()):
            adam["fused"] = True
        if config.optimizer == "muon":
            inside = {name: p for name, p in named.items() if _in_layers(name, p)}
            rest = {name: p for name, p in named.items() if name not in inside}
            self.parts: list[torch.optim.Optimizer] = [
                Muon(inside.values(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay),
                torch.optim.AdamW(_groups(rest, config, lr=config.adamw_lr or config.lr), **adam),
            ]
        elif config.optimizer == "sgd":
            self.parts = [torch.optim.SGD(_groups(named, config, lr=config.lr), lr=config.lr, momentum=config.momentum)]
        else:
            kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "lamb": Lamb}[config.optimizer]
            self.parts = [kind(_groups(named, config, lr=config.lr), **adam)]
        self._rates = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, rate: float) -> None:
        """Update the parameters from their gradients at `rate` times the configured learning rates."""
        for part, rates in zip(self.parts, self._rates, strict=True):
            for group, lr in zip(part.param_groups, rates, strict=True):
                group["lr"] = lr * rate
            part.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return moments and counters by parameter name, for a checkpoint."""
        return {
            f"{self._names[parameter]}|{key}": value  # pyright: ignore[reportArgumentType]
            for part in self.parts
            for parameter, state in part.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` returned."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        owners = {p: part for part in self.parts for group in part.param_groups for p in group["params"]}
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition("|")
            parameter = parameters[name]
            owner = owners[parameter]
            counts_on_device = any(group.get("fused") for group in owner.param_groups)  # the count of steps
            if value.shape == parameter.shape:
                value = own_part(value, parameter)
            elif counts_on_device:
                value = value.to(parameter.device)
            owner.state[parameter][key] = value.clone()


def _groups(named: dict[str, nn.Parameter], config: OptimConfig, *, lr: float) -> list[dict[str, Any]]:
    """Part parameters by their learning rate, and by whether they are decayed."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        rate = lr * config.embedding_lr_ratio if name.startswith("embedding.") else lr
        # biases, norms, u, v and tables of positions have one dimension, or more than two
        is_decayed = {"all": True, "layers": _in_layers(name, parameter)}.get(config.decayed, parameter.dim() == 2)
        groups.setdefault((rate, is_decayed), []).append(parameter)
    return [
        {"params": parameters, "lr": rate, "weight_decay": config.weight_decay if decays else 0.0}
        for (rate, decays), parameters in groups.items()
    ]


def _in_layers(name: str, parameter: nn.Parameter) -> bool:
    """Say whether a parameter is a matrix inside a layer."""
    return parameter.dim() == 2 and name.startswith("layers.")


class Schedule:
    """The factor on the learning rate, from the step and the share of the budget that is used up."""

    def __init__(self, config: OptimConfig) -> None:
        self.config = config
        self.plateau_factor, self.best_loss, self.waiting = 1.0, math.inf, 0

    def factor(self, step: int, progress: float) -> float:
        """Return the factor for a step, before which `step` steps and the share `progress` of the budget were used up."""
        config = self.config
        warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.decay_after_warmup:
            # the share of the budget that warm-up took, at the mean pace so far: exact unless the budget is time
            before = progress * min(1.0, config.warmup_steps / max(step, 1))
            progress = (progress - before) / (1 - before) if before < 1 else 0.0
        return warmup * self._shape(step, min(progress, 1.0))

    def _shape(self, step: int, progress: float) -> float:
        low = self.config.min_lr_ratio
        match self.config.schedule:
            case "linear":
                return 1 - (1 - low) * progress
            case "cosine":
                return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
            case "inv_sqrt":
                start = max(self.config.warmup_steps, 1)
                return max(low, math.sqrt(start / max(step + 1, start)))
            case "plateau":
                return max(low, self.plateau_factor)
            case "constant":
                return 1.0

    def validated(self, loss: float) -> None:
        """Take note of a validation loss: `plateau` lowers the rate after `plateau_patience` without improvement."""
        if loss < self.best_loss:
            self.best_loss, self.waiting = loss, 0
            return
        self.waiting += 1
        if self.waiting > self.config.plateau_patience:
            self.plateau_factor, self.waiting = self.plateau_factor * self.config.plateau_factor, 0

    def state_dict(self) -> dict[str, float | int | None]:
        """Return what validations have changed, as JSON scalars."""
        best = None if math.isinf(self.best_loss) else self.best_loss
        return {"plateau_factor": self.plateau_factor, "best_loss": best, "waiting": self.waiting}

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """Put back what `state_dict` returned."""
        best = state["best_loss"]
        self.plateau_factor, self.waiting = float(state["plateau_factor"] or 0), int(state["waiting"] or 0)
        self.best_loss = math.inf if best is None else float(best)


def finite_norm(parameters: Iterator[nn.Parameter], clip: float | None) -> tuple[Tensor, bool]:
    """Clip gradients in place; return their global norm before, and whether all were finite. Without `clip`, only measure."""
    norm = nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norm, bool(torch.isfinite(norm))
