"""Text to ids on disk, once: `prepare` encodes a corpus into a cache directory and from then on only opens it.

A prepared corpus is a directory named by a hash of everything that its content depends on:

    train.bin  valid.bin  test.bin      ids, raw little-endian uint16 (vocabulary ≤ 65,536) or uint32
    documents.train.npy …               token offsets at which documents start, int64
    tokenizer.json
    manifest.json                       sizes, hashes, counts; written last

It is built under another name and renamed when complete, so that neither an interruption nor a second process that prepares
the same corpus at the same time can leave or see a part of it.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.config import DataConfig, TokenizerConfig
from transformer_xl.data.corpora import Corpus, find_corpus
from transformer_xl.data.encoding import encode_chunks, id_dtype
from transformer_xl.data.files import COMPRESSED, content_sha256
from transformer_xl.data.named import SPLITS, SplitName
from transformer_xl.data.paths import cache_dir
from transformer_xl.data.progress import byte_progress
from transformer_xl.data.tokenizers import Tokenizer, WordTokenizer, load_tokenizer, train_tokenizer
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError

FORMAT = 1
"""Version of the directory's layout and of the places at which text is cut."""

SMALL_BYTES = 4 << 20
"""Corpora of fewer bytes on disk are encoded in this process: others would take longer to start."""

HASHED_BYTES = 256 << 20
"""Files of fewer bytes are compared with their hash when a prepared corpus is opened, larger ones only with their size."""

_ABANDONED_SECONDS = 24 * 3600
_MANIFEST, _TOKENIZER = "manifest.json", "tokenizer.json"


_COPIED_WORDS = 500_000
"""A larger vocabulary is not copied to other processes."""


