"""Finding a corpus by name, file, directory or glob, and reading its splits in bounded memory.

The corpus `python-stdlib` needs no download: it is the source text of the running interpreter's standard library, about 12 MB,
without tests and without `site-packages`. Its files, in order of path, are dealt out so that train, valid and test always have
about 90, 5 and 5 % of the bytes so far. This way all splits are of one kind; the last 5 % by path would be only `xml`,
`xmlrpc`, `zipfile` and the like.
"""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import takewhile
from pathlib import Path

from transformer_xl.config.recipes import parse_override
from transformer_xl.config.run import DataConfig, RunConfig, merge
from transformer_xl.console import say
from transformer_xl.data.downloads import download, unpack
from transformer_xl.data.ids import is_array_file, is_id_file, read_ids
from transformer_xl.data.named import NAMED, SPLITS, NamedCorpus, SplitFiles, SplitName
from transformer_xl.data.splits import ABOUT_THE_CORPUS, Splits, splits_by_name, splits_by_ratio, splits_by_turns
from transformer_xl.data.text_files import COMPRESSED, Chunk, FileRange, kind_of_file, read_chunks
from transformer_xl.errors import ConfigError, CorpusError, beside, did_you_mean
from transformer_xl.files import files_below, locked, make_directories
from transformer_xl.process import is_reporter
from transformer_xl.tokenizers.ids import IdTokenizer

PYTHON_STDLIB = "python-stdlib"

CHUNK_BYTES = 1 << 20

BENCHMARKS = {
    "blimp": "https://github.com/alexwarstadt/blimp",
    "lambada": "https://huggingface.co/datasets/EleutherAI/lambada_openai",
}
"""What `txl score` knows by name, and where to get it."""

_NO_IDS = "corpus '{}' has no ids, as tokenizer.kind=ids reads: .npy, .npz, .jsonl"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}


