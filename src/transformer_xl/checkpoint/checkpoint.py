"""One checkpoint as a directory: tensors, state, settings and tokenizer, and a manifest with the size and SHA-256 of each.

Layout: `model.safetensors` (weights alone, for other tools), `training.safetensors` (optimizer, memory, random states),
`state.json` (schedule, position, counters), `config.json` and `tokenizer.json` (of the run when it was saved), and
`manifest.json` (step, sizes, hashes), written last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_xl.errors import CheckpointError, one_line
from transformer_xl.files import canonical_json, sync_directory, write_file
from transformer_xl.manifest import MANIFEST_FILE, Manifest, encode_manifest, read_manifest
from transformer_xl.model.pretrained import CONFIG_FILE, TOKENIZER_FILE
from transformer_xl.tensor_file import encode_tensors, load_tensors
from transformer_xl.untrusted import parse_json

MODEL_FILE = "model.safetensors"
TRAINING_FILE = "training.safetensors"
STATE_FILE = "state.json"
FORMAT, FORMAT_OF_0_2 = 2, 1
"""Checkpoints of version 0.2 have no settings and no tokenizer; the directory of their run has."""

_FILES = {MODEL_FILE, TRAINING_FILE, STATE_FILE, CONFIG_FILE, TOKENIZER_FILE}
_REMEDY = "load an earlier checkpoint or restore this one from a copy"
REMEDY = f"; {_REMEDY}"
"""The end of a message about damage."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything that a run needs to continue exactly."""

    step: int  # optimizer steps done
    model: dict[str, Tensor]  # weights alone, by name
    training: dict[str, Tensor]  # optimizer, memory and random states, by flat name; may be empty
    state: dict[str, Any]  # everything else, as JSON: scalars, lists and dicts with text keys
    copies: Mapping[str, bytes] = field(default_factory=dict)  # the run's `config.json` and `tokenizer.json`


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a directory that must not exist, and force it to the disk."""
    directory.mkdir()
    content = {
        MODEL_FILE: encode_tensors(checkpoint.model),
        TRAINING_FILE: encode_tensors(checkpoint.training),
        STATE_FILE: [_encode_state(checkpoint.state)],
        **{name: [data] for name, data in checkpoint.copies.items()},
    }
    records = {name: write_file(directory / name, chunks) for name, chunks in content.items()}
    write_file(directory / MANIFEST_FILE, [encode_manifest(records, format=FORMAT, step=checkpoint.step)])
    sync_directory(directory)


def _encode_state(state: Mapping[str, Any]) -> bytes:
    """Return the state as JSON; refuse what JSON cannot hold or would change, such as tuples and keys that are no text."""
    try:
        data = canonical_json(state)
        if parse_json(data) != state:
            raise ValueError("it would come back changed; use lists, and text as keys")
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the state cannot be stored as JSON: {one_line(error)}") from None
    return data


def read_checkpoint(directory: Path, *, step: int) -> Checkpoint:
    """Load a checkpoint directory, which must be of that step, to the CPU; what is loaded has been compared with its manifest.

    Raises:
        CheckpointError: a file is not what was written (the message names it).
        OSError: a file is missing or cannot be read.
    """
    manifest = _manifest(directory, step=step)
    state = manifest.read(directory / STATE_FILE)
    model, training = (load_tensors(directory / name, manifest) for name in (MODEL_FILE, TRAINING_FILE))
    try:
        return Checkpoint(step, model, training, parse_json(state), _copies(directory, manifest))
    except ValueError as error:
        raise CheckpointError(f"'{directory / STATE_FILE}' is damaged: {one_line(error)}{REMEDY}") from None


def read_copies(directory: Path, *, step: int) -> dict[str, bytes]:
    """Return the run's settings and tokenizer from a checkpoint directory, and load nothing else; see `read_checkpoint`."""
    return _copies(directory, _manifest(directory, step=step))


def _manifest(directory: Path, *, step: int) -> Manifest:
    path = directory / MANIFEST_FILE
    manifest = read_manifest(path, needs=(MODEL_FILE, TRAINING_FILE, STATE_FILE), remedy=_REMEDY)
    version, its_step = manifest.facts.get("format"), manifest.facts.get("step")
    if version not in (FORMAT, FORMAT_OF_0_2):
        raise CheckpointError(f"'{path}' has format {version!r} and this version reads {FORMAT}; upgrade transformer_xl")
    if unknown := sorted(manifest.files.keys() - _FILES):
        raise CheckpointError(f"'{path}' is damaged: it lists {unknown[0]!r}, which is no part of a checkpoint{REMEDY}")
    if its_step != step:
        raise CheckpointError(f"'{path}' is damaged: it is of step {its_step!r}, not {step}{REMEDY}")
    return manifest


def _copies(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    return {name: manifest.read(directory / name) for name in (CONFIG_FILE, TOKENIZER_FILE) if name in manifest.files}
