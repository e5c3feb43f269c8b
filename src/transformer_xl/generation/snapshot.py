"""Sessions: what a decoder has read, as one safetensors file that gives the same next numbers, to the last bit.

Of the ring buffers only the positions that a later token can see are stored; the rest loads as zeros, which nothing attends to.
The tensor `about` is JSON that says which model and which decoder a session belongs to. The last 32 bytes, the tensor `sha256`,
are the hash of all bytes before them, so that nothing in a file is parsed, let alone taken over, before all of it is verified.

Shapes: B rows, C slots, S stored positions of all rows together, X heads (or 1), Y numbers per head and position.
"""

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from transformer_xl.checkpoint.json_files import canonical
from transformer_xl.checkpoint.tensor_file import MAX_HEADER_BYTES, encode_lazily, encode_tensors, load_tensors
from transformer_xl.errors import CheckpointError
from transformer_xl.files import STRAY_SUFFIX, regular_size, sync_directory, write_file
from transformer_xl.model.language_model import LanguageModel

FORMAT = "transformer_xl session"
VERSION = 1
MAX_ABOUT_BYTES = 2**20
"""A note is a remark, such as the tokenizer's name; long text belongs into a file of its own."""

_ABOUT, _CHECKSUM = "about", "sha256"
_CHECKSUM_BYTES = 32
_CHUNK_BYTES = 2**20

_RINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "keys": lambda keys_NBCH: keys_NBCH,
    "values": lambda values_NBHC: values_NBHC.transpose(2, 3),
    "hidden": lambda hidden_BMD: hidden_BMD.unsqueeze(0),
}
"""By the first part of a tensor's name, a view (X, B, C, Y) of it."""

_OPENED_WITH = ("batch_size", "mem_len", "tgt_len", "precision")
_READ_WITH = ("clamp_len", "same_length", "ext_len")


@dataclass(frozen=True)
class Session:
    """What a decoder has read, and what the numbers depend on besides it.

    Attributes:
        state: of the streams, by name, with `n_valid` and the rings; and any other tensors.
        model: that reads, with the memory it is read with.
        tgt_len: longest piece read at once.
        precision: of weights and memory.
    """

    state: dict[str, Tensor]
    model: LanguageModel
    tgt_len: int
    precision: str

    @property
    def n_slot(self) -> int:
        """C, places per row."""
        return next(ring.shape[2] for ring in self.rings().values())

    def rings(self) -> dict[str, Tensor]:
        """Return views (X, B, C, Y) of the tensors that hold past positions."""
        return {name: _RINGS[kind](x) for name, x in self.state.items() if (kind := name.partition(".")[0]) in _RINGS}

    def terms(self) -> dict[str, Any]:
        """Return what must be equal where the session goes on; JSON."""
        return {
            "batch_size": self.state["n_valid"].shape[0],
            "mem_len": self.model.mem_len,
            "tgt_len": self.tgt_len,
            "precision": self.precision,
            "clamp_len": self.model.clamp_len,
            "same_length": self.model.same_length,
            "ext_len": self.model.ext_len,
            "window": self.model.window,
            "n_slot": self.n_slot,
        }


