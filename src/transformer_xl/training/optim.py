"""Optimizers and learning-rate schedules, made from `OptimConfig`."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from transformer_xl.config import OptimConfig
from transformer_xl.training.lamb import Lamb


class Optimizers:
    """One or two optimizers that step together; `rate` scales the learning rates that they were made with.

    `muon` orthogonalizes the updates of the matrices inside the layers; embeddings, softmax, projections of either, biases,
    norms, u, v and tables of positions go to AdamW. The others take all parameters. Weight decay concerns matrices only.

    Args:
        model: whose parameters are optimized.
        config: which optimizer, and its settings.
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("layers.")]
        if config.optimizer == "muon":
            inside = set(matrices)
            rest = [p for p in model.parameters() if p not in inside]
            self.parts: list[torch.optim.Optimizer] = [
                torch.optim.Muon(
                    matrices,
                    lr=config.lr,
                    momentum=config.momentum,
                    weight_decay=config.weight_decay,
                    adjust_lr_fn="match_rms_adamw",  # so that one rate means the same for Muon and AdamW
                ),
                torch.optim.AdamW(
                    _groups(rest, config.weight_decay), lr=config.adamw_lr or config.lr, betas=config.betas, eps=config.eps
                ),
            ]
        elif config.optimizer == "sgd":
            groups = _groups(model.parameters(), config.weight_decay)
            self.parts = [torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)]
        else:
            kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "lamb": Lamb}[config.optimizer]
            groups = _groups(model.parameters(), config.weight_decay)
            self.parts = [kind(groups, lr=config.lr, betas=config.betas, eps=config.eps)]
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
            on_parameter = value.to(parameter.device) if value.shape == parameter.shape else value
            owners[parameter].state[parameter][key] = on_parameter.clone()


def _groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Decay matrices; leave biases, norms, u and v alone."""
    everything = list(parameters)
    groups = [
        {"params": [p for p in everything if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in everything if p.dim() != 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Schedule:
    """The factor on the learning rate, from the step and the share of the budget that is used up.

    Args:
        config: shape, warm-up and end of the schedule.
    """

    def __init__(self, config: OptimConfig) -> None:
        self.config = config
        self.plateau_factor, self.best_loss, self.waiting = 1.0, math.inf, 0

    def factor(self, step: int, progress: float) -> float:
        """Return the factor for a step.

        Args:
            step: steps done before this one.
            progress: share of the budget used up before this step, 0 to 1.
        """
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
        """Take note of a validation loss; `plateau` lowers the rate after `plateau_patience` without improvement."""
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
    """Clip gradients to a global norm and say whether they were finite.

    Args:
        parameters: whose `.grad` is clipped in place.
        clip: largest norm; None: measure only.

    Returns:
        The norm before clipping, and whether every gradient was finite.
    """
    norm = nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)
    return norm, bool(torch.isfinite(norm))
