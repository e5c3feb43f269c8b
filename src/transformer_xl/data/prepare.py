"""Text to ids on disk: `prepare` encodes a corpus into a cache directory once; later calls only open it.

A prepared corpus is a directory named by a hash of the corpus and the tokenizer:

    train.bin  valid.bin  test.bin      ids, raw little-endian uint16 (vocabulary ≤ 65,536) or uint32
    documents.train.bin …               token offsets at which documents start, little-endian int64
    tokenizer.json
    manifest.json                       counts of each split; written last

The directory is built under another name and renamed when it is complete, so that nobody sees a part of it; an interrupted
preparation starts over. A vocabulary that was learned is kept beside it, under a hash of the corpus and the settings. A second
process that prepares the same corpus at the same time waits for the first.
"""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl import console
from transformer_xl.config.run import DataConfig, TokenizerConfig
from transformer_xl.data.corpora import Corpus, cache_dir, find_corpus
from transformer_xl.data.encoding import encode_chunks, id_dtype
from transformer_xl.data.ids import PACKED
from transformer_xl.data.named import SPLITS, SplitName
from transformer_xl.data.padding import find_padding
from transformer_xl.data.splits import is_cut_inside
from transformer_xl.data.text_files import COMPRESSED, EVERY_LINE, content_sha256, kind_of_file
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError, TokenizerError, counted
from transformer_xl.files import locked, make_directories, replace_file
from transformer_xl.process import cores, is_reporter
from transformer_xl.tokenizers.ids import MOST_IDS, IdTokenizer, PadId
from transformer_xl.tokenizers.kinds import Tokenizer, WordTokenizer, load_tokenizer, train_tokenizer
from transformer_xl.untrusted import CONVERT, read_json

FORMAT = 3
"""Version of the directory's layout and of the places at which text is cut."""

SMALL_BYTES = 4 << 20
"""Corpora of fewer bytes on disk are encoded in this process, because starting others would take longer."""

_MANIFEST, _TOKENIZER = "manifest.json", "tokenizer.json"
_START_DTYPE = np.dtype("<i8")

_NAMED_FILES = 3
"""How many files a warning names."""

_COPIED_WORDS = 500_000
"""A larger vocabulary is not loaded by several processes."""