def save_session(path: Path, session: Session, *, note: Mapping[str, str]) -> None:
    """Write a session; see `Decoder.save`."""
    path = Path(path)
    about = canonical(_about(session, note))
    if len(about) > MAX_ABOUT_BYTES:
        raise CheckpointError(f"the note takes {len(about)} bytes and {MAX_ABOUT_BYTES} is the most; shorten it")
    stray = path.with_name(f".{path.name}.session{STRAY_SUFFIX}")  # beside files of a user, none of which may have this name
    kept = ", an earlier one is intact" if os.path.lexists(path) else ""
    with _explained(f"session {str(path)!r} cannot be saved{kept}", "free disk space or save elsewhere"):
        _check_replaceable(path)
        try:
            stray.unlink(missing_ok=True)
            write_file(stray, _encode(session, about))
            stray.replace(path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to report; the next save removes what is left
                stray.unlink(missing_ok=True)
            raise
    with _explained(f"session {str(path)!r} is saved, but the disk does not confirm its name", "check the disk"):
        sync_directory(path.parent)


def load_session(path: Path, own: Session) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Verify a file and read it; see `Decoder.load`.

    Args:
        path: what `save_session` wrote.
        own: the session that would be replaced; it is not touched.

    Returns:
        The state, on the CPU, and the note.

    Raises:
        CheckpointError: in one line, why the file cannot take the place of `own`.
    """
    about, tensors = _open_session(Path(path))
    _check_origin(path, about, own)
    try:
        return _unpack(tensors, own), about["note"]
    except ValueError as error:
        raise CheckpointError(f"session {str(path)!r} does not hold what it says: {error}; start anew") from error


def describe_session(path: Path) -> dict[str, Any]:
    """Verify a file as `load_session` does, and return what it says of itself.

    The hash is one that anybody can compute: a sound file may still say anything, of which only the types are certain.

    Returns:
        `model`, a hash; `decoder`, how it was opened; `note`, of text.

    Raises:
        CheckpointError: in one line, why the file is no session.
    """
    return _open_session(Path(path))[0]


def model_sha256(model: LanguageModel) -> str:
    """Return the SHA-256 of a model's configuration, and of the names, types, shapes and bytes of its weights.

    It is computed once for each view of a model: a decoder has one of its own, and weights do not change while it is in use.
    It takes about a second per gigabyte.
    """
    if model not in _HASHES:
        # defaults are left out, so that a session outlives options that are added later
        digest = hashlib.sha256(canonical(model.config.model_dump(mode="json", exclude_defaults=True)))
        for chunk in encode_tensors(model.state_dict()):
            digest.update(chunk)
        _HASHES[model] = digest.hexdigest()
    return _HASHES[model]


_HASHES: WeakKeyDictionary[LanguageModel, str] = WeakKeyDictionary()


# --- writing ---------------------------------------------------------------------------------------------------------------


def _about(session: Session, note: Mapping[str, str]) -> dict[str, Any]:
    if not _is_note(dict(note)):
        raise CheckpointError(f"note {note!r} must map text to text; write numbers as text")
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model_sha256(session.model),
        "decoder": session.terms(),
        "note": dict(note),
    }


def _is_note(note: object) -> bool:
    return isinstance(note, dict) and all(isinstance(text, str) for item in note.items() for text in item)


def _encode(session: Session, about: bytes) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a session's file; one layer of one ring at a time is copied."""
    n_kept_B = _n_kept(session)
    row_S, slot_S = _places(session, n_kept_B)
    rings = session.rings()
    plain = {name: x for name, x in session.state.items() if name not in rings}
    plain |= {"n_valid": n_kept_B, _ABOUT: torch.frombuffer(bytearray(about), dtype=torch.uint8)}
    content = {name: (x.dtype, x.shape) for name, x in plain.items()}
    content |= {name: (ring.dtype, _packed_shape(ring, len(row_S))) for name, ring in rings.items()}
    content[_CHECKSUM] = (torch.uint8, torch.Size([_CHECKSUM_BYTES]))
    digest = hashlib.sha256()

    def load(name: str) -> Tensor:
        if name == _CHECKSUM:  # narrow types come last, then names count: all other bytes have been hashed by now
            return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        if name in plain:
            return plain[name]
        device = rings[name].device
        return rings[name][:, row_S.to(device), slot_S.to(device)]

    for chunk in encode_lazily(content, load):
        digest.update(chunk)
        yield chunk


def _check_replaceable(path: Path) -> None:
    """Refuse to put a file where something else is: a rename would replace even a device."""
    try:
        regular_size(path)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise CheckpointError(f"session {str(path)!r} cannot be saved: {error}; choose another path") from error


# --- the place of positions in the rings -----------------------------------------------------------------------------------


def _n_kept(session: Session) -> Tensor:
    """Return how many positions of each row a later token can see, int64 (B,)."""
    return session.state["n_valid"].cpu().clamp(max=session.model.mem_len)


def _places(session: Session, n_kept_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and slot of each stored position, int64 (S,): row by row, the oldest first."""
    n_slot = session.n_slot
    end_B = session.state["end"].cpu() if "end" in session.state else torch.full_like(n_kept_B, n_slot)
    row_S = torch.repeat_interleave(torch.arange(len(n_kept_B)), n_kept_B)
    before_B = n_kept_B.cumsum(0) - n_kept_B
    position_S = (end_B - n_kept_B - before_B)[row_S] + torch.arange(len(row_S))
    return row_S, position_S % max(n_slot, 1)


def _packed_shape(ring_XBCY: Tensor, n_stored: int) -> torch.Size:
    return torch.Size([ring_XBCY.shape[0], n_stored, ring_XBCY.shape[3]])


# --- reading ---------------------------------------------------------------------------------------------------------------


def _open_session(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return `about` and the tensors of the state."""
    with _explained(f"session {str(path)!r} cannot be read", "check the path and the permissions"):
        tensors = _read_verified(path)
    return _decode_about(path, tensors), tensors


def _read_verified(path: Path) -> dict[str, Tensor]:
    try:
        size = regular_size(path)
        before = path.lstat()
        _check_hash(path, size)
        tensors = _load(path)
        after = path.lstat()
    except ValueError as error:
        raise CheckpointError(f"session {str(path)!r} is damaged or no session: {error}; load another or start anew") from error
    if (before.st_ino, before.st_mtime_ns, size) != (after.st_ino, after.st_mtime_ns, after.st_size):
        raise CheckpointError(f"session {str(path)!r} was replaced while it was read; load it again")
    return tensors


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(path)
    except CheckpointError as error:  # what it complains of may be quoted from the file
        whole = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error))
        raise CheckpointError(whole[: len(repr(str(path))) + _MOST_QUOTED]) from error


_MOST_QUOTED = 200
"""Characters of a complaint that fit on a screen."""


def _quoted(value: object) -> str:
    """Return what a file says, whatever it says, as a short line without control characters."""
    short = reprlib.Repr()
    short.maxlevel = 1
    return short.repr(value)


