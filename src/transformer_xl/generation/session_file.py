"""Sessions: what rows of a decoder have read, as one safetensors file that gives the same next numbers, to the last bit.

The file stores only the positions that a later token can see. Its metadata say to which model and decoder the session belongs.

Tensors of several rows are joined: keys and values along their positions, the others along a first axis of rows.

Shapes: D d_model, n positions that a row remembers, X heads, Y numbers per head and position.
"""

import hashlib
import os
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError
from transformer_xl.files import STRAY_SUFFIX, canonical_json, whole_file
from transformer_xl.model.base import SequenceModel
from transformer_xl.reading.stream import check_like, check_names
from transformer_xl.tensor_file import TensorFile, TensorSpec, encode_lazily, encode_tensors
from transformer_xl.untrusted import parse_json

FORMAT = "transformer_xl session"
VERSION = 3
_ABOUT = "transformer_xl.session"
"""Name of the metadata, which are JSON."""

LAST = "last"
"""Name of the hidden state (D,) from which the scores of a row's next token are computed."""

_MISSING = object()


@dataclass(frozen=True)
class RowState:
    """What one row of a decoder has read; any row of a decoder with the same model and settings can go on from it."""

    tensors: dict[str, Tensor]  # of the stream (`Stream.take`), and `last`, its last hidden state
    terms: dict[str, Any]  # settings of the decoder; JSON
    model: str  # `model_sha256` of the decoder's model


class Origin(NamedTuple):
    """What has read a row: `model_sha256` of a decoder's model, and the decoder's settings, which are JSON."""

    model: str
    terms: Mapping[str, Any]


def check_origin(there: Origin, here: Origin) -> None:
    """Refuse, with a ValueError, what another model has read, or a decoder with other settings."""
    if there.model != here.model:
        hashes = f"{_quoted(there.model[:12])} there, {here.model[:12]!r} here"
        raise ValueError(f"it was read by another model ({hashes}: SHA-256 of configuration and weights)")
    if different := [name for name in here.terms if there.terms.get(name, _MISSING) != here.terms[name]]:
        values = (f"{name} ({_quoted(there.terms.get(name))} there, {here.terms[name]!r} here)" for name in different)
        raise ValueError(f"it is of another decoder: {', '.join(values)}")


@dataclass(frozen=True)
class SessionFormat:
    """Writes and reads the files of a decoder's rows. It does not look at what the rows hold now, so any thread may use it."""

    own: RowState  # the state of an empty row
    by_position: Collection[str]  # see `Stream.by_position`
    check: Callable[[dict[str, Tensor]], object]  # raises a ValueError for tensors that cannot be the state of a row

    def save(self, path: str | Path, rows: Sequence[RowState], *, note: Mapping[str, str] | None = None) -> None:
        """Write what one or more rows have read to one file; see `Decoder.save`."""
        path, note = Path(path), dict(note or {})
        if not _is_note(note):
            raise CheckpointError(f"note {note!r} must map text to text; write numbers as text")
        content = {"format": FORMAT, "version": VERSION, "decoder": rows[0].terms, "note": note}
        about = canonical_json(content | {"model": rows[0].model}).decode()
        name = f".{path.name}.session{STRAY_SUFFIX}"  # no user's file has it
        with whole_file(path, name) as stray, stray.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)  # a text is for its owner alone
            for chunk in _encode(rows, about, self.by_position):
                file.write(chunk)

    def load(self, path: str | Path) -> tuple[list[RowState], dict[str, str]]:
        """Return the rows of a file, on the CPU, and its note; see `Decoder.load`."""
        path = Path(path)
        file, about = _open_session(path)
        try:
            check_origin(Origin(about["model"], about["decoder"]), Origin(self.own.model, self.own.terms))
            check_names(file.tensors, self.own.tensors)
            tensors = file.load()
            rows = [RowState(row, self.own.terms, self.own.model) for row in _unpack(tensors, self.own, self.by_position)]
            for row in rows:
                self.check(row.tensors)
            return rows, about["note"]
        except ValueError as error:
            raise CheckpointError(
                f"session {str(path)!r} does not fit: {error}; open another decoder, or start anew"
            ) from error


