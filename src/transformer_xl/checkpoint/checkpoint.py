"""One checkpoint as a directory: three files of content, and a manifest with the size and SHA-256 of each.

Layout: `model.safetensors` (weights alone, for other tools), `training.safetensors` (optimizer, memory, random states),
`state.json` (schedule, position, counters) and `manifest.json` (step, sizes, hashes), written last.

The manifest is a sealed JSON file: it contains its own checksum, and only one spelling of it is accepted, so any change to its
bytes is found.
"""

import hashlib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.errors import CheckpointError, one_line
from transformer_xl.files import FileRecord, canonical_json, regular_size, sync_directory, write_file
from transformer_xl.seals import read_sealed, seal
from transformer_xl.untrusted import parse_json

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "model.safetensors"
TRAINING_FILE = "training.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
FORMAT = 1
MAX_STATE_BYTES = 16 * 2**20

_MAX_STATE_PARTS = 2**20

_CONTENT_FILES = (MODEL_FILE, TRAINING_FILE, STATE_FILE)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything that a run needs to continue exactly."""

    step: int  # optimizer steps done
    model: "dict[str, Tensor]"  # weights alone, by name
    training: "dict[str, Tensor]"  # optimizer, memory and random states, by flat name; may be empty
    state: dict[str, Any]  # everything else, as JSON: scalars, lists and dicts with text keys


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a directory that must not exist, and force it to the disk.

    Raises:
        CheckpointError: something in it cannot be stored.
        OSError: it cannot be written.
    """
    from transformer_xl.tensor_file import encode_tensors

    directory.mkdir()
    records = {
        MODEL_FILE: write_file(directory / MODEL_FILE, encode_tensors(checkpoint.model)),
        TRAINING_FILE: write_file(directory / TRAINING_FILE, encode_tensors(checkpoint.training)),
        STATE_FILE: write_file(directory / STATE_FILE, [_encode_state(checkpoint.state)]),
    }
    files = {name: asdict(record) for name, record in records.items()}
    write_file(directory / MANIFEST_FILE, [seal({"format": FORMAT, "step": checkpoint.step, "files": files})])
    sync_directory(directory)


def read_checkpoint(directory: Path, *, step: int) -> Checkpoint:
    """Verify a checkpoint directory, which must be of that step, then load it to the CPU.

    Raises:
        CheckpointError: a file is not what was written (the message names it); no tensor is allocated then.
    """
    from transformer_xl.tensor_file import load_tensors

    try:
        _check_names(directory)
        for name, record in _read_manifest(directory / MANIFEST_FILE, step=step).items():
            _check_content(directory / name, record)
        model = load_tensors(directory / MODEL_FILE)
        training = load_tensors(directory / TRAINING_FILE)
        state = _read_state(directory / STATE_FILE)
    except OSError as error:
        path, reason = str(error.filename or directory), error.strerror or str(error)
        raise CheckpointError(f"{path!r} cannot be read ({reason}); check the disk and the permissions") from error
    return Checkpoint(step=step, model=model, training=training, state=state)


def _check_names(directory: Path) -> None:
    if directory.is_symlink():
        raise _damaged(directory, "it is a symbolic link, not a directory")
    names = {path.name for path in directory.iterdir()}
    expected = {*_CONTENT_FILES, MANIFEST_FILE}
    if missing := sorted(expected - names):
        raise _damaged(directory, f"{', '.join(missing)} missing")
    if extra := sorted(names - expected):
        raise _damaged(directory, f"it holds {extra[0]!r}, which is not part of a checkpoint")


def _read_manifest(path: Path, *, step: int) -> dict[str, FileRecord]:
    try:
        manifest = read_sealed(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not _is(manifest.get("format"), FORMAT):
        raise CheckpointError(
            f"{str(path)!r} has format {manifest.get('format')!r} and this version reads {FORMAT}; upgrade transformer_xl"
        )
    if not _is(manifest.get("step"), step):
        raise _damaged(path, f"it is of step {manifest.get('step')!r}, not {step}")
    files = manifest.get("files")  # names in it are never used as paths unless they are ours
    if not isinstance(files, dict) or set(files) != set(_CONTENT_FILES):
        raise _damaged(path, f"it must list {', '.join(_CONTENT_FILES)}")
    try:
        return {name: FileRecord(**files[name]) for name in _CONTENT_FILES}
    except TypeError as error:
        raise _damaged(path, "each file needs a size and a sha256") from error


def _is(value: object, number: int) -> bool:
    """Return whether a value is this integer, not true or 1.0, which are equal to 1."""
    return type(value) is int and value == number


def _check_content(path: Path, record: FileRecord) -> None:
    try:
        size = regular_size(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if size != record.size:
        raise _damaged(path, f"it has {size} bytes and {record.size} were written")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != record.sha256:
        raise _damaged(path, f"its sha256 is {digest[:12]}… and {str(record.sha256)[:12]}… was written")


def _read_state(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_STATE_BYTES:
        raise _damaged(path, f"it has more than {MAX_STATE_BYTES} bytes")
    try:
        state = parse_json(path.read_bytes(), most_parts=_MAX_STATE_PARTS)
        if not isinstance(state, dict):
            raise ValueError("it holds no JSON object")
        _check_json(state, "state")
    except (ValueError, CheckpointError) as error:
        raise _damaged(path, str(error)) from error
    return state


REMEDY = "; load an earlier checkpoint or restore this one from a copy"
"""The end of a message about damage."""


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r} is damaged: {reason}{REMEDY}")


def _encode_state(state: dict[str, Any]) -> bytes:
    """Serialize the state; refuse values that JSON cannot hold or would silently change (tuples, number keys)."""
    try:
        _check_json(state, "state")
        data = canonical_json(state)
        if len(data) <= MAX_STATE_BYTES:
            parse_json(data, most_parts=_MAX_STATE_PARTS)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; a list that contains itself
        raise CheckpointError(f"state cannot be stored: {one_line(error)}; keep to small, plain values") from error
    if len(data) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"state takes {len(data)} bytes as JSON, more than {MAX_STATE_BYTES}; put arrays into `training` as tensors"
        )
    return data


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
