"""Where corpora and prepared corpora live on disk."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the directory for files that can be made again.

    Returns:
        `$TXL_CACHE` if set, else `$XDG_CACHE_HOME/transformer_xl`, else `~/.cache/transformer_xl`. It need not exist yet.
    """
    if chosen := os.environ.get("TXL_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "transformer_xl"


def absolute_corpus(corpus: str) -> str:
    """Return a path or glob as an absolute one, so that it means the same from anywhere; names stay names."""
    path = Path(corpus).expanduser()
    return str(path.absolute()) if path.exists() or any(sign in corpus for sign in "*?[/") else corpus


def data_dir() -> Path:
    """Return the directory in which named corpora are looked for and to which they are downloaded.

    Returns:
        `$TXL_DATA` if set, else `corpora` in `cache_dir()`. It need not exist yet.
    """
    chosen = os.environ.get("TXL_DATA")
    return Path(chosen).expanduser() if chosen else cache_dir() / "corpora"
