"""Low-rank adapters (LoRA, Hu et al. 2021, section 4.1): W' = W + (alpha / rank) B A, and only A and B learn.

Shapes: O outputs, K inputs, R rank.
"""

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_IN_LAYERS = re.compile(r"(^|\.)layers\.")
_ORIGINAL, _OWN = ".parametrizations.weight.original", ".parametrizations.weight.0."


class LowRank(nn.Module):
    """What is added to a matrix. B begins with zeros, so that an adapted model begins as it was."""

    def __init__(self, weight_OK: Tensor, *, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(weight_OK.new_empty(rank, weight_OK.shape[1]).uniform_(-1, 1) / math.sqrt(weight_OK.shape[1]))
        self.b = nn.Parameter(weight_OK.new_zeros(weight_OK.shape[0], rank))

    def forward(self, weight_OK: Tensor) -> Tensor:
        """Return W + scale B A; in full precision under autocast, too, as it will be when it is merged."""
        with torch.autocast(weight_OK.device.type, enabled=False):
            return _sum(weight_OK, self.a, self.b, self.scale)


def _sum(weight_OK: Tensor, a_RK: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    return torch.addmm(weight_OK, b_OR, a_RK, alpha=scale)


def add_adapters(model: nn.Module, *, rank: int, scale: float) -> int:
    """Give each linear map inside the layers that learns an adapter, and freeze all other weights; return their number."""
    inside = [module for name, module in model.named_modules() if _IN_LAYERS.search(name) and isinstance(module, nn.Linear)]
    maps = [module for module in inside if module.weight.requires_grad]
    model.requires_grad_(requires_grad=False)
    for module in maps:
        own = LowRank(module.weight.detach(), rank=min(rank, *module.weight.shape), scale=scale)
        parametrize.register_parametrization(module, "weight", own)
    return len(maps)


def merged(weights: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """Return the weights of an adapted model as those of a plain one, by its names."""
    plain: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.endswith(_ORIGINAL):
            module = name.removesuffix(_ORIGINAL)
            a, b = weights[f"{module}{_OWN}a"], weights[f"{module}{_OWN}b"]
            plain[f"{module}.weight"] = _sum(weight, a, b, scale)
        elif _OWN not in name:
            plain[name] = weight
    return plain