def describe_session(path: Path) -> dict[str, Any]:
    """Return what a file says: `model`, a hash, `decoder`, how that was opened, and `note`.

    A valid file may say anything; only the types are certain. A CheckpointError says in one line why it is not a session.
    """
    return _open_session(Path(path))[1]


def model_sha256(model: SequenceModel) -> str:
    """Return the SHA-256 of a model's configuration and of the names, types, shapes and bytes of its weights.

    It takes about a second per gigabyte, so it is computed only once for each view of a model. A decoder has its own view, and
    weights do not change while it is in use.
    """
    if model not in _HASHES:
        # defaults are left out, so that a session outlives options that are added later
        digest = hashlib.sha256(canonical_json(model.config.model_dump(mode="json", exclude_defaults=True)))
        for chunk in encode_tensors(model.state_dict()):
            digest.update(chunk)
        _HASHES[model] = digest.hexdigest()
    return _HASHES[model]


_HASHES: WeakKeyDictionary[SequenceModel, str] = WeakKeyDictionary()


# --- writing ---------------------------------------------------------------------------------------------------------------


def _encode(rows: Sequence[RowState], about: str, by_position: Collection[str]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a session's file, joining the rows one tensor at a time."""
    content: dict[str, TensorSpec] = {}
    for name, first in rows[0].tensors.items():
        shape = (len(rows), *first.shape)
        if name in by_position:
            shape = (first.shape[0], sum(row.tensors[name].shape[1] for row in rows), first.shape[2])
        content[name] = TensorSpec(first.dtype, shape)

    def load(name: str) -> Tensor:
        parts = [row.tensors[name] for row in rows]
        return torch.cat(parts, dim=1) if name in by_position else torch.stack(parts)

    return encode_lazily(content, load, {_ABOUT: about})


# --- reading ---------------------------------------------------------------------------------------------------------------


def _open_session(path: Path) -> tuple[TensorFile, dict[str, Any]]:
    """Return a session's file, and what it says."""
    file = TensorFile(path)
    return file, _decode_about(path, file.metadata.get(_ABOUT, ""))


def _quoted(value: object) -> str:
    """Return a value of a file as a short line without control characters."""
    short = reprlib.Repr()
    short.maxlevel = 1
    return short.repr(value)


def _decode_about(path: Path, about: str) -> dict[str, Any]:
    content: Any = None
    with suppress(ValueError):
        content = parse_json(about.encode())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{str(path)!r} is not a session file; give a file that decoder.save wrote (since 0.3)")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"session {str(path)!r} has version {_quoted(content.get('version'))} and this program reads {VERSION}; "
            "upgrade transformer_xl, or start anew"
        )
    model, decoder, note = (content.get(name) for name in ("model", "decoder", "note"))
    if not (isinstance(model, str) and isinstance(decoder, dict) and _is_note(note)):
        raise CheckpointError(f"session {str(path)!r} does not say what it belongs to; start anew")
    return content


def _is_note(note: object) -> bool:
    return isinstance(note, dict) and all(isinstance(text, str) for item in note.items() for text in item)


def _unpack(tensors: dict[str, Tensor], own: RowState, by_position: Collection[str]) -> list[dict[str, Tensor]]:
    """Return the tensors of each row; ValueError if their names, types or shapes are not those of our own row."""
    check_names(tensors, own.tensors)
    n_row = len(tensors[LAST]) if tensors[LAST].dim() else 0
    for name in own.tensors.keys() - by_position:
        check_like(name, tensors[name], own.tensors[name].dtype, (n_row, *own.tensors[name].shape))
    n_kept = tensors["n_valid"].tolist() if by_position else []
    if not all(0 <= n <= own.terms["mem_len"] for n in n_kept):
        raise ValueError("its rows have impossible lengths")
    for name in by_position:
        n_head, _, d_head = own.tensors[name].shape
        check_like(name, tensors[name], own.tensors[name].dtype, (n_head, sum(n_kept), d_head))
    parts = {name: x.split(n_kept, dim=1) if name in by_position else x.unbind() for name, x in tensors.items()}
    return [{name: of_rows[row] for name, of_rows in parts.items()} for row in range(n_row)]
