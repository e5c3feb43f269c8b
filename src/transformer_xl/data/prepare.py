"""Text to ids on disk: `prepare` encodes a corpus into a cache directory once; later calls only open it.

A prepared corpus is a directory named by a hash of everything that its content depends on:

    train.bin  valid.bin  test.bin      ids, raw little-endian uint16 (vocabulary ≤ 65,536) or uint32
    documents.train.npy …               token offsets at which documents start, int64
    train.json …                        counts and hashes of these two
    tokenizer.json
    manifest.json                       sizes, hashes, counts; written last

A large split has several such shards (`shards.py`), and `documents.train.all.npy` for all of them.

The directory is built under another name and renamed when it is complete, so that nobody sees a part of it. Finished shards
survive an interruption, even SIGKILL. A second process that prepares the same corpus at the same time waits for the first.
"""

import hashlib
import json
import os
import re
import shlex
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
from transformer_xl.data.corpora import PYTHON_STDLIB, Corpus, cache_dir, find_corpus
from transformer_xl.data.encoding import encode_chunks, id_dtype
from transformer_xl.data.id_files import PACKED
from transformer_xl.data.ids import IdTokenizer
from transformer_xl.data.midi import is_midi_file, midi_events
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
from transformer_xl.data.splits import is_cut_inside
from transformer_xl.data.text_files import COMPRESSED, CONVERT, EVERY_LINE, content_sha256, kind_of_file
from transformer_xl.data.tokenizers import Tokenizer, WordTokenizer, load_tokenizer, train_tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError, TokenizerError, one_line
from transformer_xl.files import STRAY_SUFFIX, locked, make_directories, replace_file
from transformer_xl.process import cores, is_reporter
from transformer_xl.untrusted import read_json

FORMAT = 2
"""Version of the directory's layout and of the places at which text is cut."""

SMALL_BYTES = 4 << 20
"""Corpora of fewer bytes on disk are encoded in this process, because starting others would take longer."""

HASHED_BYTES = 256 << 20
"""When a prepared corpus is opened, the hashes of its smallest files, up to this size together, and of all files newer than the
manifest are checked. Only the sizes of the other files are checked."""

_ABANDONED_SECONDS = 7 * 24 * 3600
_UNFINISHED, _MANIFEST, _TOKENIZER = ".unfinished", "manifest.json", "tokenizer.json"
_MOST_MANIFEST_BYTES = 2**24

_NAMED_FILES = 3
"""How many files a warning names."""

_COPIED_WORDS = 500_000
"""A larger vocabulary is not loaded by several processes."""

_MAX_WORKERS = 1024
"""More are meant by nobody, and the queues between processes have no room for any number."""


@dataclass(frozen=True)
class TokenSplit:
    """One split as ids.

    Attributes:
        ids: shape (n_tokens,), uint16 or uint32, mapped from disk. An array if there is one shard; if there are several,
            `ids[:]` copies them to an array.
        document_starts: token offsets at which documents start, int64, increasing, mapped from disk; the first is 0.
        n_bytes: bytes of the text; of ids, four for each.
        n_characters: code points of the text, or ids.
    """

    ids: TokenIds
    document_starts: np.ndarray
    n_bytes: int
    n_characters: int


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus as ids.

    Attributes:
        tokenizer: the tokenizer that encoded the text.
        directory: the directory of the ids.
        splits: train, valid and test; valid and test may have no tokens.
        training_sha256: SHA-256 of the ids of the train split (if it has several shards, of their hashes); a resumed run
            recognizes its text by it.
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
    """Return the corpus as ids; encode it first unless an earlier call did.

    An interrupted preparation continues after its last finished shard. A small corpus that was damaged later is prepared again.
    Characters and ids are learned from all splits; the other vocabularies from train only.

    Args:
        data: which corpus, and how to divide it.
        tokenizer: a trained tokenizer, or the settings to train one on this corpus.
        search: directories that may hold a named corpus.
        cache: directory for prepared corpora; default `cache_dir() / "prepared"`.
        n_workers: encoding processes; default one per available core, 8 at most.
        progress: show progress on stderr, and warnings about what is read.
        download: download a named corpus that is not on this machine.
        verify: check the hashes of all files of a corpus that is prepared already; otherwise only the size is checked of files
            that are large (beyond the smallest, `HASHED_BYTES` together) and not newer than the manifest.
        repair: encode missing and changed shards again, instead of refusing them.

    Returns:
        The prepared corpus; its ids are mapped from disk, not read.

    Raises:
        CorpusError: the corpus is missing, empty, unreadable, not UTF-8 or not what its name promises; the cache directory
            cannot be written; or a shard is missing or has changed since preparation.
        ConfigError: n_workers is below 1 or above 1,024.
        TokenizerError: the tokenizer cannot be trained with these settings.
    """
    if n_workers is not None and not 1 <= n_workers <= _MAX_WORKERS:
        raise ConfigError(f"n_workers ({n_workers}) must be from 1 to {_MAX_WORKERS:,}; leave it out for one per core")
    corpus = find_corpus(data, search=search, download=download, hold_ids=tokenizer.kind == "ids")
    root = Path(cache) if cache is not None else cache_dir() / "prepared"
    directory = _known_as(root / _key(corpus, tokenizer))
    if directory.is_dir():
        try:
            return _open(directory, verify=verify)
        except DamagedError as damage:
            _allow_repair(damage, directory, repair=repair)
    build = partial(_build, corpus, tokenizer, n_workers=n_workers, progress=progress)
    try:
        _make(directory, build, name=corpus.name, verify=verify)
        prepared = _open(directory)
    except DamagedError as damage:  # right after it was written
        raise CorpusError(f"'{directory}' cannot be read back ({damage}); check the disk or set TXL_CACHE") from None
    alias = root / _key(corpus, prepared.tokenizer)  # by which a run looks for it that has the tokenizer trained here
    if alias != directory:
        with suppress(OSError):  # without the alias, the same ids are only written once more
            alias.with_suffix(".alias").write_text(directory.name, encoding="utf-8")
    return prepared


