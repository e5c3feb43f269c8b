"""What a call of a model gets besides tokens and memory: facts about the rows (`Rows`), and how to compute (`Execution`).

They are passed in as values, and so is what training adds to the loss (`Regularizers`); a model owns parameters alone.

Shapes: B batch, T tgt_len.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RunLayer = Callable[..., Tensor]
"""How a layer is called; see `run_layer`."""


def run_layer(layer: nn.Module, h_BTD: Tensor, **arguments: Any) -> Tensor:
    """Call a layer."""
    return layer(h_BTD, **arguments)


@dataclass(frozen=True)
class Rows:
    """Padding and document borders of the rows of a call.

    Attributes:
        n_pad: int64 (B,), padding tokens at the left of each row; they are neither seen nor remembered. None: there are none.
        document_starts: bool (B, T), True where a token begins a new document, which sees nothing from before it. None:
            no token does.
    """

    n_pad: Tensor | None = None
    document_starts: Tensor | None = None


@dataclass(frozen=True)
class Regularizers:
    """What training adds to the nats of the labels.

    Attributes:
        label_smoothing: share of the loss in which all tokens are equally right (Szegedy et al. 2016, arXiv 1512.00567).
        activation: factor of the mean square of the last layer's states, before their dropout (AWD-LSTM's code: after it).
        temporal: factor of the mean square of their changes from token to token (both Merity et al. 2017, arXiv 1708.01009).
    """

    label_smoothing: float = 0.0
    activation: float = 0.0
    temporal: float = 0.0


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
    run_layer: RunLayer = run_layer
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
