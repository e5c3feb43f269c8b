"""The manifest of a checkpoint or a saved model: the size and SHA-256 of its files, so that no bit changes unnoticed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformer_xl.errors import CheckpointError
from transformer_xl.files import FileRecord, canonical_json
from transformer_xl.untrusted import parse_json, read_small

MANIFEST_FILE = "manifest.json"

MAX_READ_BYTES = 2**28
"""The largest file that is read whole: a tokenizer of a million words is smaller."""


@dataclass(frozen=True)
class Manifest:
    """What the files of a directory must be.

    Attributes:
        files: by name.
        facts: what else it says.
        remedy: what to do about a file that is another.
    """

    files: Mapping[str, FileRecord]
    facts: Mapping[str, Any]
    remedy: str

    def check(self, path: Path, digest: str) -> None:
        """Compare the SHA-256 of bytes that were read with that of the file they come from; others are not compared.

        Raises:
            CheckpointError: it is another.
        """
        record = self.files.get(path.name)
        if record and record.sha256 != digest:
            raise CheckpointError(
                f"'{path}' is damaged: its sha256 is {digest[:12]}… and {str(record.sha256)[:12]}… was written "
                f"({MANIFEST_FILE}); {self.remedy}"
            )

    def read(self, path: Path) -> bytes:
        """Return the content of a small file, after comparing it."""
        data = read_small(path, most_bytes=MAX_READ_BYTES)
        self.check(path, sha256(data).hexdigest())
        return data


def encode_manifest(files: Mapping[str, FileRecord], **facts: Any) -> bytes:
    """Return the content of a manifest of files, by name, and of other facts."""
    return canonical_json({**facts, "files": {name: asdict(record) for name, record in files.items()}})


def parse_manifest(data: bytes, *, remedy: str) -> Manifest:
    """Return what a manifest says.

    Raises:
        ValueError: it is none.
    """
    facts = parse_json(data)
    files = facts.pop("files", None) if isinstance(facts, dict) else None
    if not isinstance(files, dict):
        raise ValueError("it lists no files")
    try:
        return Manifest({name: FileRecord(**record) for name, record in files.items()}, facts, remedy)
    except TypeError:
        raise ValueError("each file needs a size and a sha256") from None