@dataclass(frozen=True)
class TokenSplit:
    """One split as ids.

    Attributes:
        ids: shape (n_tokens,), uint16 or uint32, mapped from disk.
        document_starts: token offsets at which documents start, int64, increasing; the first is 0.
        n_bytes: bytes of text that the ids stand for.
        n_characters: code points of that text.
    """

    ids: np.ndarray
    document_starts: np.ndarray
    n_bytes: int
    n_characters: int


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus as ids.

    Attributes:
        tokenizer: what the ids mean.
        directory: where they lie.
        splits: train, valid and test; valid and test may have no tokens.
        training_sha256: of the ids of the train split, by which a resumed run knows its text again.
    """

    tokenizer: Tokenizer
    directory: Path
    splits: dict[SplitName, TokenSplit]
    training_sha256: str


class _DamagedError(Exception):
    """A prepared corpus that is not as its manifest says."""


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    *,
    search: Sequence[Path] = (),
    cache: Path | None = None,
    n_workers: int | None = None,
    progress: bool = True,
    download: bool = True,
) -> PreparedCorpus:
    """Return the corpus as ids, encoding it first unless that was done before.

    A character tokenizer learns its alphabet from all splits, word and BPE tokenizers learn from train only.

    Args:
        data: which corpus, and how it is divided.
        tokenizer: a trained tokenizer, or how to train one on this corpus.
        search: directories in which a named corpus may lie.
        cache: where prepared corpora are kept; default `cache_dir() / "prepared"`.
        n_workers: encoding processes; default one per available core, 8 at most.
        progress: show progress on stderr, if it is a terminal.
        download: fetch a named corpus that lies nowhere.

    Returns:
        The prepared corpus; its ids are mapped from disk, not read.

    Raises:
        CorpusError: the corpus is missing, empty, unreadable, not UTF-8 or not what its name promises; or the cache directory
            cannot be written.
        TokenizerError: a tokenizer that cannot be trained so.
    """
    if n_workers is not None and n_workers < 1:
        raise ConfigError(f"n_workers ({n_workers}) must be at least 1; leave it out for one per core")
    corpus = find_corpus(data, search=search, download=download)
    root = Path(cache) if cache is not None else cache_dir() / "prepared"
    directory = _known_as(root / _key(corpus, tokenizer))
    if directory.exists():
        try:
            return _open(directory)
        except _DamagedError as damage:
            print(f"prepared corpus '{directory}' is damaged ({damage}); preparing it again", file=sys.stderr)
    with _building(directory) as temporary:
        _build(corpus, tokenizer, temporary, n_workers=n_workers, progress=progress)
    try:
        prepared = _open(directory)
        _also_known_as(root / _key(corpus, prepared.tokenizer), directory)
        return prepared
    except _DamagedError as damage:  # not even right after writing it
        raise CorpusError(f"'{directory}' cannot be read back ({damage}); check the disk or set TXL_CACHE") from None


def _known_as(directory: Path) -> Path:
    """Return the directory that holds what `directory` should: itself, or the one that it is an alias of."""
    try:
        name = directory.with_suffix(".alias").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return directory
    return directory.with_name(name) if re.fullmatch("[0-9a-f]{32}", name) else directory


def _also_known_as(alias: Path, directory: Path) -> None:
    """Let a corpus that was prepared while its tokenizer was trained be found by that tokenizer too, as a run asks for it."""
    if alias != directory:
        with suppress(OSError):  # without it the ids are only written once more
            alias.with_suffix(".alias").write_text(directory.name, encoding="utf-8")


def _key(corpus: Corpus, tokenizer: TokenizerConfig | Tokenizer) -> str:
    which = tokenizer.fingerprint if isinstance(tokenizer, Tokenizer) else tokenizer.model_dump_json()
    return hashlib.sha256(json.dumps([FORMAT, corpus.fingerprint, which]).encode()).hexdigest()[:32]


@contextmanager
def _building(directory: Path) -> Iterator[Path]:
    """Give an empty directory that becomes `directory` if the block succeeds, and vanishes otherwise."""
    temporary = directory.with_name(f"{directory.name}.tmp-{os.getpid()}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            _replace(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CorpusError(
            f"cannot write the prepared corpus in '{directory.parent}': {error.strerror or error}; "
            "free space there or set TXL_CACHE to another directory"
        ) from None


def _replace(temporary: Path, directory: Path) -> None:
    """Rename, unless another process was faster; a damaged directory is moved out of the way first."""
    if directory.exists():
        try:
            _open(directory)
            return
        except _DamagedError:
            damaged = directory.with_name(f"{directory.name}.tmp-damaged-{os.getpid()}")
            directory.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
    try:
        temporary.rename(directory)
    except OSError:
        if not directory.exists():
            raise


def _remove_abandoned(root: Path) -> None:
    """Remove what killed processes left behind."""
    for old in root.glob("*.tmp-*"):
        try:
            if time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        except FileNotFoundError:  # its owner just finished
            continue


def _build(
    corpus: Corpus,
    tokenizer: TokenizerConfig | Tokenizer,
    directory: Path,
    *,
    n_workers: int | None,
    progress: bool,
) -> None:
    _check_content(corpus)
    trained = tokenizer if isinstance(tokenizer, Tokenizer) else _train(corpus, tokenizer, progress=progress)
    trained.save(directory / _TOKENIZER)
    n_workers = _n_workers(corpus, trained) if n_workers is None else n_workers
    splits = {}
    for split in SPLITS:
        splits[split] = _write_split(corpus, split, trained, directory, n_workers=n_workers, progress=progress)
        _check_canonical(corpus, split, trained, splits[split])
    if not splits["train"]["n_tokens"]:
        raise CorpusError(f"corpus '{corpus.name}' has no tokens in its train split; give more text or another data.split")
    files = sorted(path.name for path in directory.iterdir())
    manifest = {
        "format": FORMAT,
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "tokenizer": {"kind": trained.kind, "vocab_size": trained.vocab_size, "fingerprint": trained.fingerprint},
        "dtype": id_dtype(trained.vocab_size).name,
        "splits": splits,
        "files": {name: _size_and_hash(directory / name) for name in files},
    }
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _train(corpus: Corpus, config: TokenizerConfig, *, progress: bool) -> Tokenizer:
    splits = SPLITS if config.kind == "char" else ("train",)
    with byte_progress(f"learning {config.kind} vocabulary", enabled=progress) as advance:

        def texts() -> Iterator[str]:
            for text in chain.from_iterable(map(corpus.texts, splits)):
                yield text
                advance(len(text))

        try:
            return train_tokenizer(config, texts())
        except TokenizerError as error:
            raise TokenizerError(f"corpus '{corpus.name}': {error}") from None


def _n_workers(corpus: Corpus, tokenizer: Tokenizer) -> int:
    """Return 1 where other processes do not pay.

    Bytes and characters are encoded faster than they could be sent, and each process holds the vocabulary: 200 bytes a word.
    """
    if tokenizer.kind in ("byte", "char", "symbols") or tokenizer.vocab_size > _COPIED_WORDS:
        return 1
    if sum(file.stat().st_size for file in corpus.files) < SMALL_BYTES:
        return 1
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, 8)


def _write_split(
    corpus: Corpus, split: SplitName, tokenizer: Tokenizer, directory: Path, *, n_workers: int, progress: bool
) -> dict[str, int]:
    counts = dict.fromkeys(("n_tokens", "n_bytes", "n_characters"), 0)
    starts: list[np.ndarray] = []
    batches = encode_chunks(corpus.located_chunks(split), tokenizer, n_workers=n_workers, tokenizer_path=directory / _TOKENIZER)
    with (
        (directory / f"{split}.bin").open("wb") as file,
        byte_progress(f"encoding {split}", total=_total_bytes(corpus, split), enabled=progress) as advance,
    ):
        for batch in batches:
            starts.append(np.array(batch.document_starts, np.int64) + counts["n_tokens"])
            for count in counts:
                counts[count] += getattr(batch, count)
            file.write(batch.ids)
            advance(batch.n_bytes)
    documents = np.unique(np.concatenate([np.empty(0, np.int64), *starts]))  # a document without tokens starts nothing
    documents = documents[documents < counts["n_tokens"]]
    np.save(directory / f"documents.{split}.npy", documents, allow_pickle=False)
    return {**counts, "n_documents": len(documents)}


def _total_bytes(corpus: Corpus, split: SplitName) -> int | None:
    """Return the bytes of a split where that takes no reading."""
    sizes = [
        None if stop is None and path.suffix in COMPRESSED else (path.stat().st_size if stop is None else stop) - start
        for path, start, stop in corpus.splits[split]
    ]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _check_content(corpus: Corpus) -> None:
    """Compare the files of a named corpus with their published SHA-256, before anything is learned from them."""
    if corpus.canonical is None:
        return
    published = {corpus.splits[split][0].path: corpus.canonical.splits[split].sha256 for split in SPLITS}
    for path, expected in published.items():
        if expected is not None and (found := content_sha256(path)) != expected:
            raise CorpusError(
                f"'{path}' is not the published text of corpus '{corpus.name}' (sha256 {found[:12]}…, expected "
                f"{expected[:12]}…); replace it, or pass it by its path"
            )


def _check_canonical(corpus: Corpus, split: SplitName, tokenizer: Tokenizer, counts: dict[str, int]) -> None:
    """Compare with the published sizes; text that divides documents is not counted, so then there is nothing to compare."""
    if corpus.canonical is None or corpus.document_separator is not None:
        return
    published = corpus.canonical.splits[split]
    expected = {"n_bytes": published.n_bytes}
    if isinstance(tokenizer, WordTokenizer):
        expected["n_tokens"] = published.n_tokens
    for count, number in expected.items():
        if number is not None and counts[count] != number:
            raise CorpusError(
                f"{split} split of corpus '{corpus.name}' has {counts[count]:,} {count.removeprefix('n_')}, expected "
                f"{number:,}; '{corpus.splits[split][0].path}' is another version: replace it, or pass it by its path"
            )


def _open(directory: Path) -> PreparedCorpus:
    """Open what is there.

    Raises:
        _DamagedError: something lacks or is not as the manifest says.
    """
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest["files"].items():
            _verify(directory / name, expected)
        tokenizer = load_tokenizer(directory / _TOKENIZER)
        if tokenizer.fingerprint != manifest["tokenizer"]["fingerprint"]:
            raise _DamagedError(f"{_TOKENIZER} is another tokenizer")
        dtype = id_dtype(tokenizer.vocab_size)
        splits = {split: _open_split(directory, split, dtype, manifest["splits"][split]) for split in SPLITS}
        training_sha256 = manifest["files"]["train.bin"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(" ".join(str(error).split()) or type(error).__name__) from None
    return PreparedCorpus(tokenizer, directory, splits, training_sha256)


def _open_split(directory: Path, split: SplitName, dtype: np.dtype, counts: dict[str, int]) -> TokenSplit:
    path, n_tokens = directory / f"{split}.bin", counts["n_tokens"]
    if path.stat().st_size != n_tokens * dtype.itemsize:
        raise _DamagedError(f"{path.name} has not {n_tokens:,} tokens")
    ids = np.memmap(path, dtype, "r") if n_tokens else np.empty(0, dtype)  # an empty file cannot be mapped
    documents = np.load(directory / f"documents.{split}.npy", allow_pickle=False)
    return TokenSplit(ids, documents, counts["n_bytes"], counts["n_characters"])


def _verify(path: Path, expected: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != expected["size"]:
        raise _DamagedError(f"{path.name} has {size:,} bytes instead of {expected['size']:,}")
    if size < HASHED_BYTES and _size_and_hash(path) != expected:
        raise _DamagedError(f"{path.name} has another sha256")


def _size_and_hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