def _check_hash(path: Path, size: int) -> None:
    """Compare the last bytes of a file with the hash of all bytes before them."""
    digest, left = hashlib.sha256(), size - _CHECKSUM_BYTES
    with path.open("rb") as file:
        if not 0 < int.from_bytes(file.read(8), "little") <= min(size, MAX_HEADER_BYTES):
            raise ValueError("it does not begin as a safetensors file does")
        file.seek(0)
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        if file.read(_CHECKSUM_BYTES + 1) != digest.digest():
            raise ValueError(f"its last {_CHECKSUM_BYTES} bytes are not the SHA-256 of those before them")


def _decode_about(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Take `about` out of the tensors; a session of this version."""
    about, checksum = tensors.pop(_ABOUT, None), tensors.pop(_CHECKSUM, None)
    content: Any = None
    if about is not None and checksum is not None and about.dtype == torch.uint8 and about.numel() <= MAX_ABOUT_BYTES:
        with suppress(ValueError, RecursionError):
            content = json.loads(about.numpy().tobytes())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{str(path)!r} is no session; give a file that decoder.save wrote")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"session {str(path)!r} has version {_quoted(content.get('version'))} and this program reads {VERSION}; "
            "upgrade transformer_xl, or start anew"
        )
    model, decoder, note = (content.get(name) for name in ("model", "decoder", "note"))
    is_hash = isinstance(model, str) and re.fullmatch("[0-9a-f]{64}", model)
    if not (is_hash and isinstance(decoder, dict) and _is_note(note)):
        raise CheckpointError(f"session {str(path)!r} does not say what it belongs to; start anew")
    return content


def _check_origin(path: Path, about: dict[str, Any], own: Session) -> None:
    theirs, ours = about["decoder"], own.terms()
    model = model_sha256(own.model)
    if about["model"] != model:
        raise CheckpointError(
            f"session {str(path)!r} was read by the model {about['model'][:12]}… and this one is {model[:12]}… "
            "(SHA-256 of configuration and weights); load the model it was saved with, or start anew"
        )
    different = [name for name in ours if theirs.get(name, _MISSING) != ours[name]]
    if different:
        values = ", ".join(f"{name} ({_quoted(theirs.get(name))} there, {ours[name]!r} here)" for name in different)
        raise CheckpointError(f"session {str(path)!r} is of another decoder: {values}; {_remedy(theirs, different)}")


_MISSING = object()


def _remedy(theirs: dict[str, Any], different: list[str]) -> str:
    """Say how to open a decoder that can take a session over."""
    for names, open_it in ((_OPENED_WITH, "open it with Decoder(model, {})"), (_READ_WITH, "use model.with_context({})")):
        settings = [f"{name}={_quoted(theirs.get(name))}" for name in names if name in different]
        if settings:
            return open_it.format(", ".join(settings))
    return "read the text again"


def _unpack(tensors: dict[str, Tensor], own: Session) -> dict[str, Tensor]:
    """Return the state that was stored, in tensors of the shape of `own`; ValueError if they are not of such a state."""
    rings = own.rings()
    if tensors.keys() != own.state.keys():
        raise ValueError(f"tensors {_quoted(sorted(tensors.keys() ^ own.state.keys())[:3])} are missing or unknown")
    for name in own.state.keys() - rings.keys():
        _check_like(name, tensors[name], own.state[name].dtype, own.state[name].shape)
    n_kept_B = tensors["n_valid"]
    _check_counters(tensors, own)
    # what is loaded shares one buffer, as large as the file, in which nothing is aligned
    state = {
        name: torch.zeros(x.shape, dtype=x.dtype) if name in rings else tensors[name].clone() for name, x in own.state.items()
    }
    new = Session(state, own.model, own.tgt_len, own.precision)
    row_S, slot_S = _places(new, n_kept_B)
    for name, ring in new.rings().items():
        _check_like(name, tensors[name], ring.dtype, _packed_shape(ring, len(row_S)))
        ring[:, row_S, slot_S] = tensors[name]
    return state


def _check_counters(tensors: dict[str, Tensor], own: Session) -> None:
    """Refuse numbers that no decoder counts to; they would become indices."""
    n_valid, end, open_ids = tensors["n_valid"], tensors.get("end"), tensors.get("open")
    if (n_valid < 0).any() or (n_valid > own.n_slot).any() or (end is not None and (end < 0).any()):
        raise ValueError("its rows have impossible lengths")
    if open_ids is not None and ((open_ids < -1) | (open_ids >= (own.model.config.vocab_size or 0))).any():
        raise ValueError("it has token ids outside the vocabulary")


def _check_like(name: str, x: Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
    if x.dtype != dtype or x.shape != shape:
        raise ValueError(f"tensor {name!r} is {x.dtype} {_quoted(tuple(x.shape))} and should be {dtype} {tuple(shape)}")


@contextmanager
def _explained(what: str, remedy: str) -> Iterator[None]:
    """Turn what the operating system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} ({error.strerror or error}); {remedy}") from error
