"""Let a converted model read a golden's stream, and compare what it says, remembers and would learn (see golden_writer.py)."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tests.helpers import assert_close, default_dtype
from transformer_xl.batch import Order
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.key_maps.entries import KeyMap, Part
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.task_model import TaskModel
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.xlnet import XLNet

GOLDENS = Path(__file__).with_name("goldens")

Convert = Callable[[Path, dict[str, Any]], Path]
"""Returns where a checkpoint lies that was converted with some settings."""


def converting(folder: Path) -> Convert:
    """Return a function that converts into a folder, once for all who ask for the same."""
    done: dict[str, Path] = {}

    def converted(checkpoint: Path, settings: dict[str, Any]) -> Path:
        key = json.dumps([str(checkpoint), settings])
        if key not in done:
            done[key] = folder / str(len(done))
            convert(checkpoint, done[key], settings=settings)
        return done[key]

    return converted


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


def native_gradients(key_map: KeyMap, model: SequenceModel, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give gradients our names and shapes."""
    names = key_map.locate({name: tuple(tensor.shape) for name, tensor in theirs.items()}, "gradients")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def read(part: Part) -> Tensor:
        return theirs[names[part.name][0]] if part.name in names else torch.zeros(part.shape)

    return {name: key_map.native(name, shapes, read) for name in shapes}


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
        compare_outputs(own, golden, tolerance).backward()
    _compare_gradients(own, gradients, tolerance_of_gradients or tolerance)