def _allow_repair(damage: DamagedError, directory: Path, *, repair: bool) -> None:
    """Say that a damaged corpus will be prepared again; refuse if that may take hours and was not asked for."""
    is_large, is_shard = any(directory.glob("*.1.json")), damage.path.suffix in (".bin", ".npy")
    if is_large and is_shard and not repair:
        raise CorpusError(
            f"shard '{damage.path}' of the prepared corpus {damage.what}; restore it, or encode its text again: with "
            f"txl corpus prepare, or by deleting '{_MANIFEST}' beside it"
        )
    console.say(f"prepared corpus '{directory}' is damaged ({damage}); preparing it again")


def _known_as(directory: Path) -> Path:
    """Return the directory that `directory` is an alias of, or else itself."""
    try:
        name = directory.with_suffix(".alias").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return directory
    return directory.with_name(name) if re.fullmatch("[0-9a-f]{32}", name) else directory


def _key(corpus: Corpus, tokenizer: TokenizerConfig | Tokenizer) -> str:
    which = tokenizer.fingerprint if isinstance(tokenizer, Tokenizer) else tokenizer.model_dump_json()
    return hashlib.sha256(json.dumps([FORMAT, corpus.fingerprint, which]).encode()).hexdigest()[:32]


def _make(directory: Path, build: Callable[[Path], None], *, name: str, verify: bool) -> None:
    """Let `build` fill a directory that is renamed to `directory` when complete, unless another process makes it meanwhile.

    If `build` fails, its finished shards stay for the next attempt.
    """
    unfinished = directory.with_name(directory.name + _UNFINISHED)
    try:
        make_directories(directory.parent)
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
        if _is_good(directory, verify=False):  # without locks, another process may have made it
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
    """Make a directory to build in from a damaged corpus or an interrupted preparation, if there is one."""
    for path in (directory, unfinished):
        if os.path.lexists(path) and not path.is_dir():
            raise CorpusError(f"'{path}' is a file in the place of a prepared corpus; move it away or delete it")
    if directory.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        directory.rename(unfinished)
    elif unfinished.exists():
        console.say("going on with a preparation that was interrupted; finished shards are kept")
    unfinished.mkdir(exist_ok=True)
    for path in unfinished.iterdir():
        if path.is_dir():
            raise CorpusError(f"'{path}' is a directory in the place of a file of a prepared corpus; move it away or delete it")
    os.utime(unfinished)  # so that it does not count as abandoned if the first shard takes long
    for stray in unfinished.glob(f"*{STRAY_SUFFIX}*"):
        stray.unlink()


def _records(directory: Path) -> list[Path]:
    """Return the records of finished shards."""
    return [path for path in directory.glob("*.json") if path.name not in (_TOKENIZER, _MANIFEST)]


