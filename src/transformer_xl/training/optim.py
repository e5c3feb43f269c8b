"""Makes optimizers and learning-rate schedules from `OptimConfig`."""
# pyright: reportPrivateImportUsage=false

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from transformer_xl.config.run import OptimConfig
from transformer_xl.errors import shown
from transformer_xl.reading.stream import check_like
from transformer_xl.training.lamb import Lamb
from transformer_xl.training.muon import Muon
from transformer_xl.training.parallel import own_part

Named = dict[str, nn.Parameter]

_LAYER_NAME = re.compile(r"layers\.([0-9]+)\.")
_TAIL_NAME = re.compile(r"(embedding\.(tables|projections)|softmax\.(weights|biases|projections))\.[1-9][0-9]*")
_PLATEAU_FACTOR, _PATIENCE = 0.5, 2
"""The `plateau` schedule multiplies the rate by this after more than so many validations without improvement."""


class Optimizers:
    """The one or two optimizers of a model, which step together; `OPTIMIZERS` makes them."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        named = _learning(model)
        self._names = {parameter: name for name, parameter in named.items()}
        self._config = config
        self.parts = OPTIMIZERS[config.optimizer](named, config)
        self._tails = [p for name, p in named.items() if _TAIL_NAME.fullmatch(_own_name(name))]
        self._rates_on_device: list[list[Tensor]] = []  # of the parts' groups, on the device, where graphs read them
        self._rates = [[group["lr"] for group in part.param_groups] for part in self.parts]
        n_layer, decay = _n_layer(named), config.layer_lr_decay
        self._on_gradients: dict[nn.Parameter, float] = {}
        self._stacked: dict[nn.Parameter, Tensor] = {}  # factors of what lies in one tensor for all layers
        if decay < 1 and config.layer_lr_decay_on == "gradient":
            self._on_gradients = {p: decay ** (n_layer - 1 - i) for name, p in named.items() if (i := _layer(name)) is not None}
        elif decay < 1:
            factors = decay ** torch.arange(n_layer - 1, -1, -1, dtype=torch.float32)
            for name, p in named.items():
                if _is_stacked(name, p, n_layer):
                    self._stacked[p] = own_part(factors.view(-1, *(1,) * (p.dim() - 1)).expand(p.shape).contiguous(), p)

    @torch.no_grad()
    def step(self, rate: float | Tensor, *, found_inf: Tensor | None = None) -> None:
        """Update the parameters from their gradients.

        Args:
            rate: factor on the configured learning rates; a scalar tensor is read on its device, so that nothing waits for it.
            found_inf: fp32 scalar on the device; where it is 1, weights, moments and counters stay as they are. None: it is 0.
        """
        factors = [[lr * rate for lr in rates] for rates in self._rates]
        if isinstance(rate, Tensor):
            self._rates_on_device = self._rates_on_device or [[torch.empty_like(lr) for lr in own] for own in factors]
            for there, own in zip(self._rates_on_device, factors, strict=True):
                torch._foreach_copy_(there, own)
            factors = self._rates_on_device
        for parameter, factor in self._on_gradients.items():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        before = {parameter: parameter.clone() for parameter in self._stacked}
        for part, rates in zip(self.parts, factors, strict=True):
            for group, lr in zip(part.param_groups, rates, strict=True):
                group["lr"] = lr
            part.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue]  # fused ones of PyTorch look for it, too
            if isinstance(part, torch.optim.SGD) and found_inf is not None:
                _fuse(part)
            part.step()
            for parameter in self._tails:
                _begin(part.state.get(parameter, {}), waits=found_inf is None)
        for parameter, factors in self._stacked.items():
            parameter.copy_(before[parameter].lerp(parameter, factors))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return moments and counters by parameter name, as a checkpoint stores them.

        Raises:
            TypeError: an optimizer keeps something other than tensors, which a resumed run would lack.
        """
        tensors: dict[str, Tensor] = {}
        for part in self.parts:
            for parameter, state in part.state.items():
                name = self._names[parameter]  # pyright: ignore[reportArgumentType]
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        tensors[f"{name}|{key}"] = value
                    elif value is not None:
                        raise TypeError(f"{type(part).__name__} keeps {key} of {name} as {value!r}; keep it as a tensor")
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` returned.

        Raises:
            ValueError: it belongs to other weights or to another optimizer.
        """
        parameters = {name: parameter for parameter, name in self._names.items()}
        config = self._config.model_copy(update={"momentum": self._config.momentum or 0.9})  # it may have been higher before
        kept = kept_tensors(parameters, config)
        for full_name, value in tensors.items():
            if full_name not in kept:
                raise ValueError(f"the optimizer keeps no {shown(full_name)}")
            check_like(full_name, value, kept[full_name].dtype, kept[full_name].shape)
        begun = {name.rpartition("|")[0] for name in tensors}  # a weight without a gradient has no state
        if missing := [name for name in kept.keys() - tensors.keys() if name.rpartition("|")[0] in begun]:
            raise ValueError(f"the optimizer's {shown(min(missing))} is missing")
        owners = {p: part for part in self.parts for group in part.param_groups for p in group["params"]}
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition("|")
            parameter = parameters[name]
            owner = owners[parameter]
            is_fused = any(group.get("fused") for group in owner.param_groups)
            if value.shape == parameter.shape:
                value = own_part(value, parameter)
            elif is_fused:  # it keeps its count of steps on the device
                value = value.to(parameter.device)
            owner.state[parameter][key] = value.clone()


def _begin(state: dict[str, Tensor], *, waits: bool) -> None:
    """Have Adam count the steps of a tail of an adaptive softmax from the first token on that it meets.

    Until then gradients are zeros, and would be None in the authors' loop; m and v stay zeros, only the count must go back.
    `waits`: the count can be looked at.
    """
    if "step" not in state or (waits and state["step"] > 1):
        return
    met = state["exp_avg_sq"].any()
    met = (met.full_tensor() if isinstance(met, DTensor) else met).to(state["step"].device)
    state["step"].mul_((state["step"] > 1) | met)


def _fuse(part: torch.optim.SGD) -> None:
    """Choose the fused step. A first one that is bad would leave momentum as it was allotted, so it begins as zeros."""
    for group in part.param_groups:
        group["fused"] = True
        for parameter in group["params"] if group["momentum"] else []:
            if parameter.grad is not None and "momentum_buffer" not in part.state[parameter]:
                part.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _muon(named: Named, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices inside the layers, and AdamW for all other parameters."""
    inside = {name: p for name, p in named.items() if _in_layers(name, p)}
    rest = {name: p for name, p in named.items() if name not in inside}
    n_layer = _n_layer(named)
    parts: list[torch.optim.Optimizer] = []
    if inside:
        groups = _groups(inside, config, lr=config.lr, n_layer=n_layer)
        parts.append(Muon(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay))
    if rest:  # with adapters there is none
        groups = _groups(rest, config, lr=config.adamw_lr or config.lr, n_layer=n_layer)
        parts.append(torch.optim.AdamW(groups, **_adam(named, config)))
    return parts


def _adam(named: Named, config: OptimConfig) -> dict[str, Any]:
    """Return the arguments of Adam and AdamW. A fused step passes over memory once instead of a dozen times."""
    devices = {p.device.type for p in named.values()}
    how = {"fused": True} if devices <= {"cpu", "cuda"} else {}
    how |= {"capturable": True} if devices == {"cuda"} else {}  # its counters of steps stay on the device
    return {"betas": config.betas, "eps": config.eps, **how}


OPTIMIZERS: dict[str, Callable[[Named, OptimConfig], list[torch.optim.Optimizer]]] = {
    "adamw": lambda named, c: [torch.optim.AdamW(_groups(named, c, lr=c.lr), **_adam(named, c))],
    "adam": lambda named, c: [torch.optim.Adam(_groups(named, c, lr=c.lr), **_adam(named, c))],
    "sgd": lambda named, c: [torch.optim.SGD(_groups(named, c, lr=c.lr), momentum=c.momentum)],
    "lamb": lambda named, c: [Lamb(_groups(named, c, lr=c.lr), lr=c.lr, betas=c.betas, eps=c.eps)],
    "muon": _muon,
}
"""Functions that make the optimizers from parameters by name; the keys are values of `OptimConfig.optimizer`."""


def _groups(named: Named, config: OptimConfig, *, lr: float, n_layer: int | None = None) -> list[dict[str, Any]]:
    """Group parameters by learning rate, and by whether they are decayed; `n_layer` of the whole model, if these are a part."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    n_layer = _n_layer(named) if n_layer is None else n_layer
    for name, parameter in named.items():
        rate = lr * _factor(name, parameter, config, n_layer)
        if _own_name(name).startswith(("embedding.", "ngrams.")):
            rate *= config.embedding_lr_ratio
        # biases and norms have one dimension; u, v and tables of positions, which the model itself holds, are not matrices
        is_matrix = parameter.dim() == 2 and "." in _own_name(name)
        is_decayed = {"all": True, "layers": _in_layers(name, parameter)}.get(config.decayed, is_matrix)
        groups.setdefault((rate, is_decayed), []).append(parameter)
    return [
        {"params": parameters, "lr": rate, "weight_decay": config.weight_decay if decays else 0.0}
        for (rate, decays), parameters in groups.items()
    ]


def _own_name(name: str) -> str:
    """Return a parameter's name in the model that is fine-tuned, see `TaskModel`."""
    return name.removeprefix("backbone.")


def _layer(name: str) -> int | None:
    """Return the index of the layer that holds a parameter."""
    found = _LAYER_NAME.match(_own_name(name))
    return int(found[1]) if found else None


def _in_layers(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and _layer(name) is not None


def _n_layer(named: Named) -> int:
    return 1 + max((i for name in named if (i := _layer(name)) is not None), default=-1)


def _is_stacked(name: str, parameter: nn.Parameter, n_layer: int) -> bool:
    """Return whether a tensor of the model itself holds a part for each layer, as u and v of an XLNet."""
    return "." not in _own_name(name) and parameter.dim() > 2 and len(parameter) == n_layer


def _factor(name: str, parameter: nn.Parameter, config: OptimConfig, n_layer: int) -> float:
    """Return the factor of a parameter's rate: decayᴸ⁻¹⁻ⁱ in layer i of L, decayᴸ for embeddings and what layers share.

    Head, softmax and last norm, which lie above all layers, have the whole rate.
    """
    if config.layer_lr_decay_on != "rate" or _is_stacked(name, parameter, n_layer):
        return 1.0
    if (layer := _layer(name)) is not None:
        return config.layer_lr_decay ** (n_layer - 1 - layer)
    is_below = _own_name(name).startswith(("embedding.", "ngrams.")) or "." not in _own_name(name)
    return config.layer_lr_decay**n_layer if is_below else 1.0


def state_bytes(model: nn.Module, config: OptimConfig) -> int:
    """Return the bytes that the optimizers of a model keep between steps, without allocating them."""
    return sum(tensor.nbytes for tensor in kept_tensors(_learning(model), config).values())


def _learning(model: nn.Module) -> Named:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def kept_tensors(parameters: Mapping[str, Tensor], config: OptimConfig) -> dict[str, Tensor]:
    """Return what `Optimizers.state_tensors` holds after a step, as tensors of the meta device.

    A step of single numbers shows what is kept: tensors of a parameter's own shape, and counters without dimensions.
    """
    named = {name: nn.Parameter(torch.zeros((1,) * p.dim(), dtype=p.dtype)) for name, p in parameters.items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    names = {parameter: name for name, parameter in named.items()}
    kept: dict[str, Tensor] = {}
    for part in OPTIMIZERS[config.optimizer](named, config):
        part.step()
        for parameter, state in part.state.items():
            name = names[parameter]  # pyright: ignore[reportArgumentType]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    shape = parameters[name].shape if value.dim() else ()
                    kept[f"{name}|{key}"] = torch.empty(shape, dtype=value.dtype, device="meta")
    return kept


class Schedule:
    """The factor on the learning rate. It depends on the step and on the share of the budget that is used up."""

    def __init__(self, config: OptimConfig) -> None:
        self.config = config
        factor = torch.optim.SGD([torch.empty(())], lr=1.0)
        least: dict[str, Any] = {"threshold_mode": "abs", "eps": 1e-8 / config.lr}  # of factors; by default of rates
        self._plateau = ReduceLROnPlateau(factor, factor=_PLATEAU_FACTOR, patience=_PATIENCE, **least)
        self._lowered = factor.param_groups[0]

    def factor(self, step: int, progress: float, *, share: float = 0.0) -> float:
        """Return the factor for the next step.

        Args:
            step: steps before it.
            progress: the share of the budget that they took.
            share: what this step takes; 0: nobody knows, as where the budget is time.
        """
        config = self.config
        warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.warmup_share:
            after = progress + share if share else progress * (step + 1) / max(step, 1)
            warmup = min(1.0, after / config.warmup_share)
        if config.decay_after_warmup:
            # the share of the budget that warm-up took, at the mean pace so far; exact unless the budget is time
            before = min(progress, config.warmup_share) or progress * min(1.0, config.warmup_steps / max(step, 1))
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
                return max(low, self._lowered["lr"])
            case "constant":
                return 1.0

    def validated(self, loss: float) -> None:
        """Record a validation loss: `plateau` lowers the rate after so many losses that are not better by 1e-4 of the best."""
        best = self._plateau.best
        self._plateau.threshold = 1e-4 * abs(best) if math.isfinite(best) else 0.0  # by default of positive losses alone
        self._plateau.step(loss)

    def state_dict(self) -> dict[str, float | int | None]:
        """Return the state that validations change, as JSON scalars."""
        best, waiting = self._plateau.best, self._plateau.num_bad_epochs
        return {"plateau_factor": self._lowered["lr"], "best_loss": None if math.isinf(best) else best, "waiting": waiting}

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """Restore what `state_dict` returned."""
        best = state["best_loss"]
        self._lowered["lr"], self._plateau.num_bad_epochs = float(state["plateau_factor"] or 0), int(state["waiting"] or 0)
        self._plateau.best = math.inf if best is None else float(best)


def clipped(parameters: Iterator[nn.Parameter], clip: float | None) -> Tensor:
    """Clip gradients in place, unless `clip` is None. Return their global norm before, without waiting for it."""
    norm = nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