@dataclass(frozen=True)
class TokenSplit:
    """One split as ids."""

    ids: np.ndarray  # shape (n_tokens,), uint16 or uint32, mapped from disk
    document_starts: np.ndarray  # token offsets at which documents start, int64, increasing, mapped from disk; the first is 0
    n_bytes: int  # bytes of the text; of ids, four for each
    n_characters: int  # code points of the text, or ids


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus as ids."""

    tokenizer: Tokenizer  # the tokenizer that encoded the text
    directory: Path  # the directory of the ids
    splits: dict[SplitName, TokenSplit]  # train, valid and test; valid and test may have no tokens
    training_sha256: str  # SHA-256 of the ids of the train split; a resumed run recognizes its text by it


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    *,
    cache: Path | None = None,
    n_workers: int | None = None,
    progress: bool = True,
) -> PreparedCorpus:
    """Return the corpus as ids; encode it first unless an earlier call did.

    Characters and ids are learned from all splits; the other vocabularies from train only.

    Args:
        data: which corpus, and how to divide it.
        tokenizer: a trained tokenizer, or the settings to train one on this corpus.
        cache: directory for prepared corpora; default `cache_dir() / "prepared"`.
        n_workers: encoding processes; default one per available core, 8 at most.
        progress: show progress on stderr, and warnings about what is read.

    Returns:
        The prepared corpus; its ids are mapped from disk, not read.

    Raises:
        CorpusError: the corpus is missing, empty, damaged, not UTF-8 or not what its name promises.
        ConfigError: n_workers is below 1.
        OSError: the corpus cannot be read, or the cache directory cannot be written.
        TokenizerError: the tokenizer cannot be trained with these settings.
    """
    if n_workers is not None and n_workers < 1:
        raise ConfigError(f"n_workers ({n_workers}) must be at least 1; leave it out for one per core")
    corpus = find_corpus(data, hold_ids=tokenizer.kind == "ids")
    root = Path(cache) if cache is not None else cache_dir() / "prepared"
    if prepared := _prepared(root, corpus, tokenizer):
        return prepared
    make_directories(root)
    busy = f"another process is preparing '{corpus.name}'; waiting for it"
    with locked(root / f"{corpus.fingerprint[:32]}.lock", on_busy=lambda: console.say(busy, quiet=not is_reporter())):
        if prepared := _prepared(root, corpus, tokenizer):
            return prepared
        _check_content(corpus)
        if progress and is_reporter() and tokenizer.kind != "ids":
            for note in _notes(corpus, tokenizer):
                console.warn(note)
        if isinstance(tokenizer, IdTokenizer) and tokenizer.pad_id == "auto":
            _padding(corpus, can_leave_out=False, progress=progress)
        if not isinstance(tokenizer, Tokenizer):
            learned = _learned(root, corpus, tokenizer) or _train(corpus, tokenizer, progress=progress)
            learned.save(root / f"{_key(corpus, tokenizer)}.json")
            tokenizer = learned
        return _build(root / _key(corpus, tokenizer), corpus, tokenizer, n_workers=n_workers, progress=progress)


def texts_of(data: DataConfig, splits: Sequence[SplitName] = SPLITS) -> Iterator[str]:
    """Yield the text of splits, in pieces."""
    for chunk in chain.from_iterable(map(find_corpus(data).chunks, splits)):
        yield chunk.text()


def _key(corpus: Corpus, tokenizer: TokenizerConfig | Tokenizer) -> str:
    unused = None if tokenizer.kind == "ids" else {"pad_id"}
    which = tokenizer.fingerprint if isinstance(tokenizer, Tokenizer) else tokenizer.model_dump_json(exclude=unused)
    return hashlib.sha256(json.dumps([FORMAT, corpus.fingerprint, which]).encode()).hexdigest()[:32]


def _prepared(root: Path, corpus: Corpus, tokenizer: TokenizerConfig | Tokenizer) -> PreparedCorpus | None:
    """Return the corpus as an earlier call prepared it, if that is there and whole."""
    learned = _learned(root, corpus, tokenizer)
    return _open(root / _key(corpus, learned), learned) if learned else None


def _open(directory: Path, tokenizer: Tokenizer) -> PreparedCorpus | None:
    try:
        counts = read_json(directory / _MANIFEST)["splits"]
        splits = {split: _open_split(directory, split, id_dtype(tokenizer.vocab_size), counts[split]) for split in SPLITS}
        return PreparedCorpus(tokenizer, directory, splits, counts["train"]["sha256"])
    except (CheckpointError, OSError, ValueError, KeyError, TypeError):
        return None


def _open_split(directory: Path, split: SplitName, dtype: np.dtype, counts: dict[str, Any]) -> TokenSplit:
    ids = _map(directory / f"{split}.bin", dtype, counts["n_tokens"])
    starts = _map(directory / f"documents.{split}.bin", _START_DTYPE, counts["n_documents"])
    starts = starts[: np.searchsorted(starts, len(ids))]  # the last document may have no token
    return TokenSplit(ids, starts, counts["n_bytes"], counts["n_characters"])


def _map(path: Path, dtype: np.dtype, n: int) -> np.ndarray:
    """Return a file of n numbers as an array; a file of another size is refused."""
    if path.stat().st_size != n * dtype.itemsize:
        raise ValueError(f"'{path}' does not hold {n:,} numbers")
    return np.asarray(np.memmap(path, dtype, "r")) if n else np.empty(0, dtype)  # an empty file cannot be mapped


def _learned(root: Path, corpus: Corpus, tokenizer: TokenizerConfig | Tokenizer) -> Tokenizer | None:
    """Return a tokenizer, or the one that an earlier call learned by the same settings, if any."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    try:
        return load_tokenizer(root / f"{_key(corpus, tokenizer)}.json")
    except (TokenizerError, OSError):
        return None


def _padding(corpus: Corpus, *, can_leave_out: bool, progress: bool) -> PadId:
    return find_padding(corpus.files, corpus.name, can_leave_out=can_leave_out, quiet=not (progress and is_reporter()))


def _notes(corpus: Corpus, tokenizer: TokenizerConfig | Tokenizer) -> Iterator[str]:
    """Yield what may not be meant: files that are no text, and documents that are cut between splits."""
    if corpus.left_out:
        total = len(corpus.files) + len(corpus.left_out)
        what = f"{len(corpus.left_out):,} of {counted(total, 'file')} in '{corpus.name}'"
        yield f"{what} are binary (NUL or control bytes) and left out: {_some(corpus.left_out)}"
    reads_bytes = tokenizer.reads_bytes if isinstance(tokenizer, Tokenizer) else tokenizer.kind == "byte"
    if reads_bytes and (foreign := [file for file in corpus.files if kind_of_file(file) != "UTF-8"]):
        yield f"{_some(foreign)} of '{corpus.name}' is not text in UTF-8; {CONVERT}, or its bytes are read as they are"
    if len(corpus.files) > 1 and is_cut_inside(corpus.splits):
        yield (
            f"the {len(corpus.files):,} files of '{corpus.name}' cannot be divided whole into shares near data.split, so files "
            "are cut; to choose the files of each split, give them names with train, valid and test"
        )


def _some(files: Sequence[Path]) -> str:
    more = len(files) - _NAMED_FILES
    return ", ".join(file.name for file in files[:_NAMED_FILES]) + (f" and {more:,} more" if more > 0 else "")


