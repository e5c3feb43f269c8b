"""Whether the steps of a run are CUDA graphs: their kernels are launched together, and the host does not wait for any of them.

A small model's step is thousands of kernels of a few microseconds, which a host launches more slowly than a GPU runs them.
`Graphs` (`kernels/graphs.py`) launches them at once.
"""

import torch

from transformer_xl.config.run import TrainConfig
from transformer_xl.data.streams import EndlessStream
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.device import Precision
from transformer_xl.model.base import LanguageModel, SequenceModel
from transformer_xl.world import World


def why_no_graph(
    model: SequenceModel, stream: EndlessStream, *, train: TrainConfig, precision: Precision, world: World, device: torch.device
) -> str | None:
    """Say why steps of a run cannot be captured; None if they can."""
    reasons = {
        "train.graph is off": train.graph == "off",
        f"{device.type} has no CUDA graphs": device.type != "cuda",
        "several processes exchange gradients within a step": not world.alone,
        "fp16 scales its losses by what the host has seen": precision == "fp16",
        "layers that are computed again restore random numbers (train.checkpoint_layers)": train.checkpoint_layers,
        "how many losses a step has differs from step to step": not stream.is_even,
        f"an {model.config.kind} is not captured": not (
            isinstance(model, LanguageModel) and model.attention_blocks() and not model.adds_losses
        ),
        "it has a kind of your own, which may look at values": not _is_own(model),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found and train.graph == "on":
        raise ConfigError(f"train.graph (on) cannot be: {found}; use auto")
    return found


def _is_own(model: SequenceModel) -> bool:
    kinds = [type(model), *(type(block) for block in model.attention_blocks())]
    return all(kind.__module__.startswith("transformer_xl.") for kind in kinds)
