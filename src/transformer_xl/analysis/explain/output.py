"""The files of an explanation: the text, and a directory with a page, pictures and totals, each written whole or not at all."""

import json
from pathlib import Path

from transformer_xl.analysis.explain.explanation import Explanation
from transformer_xl.analysis.explain.page import page
from transformer_xl.analysis.explain.pictures import pictures
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError
from transformer_xl.files import make_directory, replace_file
from transformer_xl.pictures import save_picture

PAGE, TOTALS = "index.html", "explain.json"
_FORMAT = "txl explain 1"


def check_output(directory: Path) -> None:
    """Refuse, with a `ConfigError`, anything but a new or empty directory, or one that holds an earlier explanation."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--out '{directory}' is a file; choose a directory")
    if not directory.exists():
        if not directory.absolute().parent.is_dir():
            raise ConfigError(
                f"--out '{directory}': the directory '{directory.absolute().parent}' does not exist; make it first"
            )
        return
    if any(directory.iterdir()) and not _is_explanation(directory):
        raise ConfigError(f"--out '{directory}' holds something that txl explain has not written; choose another --out")


def write_explanation(explanation: Explanation, directory: Path) -> Path:
    """Write page, pictures and totals over those of an earlier explanation; return the path of the page.

    Raises:
        ConfigError: the directory holds something else.
        CheckpointError: it cannot be written.
    """
    content, figures = page(explanation), pictures(explanation)
    totals = {"format": _FORMAT, "name": explanation.name, **explanation.totals}
    check_output(directory)
    try:
        make_directory(directory)
        replace_file(directory / TOTALS, (json.dumps(totals, indent=2) + "\n").encode())
        for name in ("along.png", "attention.png", "gain.png"):
            if name in figures:
                save_picture(figures[name], directory / name)
            else:
                (directory / name).unlink(missing_ok=True)
        replace_file(directory / PAGE, content.encode())
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot write to '{directory}': {reason}; free disk space or choose another --out") from None
    return directory / PAGE


def check_text(data: bytes, file: Path) -> None:
    """Refuse an empty or binary file with a `CorpusError`."""
    if not data:
        raise CorpusError(f"'{file}' is empty; give a text of at least 2 tokens")
    if b"\0" in data or data.decode("utf-8", "replace").count("\ufffd") > len(data) // 10:
        raise CorpusError(f"'{file}' is not text but binary; explain shows text")


def _is_explanation(directory: Path) -> bool:
    try:
        totals = json.loads((directory / TOTALS).read_text(encoding="utf-8"))
        return isinstance(totals, dict) and totals.get("format") == _FORMAT
    except (OSError, ValueError):
        return False