def _train(corpus: Corpus, config: TokenizerConfig, *, progress: bool) -> Tokenizer:
    if config.kind == "ids":
        pad_id = _padding(corpus, can_leave_out=True, progress=progress) if config.pad_id == "auto" else config.pad_id
        return IdTokenizer(config.vocab_size or _n_ids(corpus, IdTokenizer(MOST_IDS, pad_id), progress), pad_id)
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


def _n_ids(corpus: Corpus, every_id: IdTokenizer, progress: bool) -> int:
    largest = 0
    with console.progress("looking for the largest id", unit="bytes", hidden=not progress) as bar:
        for chunk in chain.from_iterable(corpus.ids(split, every_id) for split in SPLITS):
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


def _build(directory: Path, corpus: Corpus, tokenizer: Tokenizer, *, n_workers: int | None, progress: bool) -> PreparedCorpus:
    """Encode a corpus into a directory that is not there, or was damaged."""
    if directory.exists():
        console.say(f"prepared corpus '{directory}' is damaged; preparing it again")
        shutil.rmtree(directory)
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir()
    try:
        tokenizer.save(unfinished / _TOKENIZER)
        n_workers = _n_workers(corpus, tokenizer) if n_workers is None else n_workers
        splits = {}
        for split in SPLITS:
            splits[split] = _write_split(corpus, split, tokenizer, unfinished, n_workers=n_workers, progress=progress)
            _check_canonical(corpus, split, tokenizer, splits[split])
        corpus.check_unchanged()  # otherwise a mixture of two texts would be stored under the name of the first
        if not splits["train"]["n_tokens"]:
            raise CorpusError(f"corpus '{corpus.name}' has no tokens in its train split; give more text or another data.split")
        replace_file(unfinished / _MANIFEST, json.dumps({"corpus": corpus.name, "splits": splits}, indent=2).encode())
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    prepared = _open(directory, tokenizer)
    assert prepared is not None
    return prepared


def _write_split(
    corpus: Corpus, split: SplitName, tokenizer: Tokenizer, directory: Path, *, n_workers: int, progress: bool
) -> dict[str, Any]:
    """Write the ids of a split and the starts of its documents, and return its counts and the SHA-256 of its ids."""
    counts = dict.fromkeys(("n_tokens", "n_bytes", "n_characters", "n_documents"), 0)
    digest, last_start = hashlib.sha256(), -1
    chunks = corpus.ids(split, tokenizer) if isinstance(tokenizer, IdTokenizer) else corpus.chunks(split)
    with (
        console.progress(f"encoding {split}", _size(corpus, split, tokenizer), unit="bytes", hidden=not progress) as bar,
        (directory / f"{split}.bin").open("wb") as ids,
        (directory / f"documents.{split}.bin").open("wb") as documents,
    ):
        for batch in encode_chunks(chunks, tokenizer, n_workers=n_workers):
            starts = batch.document_starts + counts["n_tokens"]
            starts = starts[np.diff(starts, prepend=last_start) > 0]  # a document without tokens is none
            documents.write(starts.astype(_START_DTYPE).tobytes())
            ids.write(batch.ids)
            digest.update(batch.ids)
            last_start = starts[-1] if len(starts) else last_start
            counts["n_documents"] += len(starts)
            for count in ("n_tokens", "n_bytes", "n_characters"):
                counts[count] += getattr(batch, count)
            bar.advance(batch.n_bytes)
        for file in (ids, documents):
            file.flush()
            os.fsync(file.fileno())
    return {**counts, "sha256": digest.hexdigest()}


def _size(corpus: Corpus, split: SplitName, tokenizer: Tokenizer) -> int | None:
    """Return the bytes of a split's text, if reading its files is not needed to know them."""
    pieces = corpus.splits[split]
    to_the_end = [path for piece in pieces if piece.stop is None for path in piece.paths]
    if tokenizer.kind == "ids" or any(path.suffix in COMPRESSED for path in to_the_end):
        return None
    return sum(path.stat().st_size for path in to_the_end) + sum((piece.stop or 0) - piece.start for piece in pieces)


def _check_content(corpus: Corpus) -> None:
    """Compare the files of a named corpus with their published SHA-256, before a tokenizer is trained on them."""
    if corpus.canonical is None:
        return
    published = {corpus.splits[split][0].path: corpus.canonical.splits[split].sha256 for split in SPLITS}
    for path, expected in published.items():
        if expected is not None and (actual := content_sha256(path)) != expected:
            raise _another_version(corpus, path, f"sha256 {actual[:12]}…, expected {expected[:12]}…")


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
            difference = f"{split} has {counts[count]:,} {count.removeprefix('n_')}, expected {number:,}"
            raise _another_version(corpus, corpus.splits[split][0].path, difference)


def _another_version(corpus: Corpus, path: Path, difference: str) -> CorpusError:
    """Return an error that names the option to read the files beside a path as a text of their own."""
    return CorpusError(
        f"'{path}' is not the published text of corpus '{corpus.name}' ({difference}); replace it, or train on it as it is: "
        f"--set data.corpus={shlex.quote(str(path.parent))}"
    )
