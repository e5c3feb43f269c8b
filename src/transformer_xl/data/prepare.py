"""Text to ids on disk, once: `prepare` encodes a corpus into a cache directory and from then on only opens it.

A prepared corpus is a directory named by a hash of everything that its content depends on:

    train.bin  valid.bin  test.bin      ids, raw little-endian uint16 (vocabulary ≤ 65,536) or uint32
    documents.train.npy …               token offsets at which documents start, int64
    train.json …                        counts and hashes of these two
    tokenizer.json
    manifest.json                       sizes, hashes, counts; written last

A split of much text has several such shards (`shards.py`), and `documents.train.all.npy` for all of them.

It is built under another name and renamed when complete, so that nobody sees a part of it. Finished shards outlive an
interruption, even SIGKILL. A second process that prepares the same corpus at the same time waits for the first.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl import console
from transformer_xl.config import DataConfig, TokenizerConfig
from transformer_xl.data.corpora import Corpus, cache_dir, find_corpus
from transformer_xl.data.encoding import encode_chunks, id_dtype
from transformer_xl.data.named import SPLITS, SplitName
from transformer_xl.data.order import TokenIds
from transformer_xl.data.shards import (
    DamagedError,
    Shard,
    ShardedIds,
    check_file,
    join_documents,
    open_documents,
    shard_names,
    size_and_hash,
    split_files,
    write_shards,
)
from transformer_xl.data.text_files import COMPRESSED, EVERY_LINE, content_sha256
from transformer_xl.data.tokenizers import Tokenizer, WordTokenizer, load_tokenizer, train_tokenizer
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError
from transformer_xl.files import STRAY_SUFFIX, locked, replace_file
from transformer_xl.ranks import is_reporter

FORMAT = 2
"""Version of the directory's layout and of the places at which text is cut."""

SMALL_BYTES = 4 << 20
"""Corpora of fewer bytes on disk are encoded in this process, because others would take longer to start."""

HASHED_BYTES = 256 << 20
"""When a prepared corpus is opened, its smallest files, so many bytes together, are compared with their hashes, and so is every
file that is newer than the manifest; of the others only the size is compared."""

_ABANDONED_SECONDS = 7 * 24 * 3600
_UNFINISHED, _MANIFEST, _TOKENIZER = ".unfinished", "manifest.json", "tokenizer.json"

_COPIED_WORDS = 500_000
"""A larger vocabulary is not copied to other processes."""