def _compare_gradients(model: SequenceModel, gradients: dict[str, Tensor], tolerance: float) -> None:
    """Compare the gradients of all parameters."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == gradients.keys()
    for name, parameter in parameters.items():
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(f"gradient of {name}", mine, gradients[name].to(mine.dtype), tolerance, least=1e-6)


def compare_outputs(model: TransformerXL, golden: Golden, tolerance: float) -> Tensor:
    """Compare log-probabilities, nats and memories of all segments, in the model's precision; return the last one's nats."""
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


def compare_xlnet(
    model: XLNet,
    golden: Golden,
    gradients: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    tolerance: float,
    tolerance_of_gradients: float | None = None,
) -> None:
    """Read the segments of a golden (see peer_xlnet.py) in some precision, and compare everything with float64.

    Args:
        model: converted from the golden's checkpoint; it stays as it is.
        golden: what is expected.
        gradients: expected, under the names and in the shapes of this project.
        dtype: to compute in.
        tolerance: relative to the largest magnitude, at least 1.
        tolerance_of_gradients: the same for gradients; None: `tolerance`.
    """
    own, found = copy.deepcopy(model).to(dtype), golden.tensors
    S, B, T = found["ids"].shape
    n_pad = found.get("n_pad")
    reader = own.with_context(ext_len=max(T - (own.config.reuse_len or T), 0))  # theirs keeps to reuse_len in reading, too
    place = torch.arange(T).expand(B, T) if n_pad is None else torch.arange(T) - n_pad.unsqueeze(1)
    given: dict[str, Any] = {
        "n_pad": n_pad,
        "is_backward": torch.arange(B) >= B // 2 if golden.hyperparameters["bi_data"] else None,
    }
    mems, total = own.init_mems(B, length=golden.reading["zeros"]), torch.zeros(())
    for s in range(S):
        texts = found["segments"][s] if "segments" in found else None
        order = Order(found["rank"][s], found["sees"][s], found["targets"][s])
        if order.targets.shape[1]:
            logits = own(found["ids"][s], order=order, mems=mems, segments=texts, **given).logits
            output = own(found["ids"][s], order=order, labels=found["labels"][s], mems=mems, segments=texts, **given)
            assert logits is not None and output.nll is not None
            nats, mems, own_rows = output.nll, output.mems, torch.ones(B, logits.shape[1], dtype=torch.bool)
        else:  # their language model predicts each token from its own state, which saw it
            h_BTD, mems = reader.read(found["ids"][s], mems=mems, segments=texts, **given)
            logits = own.softmax.logits(h_BTD, own.embedding)
            nats, own_rows = own.softmax.nll(h_BTD, found["labels"][s], own.embedding), place >= 0
        assert_close(f"logits of segment {s}", logits[own_rows].double(), found["logits"][s][own_rows], tolerance)
        assert_close(f"nats of segment {s}", nats.double(), found["nats"][s], tolerance)
        total = nats.sum()
    for i, remembered in enumerate(mems.hidden if own.mem_len else ()):
        expected = found[f"mems.{i}"]
        if n_pad is None:
            assert_close(f"memory of layer {i}", remembered.double(), expected, tolerance)
            continue
        end = min(T, golden.hyperparameters["reuse_len"] or T)
        kept = place[:, end - expected.shape[1] : end] >= 0  # what is remembered of padding does not matter, nobody sees it
        assert mems.n_valid.tolist() == kept.sum(1).tolist()
        assert_close(f"memory of layer {i}", remembered.double()[kept], expected[kept], tolerance)
    total.backward()
    _compare_gradients(own.double(), gradients, tolerance_of_gradients or tolerance)


def compare_head(
    model: TaskModel,
    golden: Golden,
    gradients: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    tolerance: float,
    tolerance_of_gradients: float | None = None,
) -> None:
    """Score the texts of a golden (see peer_xlnet_heads.py) in some precision, and compare everything with float64.

    The arguments are those of `compare_xlnet`.
    """
    own, found = copy.deepcopy(model).to(dtype), golden.tensors
    given: dict[str, Any] = {name: found[name] for name in ("ids", "n_pad", "segments", "may_answer") if name in found}
    labels = found["labels"].to(dtype) if found["labels"].is_floating_point() else found["labels"]
    if "may_answer" in found:
        T, allowed = found["ids"].shape[1], found["may_answer"]
        spans = own.span_scores(**given, n_start=T, n_end=T)
        starts = torch.empty_like(spans.start_log_probs).scatter(1, spans.starts, spans.start_log_probs)
        expected = found["logits"].masked_fill(~allowed, -torch.inf).log_softmax(-1)
        assert_close("logits of starts", starts[allowed].double(), expected[allowed], tolerance)
        rank_B = (spans.starts == labels[:, :1]).int().argmax(1)  # of the true start
        of_start = [x[torch.arange(len(rank_B)), rank_B] for x in (spans.ends, spans.end_log_probs)]
        ends = torch.empty_like(starts).scatter(1, of_start[0], of_start[1])
        expected = found["ends"].masked_fill(~allowed, -torch.inf).log_softmax(-1)
        assert_close("logits of ends", ends[allowed].double(), expected[allowed], tolerance)
        assert (starts[~allowed] == -torch.inf).all() and (ends[~allowed] == -torch.inf).all()
        assert_close("logits of no answer", spans.no_answer.double(), found["impossible"], tolerance)
    else:
        logits = own(**given).logits
        assert logits is not None
        if logits.dim() == 3:  # of tokens; nothing is said of padding
            logits = logits * (torch.arange(logits.shape[1]) >= found["n_pad"][:, None])[..., None]
        assert_close("logits", logits.double(), found["logits"], tolerance)
    nll = own(**given, labels=labels).nll
    assert nll is not None
    assert_close("nats", nll.double(), found["nats"], tolerance)
    nll.mean().backward()
    in_softmax = {"choice": ("head.scores.bias",), "span": ("head.start.bias", "head.end_norm.bias", "head.end.bias")}
    for name in in_softmax.get(_kind(own), ()):  # added to all that a softmax compares: nothing but rounding is left
        parameter = own.get_parameter(name)
        assert parameter.grad is not None
        assert parameter.grad.abs().max() < tolerance and gradients[name].abs().max() < tolerance
        parameter.grad, gradients = None, gradients | {name: torch.zeros_like(parameter)}
    _compare_gradients(own.double(), gradients, tolerance_of_gradients or tolerance)


def _kind(model: TaskModel) -> str:
    assert model.config.head is not None
    return model.config.head.kind
