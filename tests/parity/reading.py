"""Let a converted model read a golden's stream, and compare what it says, remembers and would learn (see golden_writer.py)."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tests.helpers import assert_close, default_dtype
from transformer_xl.model.transformer_xl import TransformerXL

GOLDENS = Path(__file__).with_name("goldens")


@dataclass(frozen=True)
class Golden:
    """What a peer computed, and what it was.

    Attributes:
        tensors: as listed in golden_writer.py, but for the gradients.
        gradients: of the last segment's nats, under every name that a parameter has in the peer's state dict.
        hyperparameters: that the peer's model was built with, under the peer's names.
        reading: lengths that differ from those while reading.
        zero_first_memory: the stream begins after a memory of zeros that are attended to.
    """

    tensors: dict[str, Tensor]
    gradients: dict[str, Tensor]
    hyperparameters: dict[str, Any]
    reading: dict[str, Any]
    zero_first_memory: bool


def goldens(peer: str) -> list[Path]:
    """Return the directories of a peer's goldens."""
    return sorted(path for path in (GOLDENS / peer).iterdir() if path.is_dir())


def read_golden(path: Path) -> Golden:
    """Read an `expected.safetensors` or `expected64.safetensors`."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a dictionary)
    gradients = {name.removeprefix("grads."): tensors.pop(name) for name in list(tensors) if name.startswith("grads.")}
    gradients.update({name: gradients[first] for name, first in about["aliases"].items()})
    return Golden(tensors, gradients, about["hyperparameters"], about["reading"], about["first_memory"] == "zeros")


def compare(
    model: TransformerXL,
    golden: Golden,
    gradients: dict[str, Tensor],
    *,
    tolerance: float,
    tolerance_of_gradients: float | None = None,
) -> None:
    """Read the stream in the precision of the golden and compare everything.

    Args:
        model: converted from the golden's checkpoint; it stays as it is.
        golden: what is expected.
        gradients: expected, under the names and in the shapes of this project.
        tolerance: relative to the largest magnitude, at least 1.
        tolerance_of_gradients: the same for gradients; None: `tolerance`.
    """
    dtype = golden.tensors["log_probs"].dtype
    assert model.config.zero_first_memory == golden.zero_first_memory
    own = copy.deepcopy(model).to(dtype)
    with default_dtype(dtype):  # of the sinusoids
        _compare_outputs(own, golden, tolerance).backward()
    parameters = dict(own.named_parameters())
    assert parameters.keys() == gradients.keys()
    for name, parameter in parameters.items():
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(f"gradient of {name}", mine, gradients[name].to(dtype), tolerance_of_gradients or tolerance, least=1e-6)


def _compare_outputs(model: TransformerXL, golden: Golden, tolerance: float) -> Tensor:
    """Compare log-probabilities, nats and memories of all segments; return the nats of the last one."""
    lengths = {name: value for name, value in golden.reading.items() if name != "tgt_len"}
    ext_len = golden.hyperparameters.get("ext_len", 0)
    model = model.with_context(**lengths)
    mems = model.init_mems(golden.tensors["ids"].shape[1], length=None if golden.zero_first_memory else 0)
    total, extended = torch.zeros(()), golden.tensors["ids"][0, :, :0]
    for segment, (new, following) in enumerate(zip(golden.tensors["ids"], golden.tensors["labels"], strict=True)):
        ids = torch.cat([extended, new], dim=1)
        labels = torch.cat([torch.full_like(extended, -100), following], dim=1)
        logits = model(ids, mems=mems).logits
        output = model(ids, mems=mems, labels=labels)
        assert logits is not None and output.nll is not None
        said, nats = logits.log_softmax(-1)[:, extended.shape[1] :], output.nll[:, extended.shape[1] :]
        assert_close(f"log_probs of segment {segment}", said, golden.tensors["log_probs"][segment], tolerance)
        assert_close(f"nats of segment {segment}", nats, golden.tensors["nats"][segment], tolerance)
        for layer, remembered in enumerate(output.mems.hidden if model.mem_len else ()):
            expected = golden.tensors[f"mems.{segment}.{layer}"]
            assert_close(f"memory of layer {layer} after segment {segment}", remembered, expected, tolerance)
        mems, total, extended = output.mems, output.nll.sum(), ids[:, max(ids.shape[1] - ext_len, 0) :]
        # The authors pass the lengths to `_update_mems` in the wrong order: the first segment is remembered to its end, though
        # its last ext_len tokens are read again. From then on both orders come to the same.
        model = model.with_context(ext_len=ext_len)
    return total