@dataclass(frozen=True)
class TokenSplit:
    """One split as ids.

    Attributes:
        ids: shape (n_tokens,), uint16 or uint32, mapped from disk; an array if there is one shard. `ids[:]` always is one,
            a copy if there are several.
        document_starts: token offsets at which documents start, int64, increasing, mapped from disk; the first is 0.
        n_bytes: bytes of text that the ids stand for.
        n_characters: code points of that text.
    """

    ids: TokenIds
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
        training_sha256: of the ids of the train split, by which a resumed run knows its text again; of the hashes of its
            shards if there are several.
    """

    tokenizer: Tokenizer
    directory: Path
    splits: dict[SplitName, TokenSplit]
    training_sha256: str


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    *,
    search: Sequence[Path] = (),
    cache: Path | None = None,
    n_workers: int | None = None,
    progress: bool = True,
    download: bool = True,
    verify: bool = False,
    repair: bool = False,
) -> PreparedCorpus:
    """Return the corpus as ids, encoding it first unless that was done before.

    What was interrupted goes on after its last finished shard. A small corpus that was damaged since is prepared again. A
    character tokenizer learns its alphabet from all splits, word and BPE tokenizers learn from train only.

    Args:
        data: which corpus, and how it is divided.
        tokenizer: a trained tokenizer, or how to train one on this corpus.
        search: directories in which a named corpus may lie.
        cache: where prepared corpora are kept; default `cache_dir() / "prepared"`.
        n_workers: encoding processes; default one per available core, 8 at most.
        progress: show progress on stderr, if it is a terminal.
        download: fetch a named corpus that lies nowhere.
        verify: compare all that was prepared before with its hashes; otherwise files beyond the smallest,
            `HASHED_BYTES` together, only with their sizes unless they were written to since.
        repair: encode shards again that are missing or changed, instead of refusing them.

    Returns:
        The prepared corpus; its ids are mapped from disk, not read.

    Raises:
        CorpusError: the corpus is missing, empty, unreadable, not UTF-8 or not what its name promises; the cache directory
            cannot be written; or a shard is missing or has changed since preparation.
        TokenizerError: a tokenizer that cannot be trained so.
    """
    if n_workers is not None and n_workers < 1:
        raise ConfigError(f"n_workers ({n_workers}) must be at least 1; leave it out for one per core")
    corpus = find_corpus(data, search=search, download=download)
    root = Path(cache) if cache is not None else cache_dir() / "prepared"
    directory = _known_as(root / _key(corpus, tokenizer))
    if directory.exists():
        try:
            return _open(directory, verify=verify)
        except DamagedError as damage:
            _refuse_or_say(damage, directory, repair=repair)
    build = partial(_build, corpus, tokenizer, n_workers=n_workers, progress=progress)
    try:
        _make(directory, build, name=corpus.name, verify=verify)
        prepared = _open(directory)
        _also_known_as(root / _key(corpus, prepared.tokenizer), directory)
        return prepared
    except DamagedError as damage:  # not even right after writing it
        raise CorpusError(f"'{directory}' cannot be read back ({damage}); check the disk or set TXL_CACHE") from None


def _refuse_or_say(damage: DamagedError, directory: Path, *, repair: bool) -> None:
    """Say that a damaged corpus will be prepared again; refuse if that may take hours and nobody asked for it."""
    is_large, is_shard = any(directory.glob("*.1.json")), damage.path.suffix in (".bin", ".npy")
    if is_large and is_shard and not repair:
        raise CorpusError(
            f"shard '{damage.path}' of the prepared corpus {damage.what}; restore it, or encode its text again: with "
            f"txl corpus prepare, or by deleting '{_MANIFEST}' beside it"
        )
    console.say(f"prepared corpus '{directory}' is damaged ({damage}); preparing it again")


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


def _make(directory: Path, build: Callable[[Path], None], *, name: str, verify: bool) -> None:
    """Let `build` fill a directory that becomes `directory` when complete, unless another process makes it meanwhile.

    If `build` fails, what it wrote stays for the next attempt, unless no shard was finished.
    """
    unfinished = directory.with_name(directory.name + _UNFINISHED)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory.parent, but=unfinished)
        busy = f"another process is preparing '{name}'; waiting for it"
        lock = directory.with_name(directory.name + ".lock")
        with locked(lock, on_busy=lambda: console.say(busy, quiet=not is_reporter())):
            if _is_good(directory, verify=verify):
                return
            _take_up(directory, unfinished)
            try:
                build(unfinished)
                unfinished.rename(directory)
            finally:
                if unfinished.exists() and not _records(unfinished):
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if _is_good(directory, verify=False):  # where files cannot be locked, another process may have renamed it
            return
        raise CorpusError(
            f"cannot write the prepared corpus in '{directory.parent}': {error.strerror or error}; "
            "free space there or set TXL_CACHE to another directory"
        ) from None


def _is_good(directory: Path, *, verify: bool) -> bool:
    try:
        _open(directory, verify=verify)
    except DamagedError:
        return False
    return True


def _take_up(directory: Path, unfinished: Path) -> None:
    """Make a directory to build in; what an interrupted preparation finished, or is intact of a damaged one, is in it."""
    if directory.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        directory.rename(unfinished)
    elif unfinished.exists():
        console.say("going on with a preparation that was interrupted; finished shards are kept")
    unfinished.mkdir(exist_ok=True)
    os.utime(unfinished)  # it is not abandoned, should the first shard take long
    for stray in unfinished.glob(f"*{STRAY_SUFFIX}*"):
        stray.unlink()


def _records(directory: Path) -> list[Path]:
    """Return the files that say that a shard is finished."""
    return [path for path in directory.glob("*.json") if path.name not in (_TOKENIZER, _MANIFEST)]


def _remove_abandoned(root: Path, *, but: Path) -> None:
    """Remove what killed processes left behind long ago."""
    for old in root.glob(f"*{_UNFINISHED}"):
        try:
            if old != but and time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
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
    if isinstance(tokenizer, Tokenizer):
        trained = tokenizer
    else:
        trained = _kept_tokenizer(directory) or _train(corpus, tokenizer, progress=progress)
    trained.save(directory / _TOKENIZER)
    n_workers = _n_workers(corpus, trained) if n_workers is None else n_workers
    splits, files, names = {}, {}, {_TOKENIZER}
    for split in SPLITS:
        shards = _write_split(corpus, split, trained, directory, n_workers=n_workers, progress=progress)
        counts = {count: sum(getattr(shard, count) for shard in shards) for count in ("n_tokens", "n_bytes", "n_characters")}
        documents = open_documents(directory, split, n_tokens=counts["n_tokens"], n_shards=len(shards))
        splits[split] = {**counts, "n_documents": len(documents), "shards": [shard.n_tokens for shard in shards]}
        _check_canonical(corpus, split, trained, splits[split])
        for shard in shards:
            files |= shard.files
        names |= split_files(split, len(shards))
    corpus.check_unchanged()  # otherwise a mixture of two texts would be found under the name of the first
    if not splits["train"]["n_tokens"]:
        raise CorpusError(f"corpus '{corpus.name}' has no tokens in its train split; give more text or another data.split")
    for path in directory.iterdir():
        if path.name not in names:  # an older manifest, or shards that are too many because they were smaller
            path.unlink()
    files |= {name: size_and_hash(directory / name) for name in sorted(names) if name not in files}
    manifest = {
        "format": FORMAT,
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "tokenizer": {"kind": trained.kind, "vocab_size": trained.vocab_size, "fingerprint": trained.fingerprint},
        "dtype": id_dtype(trained.vocab_size).name,
        "splits": splits,
        "files": files,
    }
    replace_file(directory / _MANIFEST, json.dumps(manifest, indent=2).encode())


def _kept_tokenizer(directory: Path) -> Tokenizer | None:
    """Return the tokenizer with which shards were finished before an interruption."""
    try:
        kept = load_tokenizer(directory / _TOKENIZER)
        used = {json.loads(record.read_text(encoding="utf-8"))["tokenizer"] for record in _records(directory)}
    except (OSError, ValueError, KeyError, TypeError, TokenizerError):
        return None
    return kept if used == {kept.fingerprint} else None


def _train(corpus: Corpus, config: TokenizerConfig, *, progress: bool) -> Tokenizer:
    splits = SPLITS if config.kind == "char" else ("train",)
    with console.progress(f"learning {config.kind} vocabulary", unit="bytes", hidden=not progress) as bar:

        def texts() -> Iterator[str]:
            for text in chain.from_iterable(map(corpus.texts, splits)):
                yield text
                bar.advance(len(text))

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
) -> list[Shard]:
    encode = partial(encode_chunks, tokenizer=tokenizer, n_workers=n_workers, tokenizer_path=directory / _TOKENIZER)
    with console.progress(f"encoding {split}", _total_bytes(corpus, split), unit="bytes", hidden=not progress) as bar:
        chunks = corpus.chunks(split)
        shards = write_shards(directory, split, chunks, encode, tokenizer=tokenizer.fingerprint, on_bytes=bar.advance)
    join_documents(directory, split, shards)
    return shards


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


def _check_canonical(corpus: Corpus, split: SplitName, tokenizer: Tokenizer, counts: dict[str, Any]) -> None:
    """Compare with the published sizes; text that divides documents is not counted, so then there is nothing to compare."""
    if corpus.canonical is None or corpus.document_separator not in (None, EVERY_LINE):
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


def _open(directory: Path, *, verify: bool = False) -> PreparedCorpus:
    """Open what is there.

    Raises:
        DamagedError: something is missing or not as the manifest says.
    """
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        _check_files(directory, manifest["files"], verify=verify)
        tokenizer = load_tokenizer(directory / _TOKENIZER)
        if tokenizer.fingerprint != manifest["tokenizer"]["fingerprint"]:
            raise DamagedError(directory / _TOKENIZER, "is another tokenizer")
        dtype = id_dtype(tokenizer.vocab_size)
        splits = {split: _open_split(directory, split, dtype, manifest["splits"][split]) for split in SPLITS}
        n_shards = len(manifest["splits"]["train"]["shards"])
        hashes = [manifest["files"][f"{name}.bin"]["sha256"] for name in shard_names("train", n_shards)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(directory / _MANIFEST, " ".join(str(error).split()) or type(error).__name__) from None
    training_sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return PreparedCorpus(tokenizer, directory, splits, training_sha256)


def _check_files(directory: Path, files: dict[str, dict[str, Any]], *, verify: bool) -> None:
    """Compare all files with their sizes; the smallest ones, and those newer than the manifest, with their hashes too."""
    manifest = directory / _MANIFEST
    finished_ns = newest_ns = manifest.stat().st_mtime_ns
    n_bytes = 0
    for name, expected in sorted(files.items(), key=lambda item: item[1]["size"]):
        n_bytes += expected["size"]
        thorough = verify or n_bytes < HASHED_BYTES
        written_ns = check_file(directory / name, expected, thorough=thorough, finished_ns=finished_ns)
        newest_ns = max(newest_ns, written_ns)
    if newest_ns > finished_ns:  # copied without their times: they are as they were, so that sizes suffice from now on
        with suppress(OSError):
            os.utime(manifest, ns=(newest_ns, newest_ns))


def _open_split(directory: Path, split: SplitName, dtype: np.dtype, counts: dict[str, Any]) -> TokenSplit:
    n_tokens = counts["n_tokens"]
    lengths = counts["shards"]
    paths = [directory / f"{name}.bin" for name in shard_names(split, len(lengths))]
    for path, length in zip(paths, lengths, strict=True):
        if path.stat().st_size != length * dtype.itemsize:
            raise DamagedError(path, f"has not {length:,} tokens")
    if len(paths) > 1:
        ids = ShardedIds(paths, lengths, dtype)
    else:
        ids = np.memmap(paths[0], dtype, "r") if n_tokens else np.empty(0, dtype)  # an empty file cannot be mapped
    documents = open_documents(directory, split, n_tokens=n_tokens, n_shards=len(paths))
    return TokenSplit(ids, documents, counts["n_bytes"], counts["n_characters"])
