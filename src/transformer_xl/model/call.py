"""What a call of a model gets besides tokens and memory, and what it returns: a model owns parameters alone.

Shapes: B batch, T tgt_len, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_xl.kernels.device import at_least_fp32
from transformer_xl.model.memory import Memory


def run_layer(layer: nn.Module, h_BTD: Tensor, **arguments: Any) -> Tensor:
    """Call a layer."""
    return layer(h_BTD, **arguments)


@dataclass(frozen=True)
class Regularizers:
    """What training adds to the nats of the labels.

    Attributes:
        label_smoothing: share of the loss in which all tokens are equally right (Szegedy et al. 2016, arXiv 1512.00567).
        activation: factor of the mean square of the last layer's states, before their dropout (AWD-LSTM's code: after it).
        temporal: factor of the mean square of their changes from token to token (both Merity et al. 2017, arXiv 1708.01009).
        progress: share of the training's budget that is used up, on which losses may depend that a kind of model adds.
    """

    label_smoothing: float = 0.0
    activation: float = 0.0
    temporal: float = 0.0
    progress: float = 0.0

    def penalty(self, last_BTD: Tensor) -> Tensor:
        """Return what is added to the mean loss of a token for the size of the last layer's states, and for their changes."""
        last_BTD = at_least_fp32(last_BTD)
        penalty = self.activation * last_BTD.square().mean()
        if self.temporal and last_BTD.shape[1] > 1:
            penalty = penalty + self.temporal * F.mse_loss(last_BTD[:, 1:], last_BTD[:, :-1])
        return penalty


@dataclass(frozen=True)
class Execution:
    """How a call is computed; this changes its time and memory, not its result.

    Attributes:
        backend: name of the attention backend, see `choose_backend`; kinds without a choice ignore it.
        checkpoint_layers: keep only the input of each layer, and compute the rest again in the backward pass.
        run_layer: calls a layer in training; the function `run_layer`, or the same compiled.
        tail_sizes: how many labels each tail of an adaptive softmax has at most, so that a device need not count them; None: it
            counts, and the host waits for the numbers.
    """

    backend: str = "auto"
    checkpoint_layers: bool = False
    run_layer: Callable[..., Tensor] = run_layer
    tail_sizes: tuple[int, ...] | None = None

    def run(self, layer: nn.Module, h_BTD: Tensor, **arguments: Any) -> Tensor:
        """Run a layer; if the backward pass computes it again, it uses the same random numbers.

        Args:
            layer: of a model; `run_layer` calls it if it is in training mode.
            h_BTD: its input.
            arguments: its other arguments.

        Returns:
            Its output.
        """
        run = self.run_layer if layer.training else run_layer
        if self.checkpoint_layers and torch.is_grad_enabled():
            return cast("Tensor", checkpoint(run, layer, h_BTD, use_reentrant=False, **arguments))
        return run(layer, h_BTD, **arguments)


@dataclass(frozen=True)
class ModelOutput:
    """What a forward pass returns.

    Attributes:
        mems: the new memory, which the next call reads after.
        logits: (B, T, V), scores of the token that follows each position (log-probabilities with an adaptive softmax); None if
            labels were given.
        nll: nats of each label, 0 where it is -100: (B, T) in the order of the tokens, or (B, K) of an XLNet; None without.
        auxiliary: scalar, nats that a kind adds to the sum of `nll` in training; None: it adds none.
    """

    mems: Memory
    logits: Tensor | None = None
    nll: Tensor | None = None
    auxiliary: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """What training lowers, a scalar: the sum of `nll`, and what the kind adds."""
        assert self.nll is not None
        return self.nll.sum() if self.auxiliary is None else self.nll.sum() + self.auxiliary


def check_tokens(ids: Tensor, *axes: str) -> None:
    """Refuse what is no tensor of integers with these axes, and one that holds no tokens; their values are not read."""
    shape = f"({', '.join(axes)})"
    if not isinstance(ids, Tensor):
        text = "torch.tensor([tokenizer.encode(text)])"
        raise TypeError(f"ids must be an int64 tensor of shape {shape}, not a {type(ids).__name__}; use {text}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids must be an int64 tensor of shape {shape}, not {ids.dtype}")
    if ids.dim() != len(axes) or 0 in ids.shape:
        raise ValueError(f"ids {tuple(ids.shape)} must have shape {shape}, none of them 0")
