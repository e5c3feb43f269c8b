"""One checkpoint as a directory: three files of content and a manifest that vouches for every byte of them.

Layout: `model.safetensors` (weights alone, for other tools), `training.safetensors` (optimizer, memory, random states),
`state.json` (schedule, position, counters) and `manifest.json` (step, sizes, hashes), written last.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_xl.checkpoint.json_files import MAX_STATE_BYTES, decode_state, encode_state, read_sealed, seal
from transformer_xl.checkpoint.tensor_file import encode_tensors, load_tensors
from transformer_xl.errors import CheckpointError
from transformer_xl.files import FileRecord, regular_size, sync_directory, write_file

MODEL_FILE = "model.safetensors"
TRAINING_FILE = "training.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
FORMAT = 1

_CONTENT_FILES = (MODEL_FILE, TRAINING_FILE, STATE_FILE)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything needed to go on as if nothing had happened."""

    step: int  # optimizer steps done
    model: dict[str, Tensor]  # weights alone, by name
    training: dict[str, Tensor]  # optimizer, memory and random states, by flat name; may be empty
    state: dict[str, Any]  # what is not tensors: JSON scalars, lists and dicts with text keys


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a directory that must not exist, and force it to the disk.

    Raises:
        CheckpointError: something in it cannot be stored.
        OSError: the disk refuses.
    """
    directory.mkdir()
    records = {
        MODEL_FILE: write_file(directory / MODEL_FILE, encode_tensors(checkpoint.model)),
        TRAINING_FILE: write_file(directory / TRAINING_FILE, encode_tensors(checkpoint.training)),
        STATE_FILE: write_file(directory / STATE_FILE, [encode_state(checkpoint.state)]),
    }
    files = {name: asdict(record) for name, record in records.items()}
    write_file(directory / MANIFEST_FILE, [seal({"format": FORMAT, "step": checkpoint.step, "files": files})])
    sync_directory(directory)


def read_checkpoint(directory: Path, *, step: int) -> Checkpoint:
    """Verify a checkpoint directory, which must be of that step, then load it to the CPU.

    Raises:
        CheckpointError: naming the first file that is not what was written, before any tensor is allocated.
    """
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
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{str(path)!r} has format {manifest.get('format')!r} and this version reads {FORMAT}; upgrade transformer_xl"
        )
    if manifest.get("step") != step:
        raise _damaged(path, f"it is of step {manifest.get('step')!r}, not {step}")
    files = manifest.get("files")  # its names are compared with ours, never used as paths before that
    if not isinstance(files, dict) or set(files) != set(_CONTENT_FILES):
        raise _damaged(path, f"it must list {', '.join(_CONTENT_FILES)}")
    try:
        return {name: FileRecord(**files[name]) for name in _CONTENT_FILES}
    except TypeError as error:
        raise _damaged(path, "each file needs a size and a sha256") from error


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
        return decode_state(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r} is damaged: {reason}; load an earlier checkpoint or restore this one from a copy")
