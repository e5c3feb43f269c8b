"""What a call of a model is told besides its tokens: facts about the rows, and how to compute.

Both are values that are passed in, so a model owns parameters and nothing else.

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


def run_layer(layer: nn.Module, h_BTD: Tensor, **told: Any) -> Tensor:
    """Call a layer."""
    return layer(h_BTD, **told)


@dataclass(frozen=True)
class Rows:
    """What a call is told about its rows.

    Attributes:
        n_pad: int64 (B,), padding tokens at the left of each row; they are neither seen nor remembered. None: there are none.
        document_starts: bool (B, T), True where a token begins a new document, which sees nothing from before it. None:
            nowhere.
    """

    n_pad: Tensor | None = None
    document_starts: Tensor | None = None


@dataclass(frozen=True)
class Execution:
    """How a call is computed; it changes how long that takes and how much memory it needs, never the result.

    Attributes:
        backend: name of the attention backend, see `choose_backend`; kinds with one way to attend have no choice.
        checkpoint_layers: keep only what enters each layer, and compute the rest again in the backward pass.
        run_layer: calls a layer in training; `run_layer`, or the same compiled.
    """

    backend: str = "auto"
    checkpoint_layers: bool = False
    run_layer: RunLayer = run_layer

    def run(self, layer: nn.Module, h_BTD: Tensor, **told: Any) -> Tensor:
        """Run a layer; if it is computed again in the backward pass, then with the same random numbers.

        Args:
            layer: of a model; `run_layer` calls it while it is in training mode.
            h_BTD: what enters it.
            told: its other arguments.

        Returns:
            What leaves it.
        """
        run = self.run_layer if layer.training else run_layer
        if self.checkpoint_layers and torch.is_grad_enabled():
            return cast("Tensor", checkpoint(run, layer, h_BTD, use_reentrant=False, **told))
        return run(layer, h_BTD, **told)
