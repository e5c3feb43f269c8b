"""The manifest of a checkpoint or a saved model: the size and SHA-256 of its files, so that no bit changes unnoticed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformer_xl.errors import CheckpointError, one_line
from transformer_xl.files import FileRecord, canonical_json
from transformer_xl.untrusted import parse_json

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What the files of a directory must be."""

    files: Mapping[str, FileRecord]  # by name
    facts: Mapping[str, Any]  # what else it says
    remedy: str  # what to do about a file that is another

    def check(self, path: Path, digest: str) -> None:
        """Compare a file, whose bytes have this SHA-256, with what was written; a file that is not listed is not compared."""
        record = self.files.get(path.name)
        if record is None or record == FileRecord(path.stat().st_size, digest):
            return
        what = f"its sha256 is {digest[:12]}… and {str(record.sha256)[:12]}… was written"
        if record.sha256 == digest:
            what = f"it has {path.stat().st_size} bytes and {record.size} were written"
        raise CheckpointError(f"'{path}' is damaged: {what} ({MANIFEST_FILE}); {self.remedy}")

    def read(self, path: Path) -> bytes:
        """Return the content of a small file, after comparing it."""
        data = path.read_bytes()
        self.check(path, sha256(data).hexdigest())
        return data


def encode_manifest(files: Mapping[str, FileRecord], **facts: Any) -> bytes:
    """Return the content of a manifest of files, by name, and of other facts."""
    return canonical_json({**facts, "files": {name: asdict(record) for name, record in files.items()}})


def read_manifest(path: Path, *, needs: tuple[str, ...], remedy: str) -> Manifest:
    """Read a manifest, which must list the files that are needed; `remedy` ends its errors."""
    try:
        facts = parse_json(path.read_bytes())
        files = {name: FileRecord(**record) for name, record in facts.pop("files").items()}
        if missing := [name for name in needs if name not in files]:
            raise ValueError(f"it does not list {', '.join(missing)}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        what = one_line(error) if isinstance(error, ValueError) else "it is no manifest"
        raise CheckpointError(f"'{path}' is damaged: {what}; {remedy}") from None
    return Manifest(files, facts, remedy)
