"""One checkpoint as a directory: tensors, state, settings and tokenizer, and a manifest with the size and SHA-256 of each.

Layout: `model.safetensors` (weights alone, for other tools), `training.safetensors` (optimizer, memory, random states),
`state.json` (schedule, position, counters), `config.json` and `tokenizer.json` (of the run when it was saved), and
`manifest.json` (step, sizes, hashes), written last.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.errors import CheckpointError, one_line
from transformer_xl.files import canonical_json, regular_size, sync_directory, write_file
from transformer_xl.manifest import MANIFEST_FILE, Manifest, encode_manifest, parse_manifest
from transformer_xl.model.directory import CONFIG_FILE, TOKENIZER_FILE
from transformer_xl.untrusted import MAX_SETTINGS_BYTES, parse_json

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "model.safetensors"
TRAINING_FILE = "training.safetensors"
STATE_FILE = "state.json"
FORMAT, FORMAT_OF_0_2 = 2, 1
"""Checkpoints of version 0.2 have no settings and no tokenizer; the directory of their run has."""

_CONTENT_FILES = (MODEL_FILE, TRAINING_FILE, STATE_FILE)
_COPIES = (CONFIG_FILE, TOKENIZER_FILE)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything that a run needs to continue exactly."""

    step: int  # optimizer steps done
    model: "dict[str, Tensor]"  # weights alone, by name
    training: "dict[str, Tensor]"  # optimizer, memory and random states, by flat name; may be empty
    state: dict[str, Any]  # everything else, as JSON: scalars, lists and dicts with text keys
    copies: Mapping[str, bytes] = field(default_factory=dict)  # the run's `config.json` and `tokenizer.json`


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a directory that must not exist, and force it to the disk.

    Raises:
        CheckpointError: something in it cannot be stored.
        OSError: it cannot be written.
    """
    from transformer_xl.tensor_file import encode_tensors

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


def read_checkpoint(directory: Path, *, step: int) -> Checkpoint:
    """Load a checkpoint directory, which must be of that step, to the CPU; what is loaded has been compared with its manifest.

    Raises:
        CheckpointError: a file is not what was written (the message names it).
    """
    from transformer_xl.tensor_file import load_tensors

    with _readable(directory):
        manifest = _read_manifest(directory, step=step)
        copies = _read_copies(directory, manifest)
        state = _read_state(directory / STATE_FILE, manifest)
        model, training = (load_tensors(directory / name, manifest) for name in (MODEL_FILE, TRAINING_FILE))
    return Checkpoint(step, model, training, state, copies)


def read_copies(directory: Path, *, step: int) -> dict[str, bytes]:
    """Return the run's settings and tokenizer from a checkpoint directory, and load nothing else; see `read_checkpoint`."""
    with _readable(directory):
        return _read_copies(directory, _read_manifest(directory, step=step))


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        path, reason = str(error.filename or directory), error.strerror or str(error)
        raise CheckpointError(f"{path!r} cannot be read ({reason}); check the disk and the permissions") from error


def _read_manifest(directory: Path, *, step: int) -> Manifest:
    """Read the manifest, and compare names and sizes of all files with it."""
    if directory.is_symlink():
        raise _damaged(directory, "it is a symbolic link, not a directory")
    names = {path.name for path in directory.iterdir()}
    if missing := sorted({*_CONTENT_FILES, MANIFEST_FILE} - names):
        raise _damaged(directory, f"{', '.join(missing)} missing")
    path = directory / MANIFEST_FILE
    try:
        if (size := regular_size(path)) > MAX_SETTINGS_BYTES:
            raise ValueError(f"it has {size:,} bytes")
        manifest = parse_manifest(path.read_bytes(), remedy=_REMEDY)
    except ValueError as error:
        raise _damaged(path, one_line(error)) from error
    format_, its_step = manifest.facts.get("format"), manifest.facts.get("step")
    if not (_is(format_, FORMAT) or _is(format_, FORMAT_OF_0_2)):
        raise CheckpointError(f"{str(path)!r} has format {format_!r} and this version reads {FORMAT}; upgrade transformer_xl")
    if not _is(its_step, step):
        raise _damaged(path, f"it is of step {its_step!r}, not {step}")
    listed = set(manifest.files)  # names in it are never used as paths unless they are ours
    if not set(_CONTENT_FILES) <= listed <= {*_CONTENT_FILES, *_COPIES}:
        raise _damaged(path, f"it must list {', '.join(_CONTENT_FILES)}")
    if extra := sorted(names - listed - {MANIFEST_FILE}):
        raise _damaged(directory, f"it holds {extra[0]!r}, which is not part of a checkpoint")
    for name, record in manifest.files.items():
        _check_size(directory / name, record.size)
    return manifest


def _is(value: object, number: int) -> bool:
    """Return whether a value is this integer, not true or 1.0, which are equal to 1."""
    return type(value) is int and value == number


def _check_size(path: Path, written: object) -> None:
    try:
        size = regular_size(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if size != written:
        raise _damaged(path, f"it has {size} bytes and {written} were written ({MANIFEST_FILE})")


def _read_copies(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    return {name: manifest.read(directory / name) for name in _COPIES if name in manifest.files}


def _read_state(path: Path, manifest: Manifest) -> dict[str, Any]:
    data = manifest.read(path)
    try:
        state = parse_json(data)
        if not isinstance(state, dict):
            raise ValueError("it holds no JSON object")
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return state


_REMEDY = "load an earlier checkpoint or restore this one from a copy"
REMEDY = f"; {_REMEDY}"
"""The end of a message about damage."""


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r} is damaged: {reason}{REMEDY}")


def _encode_state(state: dict[str, Any]) -> bytes:
    """Serialize the state; refuse values that JSON cannot hold or would silently change (tuples, number keys)."""
    try:
        _check_json(state, "state")
        return canonical_json(state)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; a list that contains itself
        raise CheckpointError(f"state cannot be stored: {one_line(error)}; keep to small, plain values") from error


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}, and JSON keys are text; write it as {str(key)!r}")
            _check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(f"{where} is {value}, which JSON cannot hold; store None or a finite number")
    elif value is not None and not isinstance(value, str | int):
        raise CheckpointError(f"{where} is a {type(value).__name__}, which JSON cannot hold; use a list, number or text")