def cache_dir() -> Path:
    """Return the directory for files that can be made again; it may not exist yet.

    It is `$TXL_CACHE`, else `$XDG_CACHE_HOME/transformer_xl`, else `~/.cache/transformer_xl`.
    """
    if chosen := os.environ.get("TXL_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "transformer_xl"


def absolute_corpus(corpus: str) -> str:
    """Return a path or glob as an absolute one, so that it means the same from any directory; names stay as they are."""
    path = Path(corpus).expanduser()
    return str(path.absolute()) if corpus and (path.exists() or any(sign in corpus for sign in "*?[/")) else corpus


def data_dir() -> Path:
    """Return the directory for named corpora, `$TXL_DATA` or `corpora` in `cache_dir()`; it may not exist yet."""
    chosen = os.environ.get("TXL_DATA")
    return Path(chosen).expanduser() if chosen else cache_dir() / "corpora"


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in three splits. Nothing is read before it is needed."""

    name: str  # the name or path that the user gave
    files: Sequence[Path]  # all files, in order
    plan: Callable[[], Splits]  # makes the splits; called at most once
    settings: str  # the settings that the splits depend on
    document_separator: str | None = None  # a line that divides documents inside a file, or `EVERY_LINE`
    canonical: NamedCorpus | None = None  # the published sizes that a named corpus must have
    left_out: Sequence[Path] = ()  # binary files of a directory

    @cached_property
    def splits(self) -> Splits:
        """The pieces of train, valid and test; valid and test may be empty."""
        return self.plan()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, as hex, of the files' names, sizes and times and of how they are divided; no content is read."""
        identity = json.dumps([self.name, self._first_seen, self.settings, self.document_separator])
        return hashlib.sha256(identity.encode()).hexdigest()

    @cached_property
    def _first_seen(self) -> list[tuple[str, int, int]]:
        return self._sizes_and_times()

    def _sizes_and_times(self) -> list[tuple[str, int, int]]:
        return [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in self.files]

    def check_unchanged(self) -> None:
        """Raise a `CorpusError` if a file was written to since `fingerprint` was computed."""
        for before, now in zip(self._first_seen, self._sizes_and_times(), strict=True):
            if now != before:
                raise CorpusError(f"'{now[0]}' changed while it was read; try again when nothing writes to it any more")

    def chunks(self, split: SplitName, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Yield the text of a split in chunks that are not empty, cut as in `cut_chunks`, without separator lines."""
        for piece in self.splits[split]:
            yield from read_chunks(piece, chunk_bytes, self.document_separator)

    def ids(self, split: SplitName, tokenizer: IdTokenizer | None = None) -> Iterator[Chunk]:
        """Yield the ids of a split, if the files hold ids; see `read_ids`."""
        for piece in self.splits[split]:
            yield from read_ids(piece, tokenizer)


def corpus_names() -> list[str]:
    """Return the names that `find_corpus` knows."""
    return sorted([PYTHON_STDLIB, *NAMED])


def describe_corpora() -> list[dict[str, str]]:
    """Return name, description, terms and place of every named corpus."""
    entries = [
        {
            "name": PYTHON_STDLIB,
            "description": "source text of the running Python's standard library, about 12 MB; the default",
            "terms": "PSF license",
            "where": "on this machine, as part of Python",
        }
    ]
    for name, corpus in sorted(NAMED.items()):
        splits = _search(name, [data_dir()])
        where = f"in {splits['train'][0].path.parent}" if splits else "not on this machine"
        entries.append({"name": name, "description": corpus.description, "terms": corpus.terms, "where": where})
    return entries


def choose_corpus(config: DataConfig, corpus: str | None) -> DataConfig:
    """Apply `--corpus`: another text, or the directory that holds the named corpus of `config`.

    Paths become absolute, so that a run finds its text again from any directory.
    """
    if corpus is None:
        return config
    if corpus and Path(corpus).is_dir() and config.corpus in NAMED and _search(config.corpus, [Path(corpus)]):
        return config.model_copy(update={"directory": str(Path(corpus).absolute())})
    return DataConfig(**{**config.model_dump(), "corpus": absolute_corpus(corpus)})


def switch_to_ids(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the settings with a tokenizer of ids if the corpus holds ids, unless `overrides` name another kind."""
    wanted = reduce(merge, map(parse_override, overrides), {}).get("tokenizer", {})
    kind, corpus = config.tokenizer.kind, config.data.corpus
    files = [file for file in _files(corpus)[0] if file.name.lower().split(".")[0] not in ABOUT_THE_CORPUS]
    if kind == "ids" or not files or not all(map(is_id_file, files)):
        return config
    if "kind" in wanted:
        if not all(file.suffix == ".jsonl" for file in files):
            raise ConfigError(f"tokenizer.kind ({kind}) reads text, and '{corpus}' holds ids; leave it out, or use ids")
        return config  # lines of JSON are text, too
    return RunConfig(**{**config.model_dump(), "tokenizer": {**wanted, "kind": "ids"}})


def _files(corpus: str) -> tuple[list[Path], Path]:
    """Return the files of a path or glob, in order, and the directory below which their names count; none of a name."""
    path = Path(corpus).expanduser()
    if path.is_file():
        return [path], path.parent
    if path.is_dir():
        return files_below(path), path
    if not glob.has_magic(corpus):
        return [], path
    matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    files = sorted(file for match in matches if (file := Path(match)).is_file())
    return files, Path(*takewhile(lambda part: not glob.has_magic(part), path.parts[:-1]))


def benchmark_files(name: str, folder: Path | None) -> list[Path]:
    """Return the JSON lines of BLiMP or LAMBADA: in a directory or its `data`, or else in `data_dir()/NAME`."""
    place = data_dir() / name if folder is None else folder
    for directory in (place, place / name, place / "data"):
        if files := sorted(file for ending in ("", *COMPRESSED) for file in directory.glob(f"*.jsonl{ending}")):
            return files
    raise CorpusError(
        f"{name}: no .jsonl files in '{place}'; get them from {BENCHMARKS[name]}, and give --data DIR or TXL_DATA"
    )


def find_corpus(config: DataConfig, *, hold_ids: bool = False) -> Corpus:
    """Find the corpus that `config.corpus` means: an existing path, else a glob, else a name. Its content is not read yet.

    Files may be plain or compressed (.gz, .xz, .zst). A directory is read recursively in order of path, without hidden and
    binary files. If the files' names say which is train, valid and test, this decides; otherwise `config.split` divides the
    text. Named corpora always have their published split; one that is neither in `config.directory` nor in `data_dir()` is
    downloaded. With `hold_ids`, only files of ids are read.
    """
    name, path = config.corpus, Path(config.corpus).expanduser()
    files, root = _files(name)
    if files or path.is_dir():
        return _of_files(config, files, root, hold_ids=hold_ids)
    if name not in corpus_names():
        named = f"; {did_you_mean(name, corpus_names())}" if len(path.parts) == 1 else ""
        near = beside(path, Path.exists, lists=False) or named
        why = "a pipe or device; give a file" if path.exists() else f"no such file or name{near}"
        raise CorpusError(f"corpus '{name}': {why}")
    if hold_ids:
        raise CorpusError(_NO_IDS.format(name))
    return _python_stdlib(config) if name == PYTHON_STDLIB else _named(config)


def _of_files(config: DataConfig, files: list[Path], root: Path, *, hold_ids: bool) -> Corpus:
    path, binary = Path(config.corpus).expanduser(), []
    if hold_ids:
        if not (files := list(filter(is_id_file, files))):
            raise CorpusError(_NO_IDS.format(config.corpus))
    elif path.is_dir():
        binary = [file for file in files if kind_of_file(file) == "binary"]
        if binary and len(binary) == len(files):
            raise CorpusError(
                f"corpus '{path}': all {len(files)} files are binary (NUL or control bytes); give a directory of text"
            )
        files = sorted({*files} - {*binary})
    if not any(file.stat().st_size for file in files):
        raise CorpusError(f"corpus '{config.corpus}' is empty; give a file or directory with text")
    if not hold_ids and (array := next(filter(is_array_file, files), None)):
        raise CorpusError(
            f"'{array}' holds ids, and this tokenizer reads text; use tokenizer.kind=ids, and with --from a model of ids"
        )
    splits = splits_by_name(files, root)
    return Corpus(
        config.corpus,
        files=[file.absolute() for file in files],
        plan=lambda: splits or splits_by_ratio(files, config.split, config.separator, hold_ids=hold_ids),
        document_separator=config.separator,
        settings="by name" if splits else f"{config.split}{', whole files if near' * (len(files) > 1)}",
        left_out=binary,
    )


def _python_stdlib(config: DataConfig) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in files_below(root, skip=_NOT_STDLIB) if file.suffix == ".py"]
    if not files:
        raise CorpusError(f"corpus '{PYTHON_STDLIB}': no source files in '{root}'; give another corpus")
    return Corpus(
        PYTHON_STDLIB,
        files=files,
        plan=lambda: splits_by_turns(files, (0.9, 0.05, 0.05)),
        document_separator=config.separator,
        settings="by turns",
    )


def _named(config: DataConfig) -> Corpus:
    name, canonical = config.corpus, NAMED[config.corpus]
    splits = _search(name, [Path(config.directory or data_dir()), data_dir()]) or _search(name, [fetch(name)])
    assert splits is not None
    return Corpus(
        name,
        files=list(dict.fromkeys(path for split in SPLITS for piece in splits[split] for path in piece.paths)),
        plan=lambda: splits,
        document_separator=config.separator,
        canonical=canonical,
        settings=repr(canonical.splits),
    )


def fetch(name: str) -> Path:
    """Download a named corpus to `data_dir()/name`, check size and SHA-256, and return that directory.

    What is there already is not downloaded again.
    """
    if name not in NAMED:
        raise CorpusError(f"cannot download corpus '{name}'; {did_you_mean(name, NAMED)}")
    sources, folder = NAMED[name].sources, data_dir() / name
    if not sources:
        raise CorpusError(
            f"corpus '{name}' is not downloaded automatically; {NAMED[name].how_to_get}, or give the directory that has it "
            "with --corpus DIR or TXL_DATA"
        )
    make_directories(folder)
    busy = f"another process is downloading '{name}'; waiting for it"  # perhaps another process of the same run
    with locked(folder / ".lock", on_busy=lambda: say(busy, quiet=not is_reporter())):
        for source in sources:
            targets = [target for _, target in source.members] or [source.file]
            if all((folder / target).is_file() for target in targets):
                continue
            archive = folder / (source.file or source.urls[0].rsplit("/", 1)[1])
            download(source.urls, archive, size=source.size, sha256=source.sha256)
            if source.members:
                members = {member: folder / target for member, target in source.members}
                unpack(archive, members, limit=source.unpacked_limit)
                archive.unlink()
    return folder


def _search(name: str, directories: list[Path]) -> Splits | None:
    corpus = NAMED[name]
    for directory in directories:
        for folder in [*(directory / usual for usual in (name, *corpus.folders)), directory]:
            splits = {split: _pieces(corpus.splits[split], folder) for split in SPLITS}
            if all(splits.values()):
                return splits
    return None


def _pieces(split: SplitFiles, folder: Path) -> Sequence[FileRange]:
    files = _first_that_match(split.files, folder)
    if not split.translations:
        return [FileRange(file, split.start, split.stop) for file in files]
    pairs = zip(files, _first_that_match(split.translations, folder), strict=False)
    return [FileRange(file, translation=other) for file, other in pairs]


def _first_that_match(names: Sequence[str], folder: Path) -> list[Path]:
    for name in names:
        for ending in ("", *COMPRESSED):
            if files := sorted(file.absolute() for file in folder.glob(name + ending) if file.is_file()):
                return files
    return []