def _remove_abandoned(root: Path, *, but: Path) -> None:
    """Remove directories that killed processes left behind long ago."""
    for old in root.glob(f"*{_UNFINISHED}"):
        try:
            if old != but and time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        except FileNotFoundError:  # its process has just finished it
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
    reads_bytes = tokenizer.reads_bytes if isinstance(tokenizer, Tokenizer) else tokenizer.kind == "byte"
    has_notes = progress and is_reporter() and tokenizer.kind != "ids"
    for note in _notes(corpus, reads_bytes=reads_bytes) if has_notes else ():
        console.warn(note)
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
    corpus.check_unchanged()  # otherwise a mixture of two texts would be stored under the name of the first
    if not splits["train"]["n_tokens"]:
        raise CorpusError(f"corpus '{corpus.name}' has no tokens in its train split; give more text or another data.split")
    for path in directory.iterdir():
        if path.name not in names:  # an old manifest, or old shards that were smaller and so more
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


def _notes(corpus: Corpus, *, reads_bytes: bool) -> Iterator[str]:
    """Yield what may not be meant: files that are no text, and documents that are cut between splits."""
    if corpus.left_out:
        total = len(corpus.files) + len(corpus.left_out)
        what = f"{len(corpus.left_out):,} of {total:,} files in '{corpus.name}'"
        yield f"{what} are binary (NUL or control bytes) and left out: {_some(corpus.left_out)}"
    if corpus.canonical or corpus.name == PYTHON_STDLIB:
        return
    kinds = {file: kind_of_file(file) for file in corpus.files}
    if binary := [file for file, kind in kinds.items() if kind == "binary"]:
        yield (
            f"{_some(binary)} of '{corpus.name}' is read as bytes, although it is binary (NUL bytes, as UTF-16 has, too, or "
            "control bytes); if it is text, convert it to UTF-8, or else give another file"
        )
    if reads_bytes and (foreign := [file for file, kind in kinds.items() if kind == "another encoding"]):
        yield f"{_some(foreign)} of '{corpus.name}' is not UTF-8; {CONVERT}, or its bytes are read as they are"
    if len(corpus.files) > 1 and is_cut_inside(corpus.splits):
        yield (
            f"the {len(corpus.files):,} files of '{corpus.name}' cannot be divided whole into shares near data.split, so files "
            "are cut; to choose the files of each split, give them names with train, valid and test"
        )


def _some(files: Sequence[Path]) -> str:
    """Return the names of the first few files."""
    more = len(files) - _NAMED_FILES
    return ", ".join(file.name for file in files[:_NAMED_FILES]) + (f" and {more:,} more" if more > 0 else "")


def _kept_tokenizer(directory: Path) -> Tokenizer | None:
    """Return the tokenizer that encoded the finished shards of an interrupted preparation."""
    try:
        kept = load_tokenizer(directory / _TOKENIZER)
        used = {read_json(record)["tokenizer"] for record in _records(directory)}
    except (CheckpointError, OSError, ValueError, KeyError, TypeError):
        return None
    return kept if used == {kept.fingerprint} else None


def _train(corpus: Corpus, config: TokenizerConfig, *, progress: bool) -> Tokenizer:
    if config.kind == "ids":
        if any(map(is_midi_file, corpus.files)):
            return IdTokenizer(len(midi_events()), events=midi_events())
        return train_tokenizer(config.model_copy(update={"vocab_size": config.vocab_size or _n_ids(corpus, progress)}), ())
    splits = SPLITS if config.kind == "char" else ("train",)
    with console.progress(f"learning {config.kind} vocabulary", unit="bytes", hidden=not progress) as bar:

        def texts() -> Iterator[str]:
            for chunk in chain.from_iterable(map(corpus.chunks, splits)):
                text = chunk.text()
                yield text
                bar.advance(len(text))

        try:
            return train_tokenizer(config, texts())
        except TokenizerError as error:
            raise TokenizerError(f"corpus '{corpus.name}': {error}") from None


def _n_ids(corpus: Corpus, progress: bool) -> int:
    """Return the smallest vocabulary that has all ids."""
    largest = 0
    with console.progress("looking for the largest id", unit="bytes", hidden=not progress) as bar:
        for chunk in chain.from_iterable(map(corpus.ids, SPLITS)):
            largest = max(largest, int(np.frombuffer(chunk.data, PACKED).max()))
            bar.advance(len(chunk.data))
    return largest + 1


def _n_workers(corpus: Corpus, tokenizer: Tokenizer) -> int:
    """Return a process per core, or 1 if several processes would not be faster or would need too much memory.

    Bytes, characters and ids are encoded faster than sent to a process. Each process holds the vocabulary: 200 bytes a word.
    """
    if tokenizer.kind in ("byte", "char", "symbols", "ids") or tokenizer.vocab_size > _COPIED_WORDS:
        return 1
    if sum(file.stat().st_size for file in corpus.files) < SMALL_BYTES:
        return 1
    return min(cores(), 8)


