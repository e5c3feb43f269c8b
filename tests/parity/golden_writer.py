"""What the golden generators share: random weights, a random stream, and the expectations taken from a peer's own code.

Runs in a peer's environment, so it needs torch and safetensors only, and nothing of this project.

A golden is a directory with

    checkpoint/                 what the peer writes to the disk, as its users have it
    expected.safetensors        what the peer computes in float32
    expected64.safetensors      the same in float64 (some goldens only)

with these tensors, batch first, S segments read one after another, each with the memory of those before it:

    ids, labels                 int64 (S, B, T); labels[s, b, t] follows ids[s, b, t] in row b's stream
    log_probs                   (S, B, T, V) of every token of the vocabulary
    nats                        (S, B, T) of the labels, in their order
    mems.{segment}.{layer}      (B, M, D) the memory after that segment; its length may grow
    grads.{name}                of the last segment's summed nats, for every parameter by the peer's first name of it

and one entry of metadata, `about`, in JSON: `peer`, `hyperparameters` the model was built with, `reading` lengths that differ
from those while reading, `first_memory` ("zeros": mem_len zero vectors that are attended to; "empty"), `aliases` from every
further name of a shared parameter to its first one.

Written again, all files come out byte for byte the same but for those of `torch.save`'s old format, which contain addresses,
for pickled sets and for the times in a log.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

MAX_FILE = 100_000  # bytes, of every file of a golden
STD = 0.3

Read = Callable[[Tensor, Tensor, Any], tuple[Tensor, list[Tensor], Any]]


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Draw every parameter anew, also those that start as zeros or ones, so that none can be forgotten."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        center = 1.0 if name.endswith("layer_norm.weight") else 0.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * STD + center)


def stream(
    vocab_size: int, *, n_segment: int, batch_size: int, tgt_len: int, seed: int, cutoffs: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Draw one random stream per row and return its segments' ids and labels, each (S, B, T).

    Streams are drawn until every cluster between `cutoffs` occurs in the last segment's ids and labels, so that all learn.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(vocab_size, (batch_size, n_segment * tgt_len + 1), generator=generator)
        ids = tokens[:, :-1].reshape(batch_size, n_segment, tgt_len).transpose(0, 1).contiguous()
        labels = tokens[:, 1:].reshape(batch_size, n_segment, tgt_len).transpose(0, 1).contiguous()
        clusters = [torch.bucketize(last, torch.tensor(cutoffs), right=True).unique() for last in (ids[-1], labels[-1])]
        if all(len(those) == len(cutoffs) + 1 for those in clusters):
            return ids, labels


def expectations(model: nn.Module, read: Read, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Let a model read all segments and note what it says, remembers and would learn.

    Args:
        model: the peer's, in evaluation mode.
        read: (ids (B, T), labels (B, T), state or None) → (log-probabilities (B, T, V), memory per layer (B, M, D), state).
        ids: (S, B, T).
        labels: (S, B, T).

    Returns:
        The tensors listed at the top of this file.
    """
    tensors = {"ids": ids, "labels": labels}
    log_probs, nats, state = [], [], None
    for segment in range(len(ids)):
        said, memory, state = read(ids[segment], labels[segment], state)
        log_probs.append(said)
        nats.append(-said.gather(-1, labels[segment][..., None]).squeeze(-1))
        tensors.update({f"mems.{segment}.{i}": layer.detach() for i, layer in enumerate(memory)})
    model.zero_grad(set_to_none=True)
    nats[-1].sum().backward()
    tensors["log_probs"] = torch.stack(log_probs).detach()
    tensors["nats"] = torch.stack(nats).detach()
    for name, parameter in model.named_parameters():
        tensors[f"grads.{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    ones = tensors["log_probs"].exp().sum(-1)
    assert torch.allclose(ones, torch.ones_like(ones), atol=1e-5), "not a distribution"
    return tensors


@contextlib.contextmanager
def in_double(model: nn.Module, position_embedding: nn.Module | None) -> Iterator[None]:
    """Let a peer compute in float64 throughout.

    `model.double()` alone does not: the frequencies of the sinusoids were rounded to float32 when the model was built, and
    attention scores go through `.float()` before they are masked. Both would leave errors of 1e-8. So the frequencies are
    computed anew, and `.float()` leaves float64 alone.
    """
    model.double()
    if position_embedding is not None:
        width: Any = position_embedding.demb
        exponents = torch.arange(0.0, width, 2.0, dtype=torch.float64) / width
        position_embedding.inv_freq = 1 / (10000**exponents)
    to_float = torch.Tensor.float

    def keep_double(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float(tensor)

    with mock.patch.object(torch.Tensor, "float", keep_double):
        yield


@contextlib.contextmanager
def without_sources() -> Iterator[None]:
    """Let torch's old file format, which stores the source of every module class, store a placeholder of the same kind."""
    with mock.patch("torch.serialization.get_source_lines_and_file", lambda _: (["# source left out\n"], 1, "module.py")):
        yield


def aliases(model: nn.Module) -> dict[str, str]:
    """Return, for every further name of a shared parameter, its first name."""
    first: dict[int, str] = {}
    further = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            further[name] = first[id(parameter)]
    return further


def check_all_learn(tensors: dict[str, Tensor]) -> None:
    """Refuse expectations in which a parameter has no gradient: a test on them could not tell where it belongs."""
    idle = [name for name, tensor in tensors.items() if name.startswith("grads.") and not tensor.any()]
    assert not idle, f"no gradient: {idle}"


def save_expected(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    peer: str,
    hyperparameters: dict[str, Any],
    first_memory: str,
    aliases: dict[str, str],
    reading: dict[str, Any] | None = None,
) -> None:
    """Write expectations with what a reader must know about them."""
    about = {
        "peer": peer,
        "hyperparameters": hyperparameters,
        "reading": reading or {},
        "first_memory": first_memory,
        "aliases": aliases,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # a copy of each: safetensors refuses tensors that share memory
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path, {"about": json.dumps(about)}
    )


def save(model: Any, directory: Path, weights: str) -> None:
    """Write a model of Hugging Face as `save_pretrained` does, or its weights in the file format of 2019."""
    model.save_pretrained(directory, safe_serialization=weights == "safetensors")
    if weights == "legacy":
        torch.save(model.state_dict(), directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


@torch.no_grad()
def put_gradients(model: nn.Module) -> None:
    """Replace every weight by its gradient."""
    for parameter in model.parameters():
        parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def check_sizes(folder: Path) -> None:
    """Print the size of each golden and refuse files that do not belong into a repository."""
    for golden in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = [path for path in golden.rglob("*") if path.is_file()]
        for path in files:
            assert path.stat().st_size < MAX_FILE, f"{path} has {path.stat().st_size} bytes"
        print(f"{sum(path.stat().st_size for path in files):8d} bytes  {golden.name}: {len(files)} files")
