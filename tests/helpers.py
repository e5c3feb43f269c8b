"""Tiny models and comparisons that tests share."""

import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config.model import TransformerXLConfig, XLNetConfig
from transformer_xl.kernels.graphs import Compute, Graphs
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.xlnet import XLNet

Model = TypeVar("Model", bound=nn.Module)
TINY: dict[str, Any] = {
    "vocab_size": 13,
    "n_layer": 2,
    "d_model": 10,
    "n_head": 3,
    "d_head": 4,
    "d_inner": 14,
    "dropout": 0.0,
    "mem_len": 5,
}

THOROUGH = os.environ.get("TXL_THOROUGH") == "1"
"""Whether Hypothesis tries as many examples as it can find use for (`make test-slow`), or a few (`make test`)."""


def examples(thorough: int) -> int:
    """Return how many examples a test tries: all of them where time is given, a tenth and at least 5 in the suite."""
    return thorough if THOROUGH else min(thorough, max(5, thorough // 10))


def tiny_model(**changes) -> TransformerXL:
    """A random model of odd sizes; biases and u, v are random too, so that none of them can be forgotten."""
    return random_weights(TransformerXL(TransformerXLConfig(**{**TINY, **changes})).eval())


def tiny_xlnet(**changes: Any) -> XLNet:
    """The same of an XLNet."""
    return random_weights(XLNet(XLNetConfig(**{**TINY, "dropatt": 0.0, **changes})).eval())


def random_weights(model: Model) -> Model:
    """Draw every parameter anew, so that none of them is zero or one by design."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm_weight = name.endswith("norm.weight")
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if norm_weight else 0.0))
    return model


class AtOnce(Graphs):
    """Does what graphs do, on a CPU: from the second time on, the same work, on inputs that are copied to the same places."""

    def __init__(self, device: torch.device, *, must: bool = False) -> None:
        self.problem = None
        self.places: dict[Hashable, list[Tensor]] = {}
        self.work: dict[Hashable, Compute] = {}

    def launch(self, key: Hashable, compute: Compute, inputs: Sequence[Tensor]) -> Tensor:
        places = self.places.setdefault(key, [tensor.clone() for tensor in inputs])
        for place, tensor in zip(places, inputs, strict=True):
            place.copy_(tensor)
        return self.work.setdefault(key, compute)(places)

    def forget(self) -> None:
        self.places.clear()
        self.work.clear()


def with_settings(run: Path, **sections: dict[str, Any]) -> None:
    """Change settings of a run, in all of its checkpoints too, as if it had been trained with them."""
    directory = RunDirectory(run)
    directory.save_config(directory.config().changed(**sections), directory.tokenizer())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter, by name; each has one."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == dict(model.named_parameters()).keys()
    return found


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float, *, least: float = 1.0) -> None:
    """Compare relative to the largest expected magnitude (and at least `least`), and say what differs and by how much."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    scale = max(least, expected.abs().max().item()) if expected.numel() else 1.0
    difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert difference <= tolerance * scale, f"{name}: differs by {difference:.3g} (scale {scale:.3g}, allowed {tolerance:g})"


def tokens(*shape: int) -> Tensor:
    """Random ids of `tiny_model`."""
    return torch.randint(13, shape)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of this type in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Compute with this many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