def _write_split(
    corpus: Corpus, split: SplitName, tokenizer: Tokenizer, directory: Path, *, n_workers: int, progress: bool
) -> list[Shard]:
    encode = partial(encode_chunks, tokenizer=tokenizer, n_workers=n_workers, tokenizer_path=directory / _TOKENIZER)
    pieces = corpus.splits[split]
    plain = (each.stop is not None or not any(path.suffix in COMPRESSED for path in each.paths) for each in pieces)
    known = tokenizer.kind != "ids" and all(plain)
    sizes = (sum(path.stat().st_size for path in each.paths) if each.stop is None else each.stop for each in pieces)
    total = sum(sizes) - sum(each.start for each in pieces) if known else None
    with console.progress(f"encoding {split}", total, unit="bytes", hidden=not progress) as bar:
        chunks = corpus.ids(split, tokenizer) if isinstance(tokenizer, IdTokenizer) else corpus.chunks(split)
        shards = write_shards(directory, split, chunks, encode, tokenizer=tokenizer.fingerprint, on_bytes=bar.advance)
    join_documents(directory, split, shards)
    return shards


def _check_content(corpus: Corpus) -> None:
    """Compare the files of a named corpus with their published SHA-256, before a tokenizer is trained on them."""
    if corpus.canonical is None:
        return
    published = {corpus.splits[split][0].path: corpus.canonical.splits[split].sha256 for split in SPLITS}
    for path, expected in published.items():
        if expected is not None and (found := content_sha256(path)) != expected:
            raise CorpusError(
                f"'{path}' is not the published text of corpus '{corpus.name}' (sha256 {found[:12]}…, expected "
                f"{expected[:12]}…); replace it, or train on it as it is: {_as_it_is(path)}"
            )


def _check_canonical(corpus: Corpus, split: SplitName, tokenizer: Tokenizer, counts: dict[str, Any]) -> None:
    """Compare counts with the published ones, except where lines that divide documents are left out and so not counted."""
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
                f"{number:,}; '{corpus.splits[split][0].path}' is another version: replace it, "
                f"or train on it as it is: {_as_it_is(corpus.splits[split][0].path)}"
            )


def _as_it_is(path: Path) -> str:
    """Return the option that reads the files beside one as a text of their own, and not as the named corpus."""
    return f"--set data.corpus={shlex.quote(str(path.parent))}"


def _open(directory: Path, *, verify: bool = False) -> PreparedCorpus:
    """Open a prepared corpus.

    Raises:
        DamagedError: something is missing or not as the manifest says.
    """
    try:
        manifest = read_json(directory / _MANIFEST, most_bytes=_MOST_MANIFEST_BYTES, most_parts=_MOST_MANIFEST_BYTES)
        _check_files(directory, manifest["files"], verify=verify)
        tokenizer = load_tokenizer(directory / _TOKENIZER)
        if tokenizer.fingerprint != manifest["tokenizer"]["fingerprint"]:
            raise DamagedError(directory / _TOKENIZER, "is another tokenizer")
        dtype = id_dtype(tokenizer.vocab_size)
        splits = {split: _open_split(directory, split, dtype, manifest["splits"][split]) for split in SPLITS}
        n_shards = len(manifest["splits"]["train"]["shards"])
        hashes = [manifest["files"][f"{name}.bin"]["sha256"] for name in shard_names("train", n_shards)]
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = one_line(error).partition(";")[0]  # its remedy is for files that a user names
        raise DamagedError(directory / _MANIFEST, what or type(error).__name__) from None
    training_sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return PreparedCorpus(tokenizer, directory, splits, training_sha256)


def _check_files(directory: Path, files: dict[str, dict[str, Any]], *, verify: bool) -> None:
    """Compare all files with their recorded sizes, and some or all (see `HASHED_BYTES`) with their hashes."""
    manifest = directory / _MANIFEST
    finished_ns = newest_ns = manifest.stat().st_mtime_ns
    n_bytes = 0
    for name, expected in sorted(files.items(), key=lambda item: item[1]["size"]):
        n_bytes += expected["size"]
        thorough = verify or n_bytes < HASHED_BYTES
        written_ns = check_file(directory / name, expected, thorough=thorough, finished_ns=finished_ns)
        newest_ns = max(newest_ns, written_ns)
    if newest_ns > finished_ns:  # copied without their times, but intact; from now on comparing sizes is enough
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
