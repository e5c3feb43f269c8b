import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.config import DataConfig, TokenizerConfig
from transformer_xl.data import encoding
from transformer_xl.data import prepare as prepare_module
from transformer_xl.data.named import NAMED, SPLITS, SplitFiles
from transformer_xl.data.prepare import PreparedCorpus, prepare
from transformer_xl.data.tokenizers import CharTokenizer, WordTokenizer
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError

_DATA = Path(os.environ.get("TXL_DATA", "no such directory"))
TEXT = "".join(f"The {i}th line, naïve and 東京.\n" for i in range(2000))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def _prepare(path: Path, kind: str = "byte", **options) -> PreparedCorpus:
    tokenizer = options.pop("tokenizer", None) or TokenizerConfig(kind=kind)
    data = DataConfig(corpus=str(path), **options.pop("data", {}))
    return prepare(data, tokenizer, cache=path.parent / "cache", progress=False, **options)


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe"])
def test_ids_are_the_text(text: Path, kind: str) -> None:
    prepared = _prepare(text, kind)
    decoded = "".join(prepared.tokenizer.decode(prepared.splits[split].ids) for split in SPLITS)
    assert decoded.replace("\n", "").replace(" ", "") == TEXT.replace("\n", "").replace(" ", "") or kind == "word"
    train = prepared.splits["train"]
    assert train.ids.dtype == np.uint16
    assert train.document_starts.tolist() == [0]
    assert sum(prepared.splits[split].n_characters for split in SPLITS) == len(TEXT)
    assert sum(prepared.splits[split].n_bytes for split in SPLITS) == len(TEXT.encode())


def test_second_run_only_opens(text: Path, monkeypatch) -> None:
    first = _prepare(text, "char")
    monkeypatch.setattr(prepare_module, "_build", None)
    second = _prepare(text, "char")
    assert second.directory == first.directory
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert np.array_equal(second.splits["train"].ids, first.splits["train"].ids)


def test_a_trained_tokenizer_can_be_given(text: Path) -> None:
    tokenizer = CharTokenizer(set(TEXT) | {"z"})
    assert _prepare(text, tokenizer=tokenizer).tokenizer.fingerprint == tokenizer.fingerprint
    with pytest.raises(CorpusError, match=r"text.txt', from byte 0 on: character 'T' \(U\+0054\) is not in the tokenizer's"):
        _prepare(text, tokenizer=CharTokenizer("a"))


def test_large_vocabularies_are_stored_as_uint32(text: Path) -> None:
    tokenizer = WordTokenizer(["<unk>", "<eos>", *map(str, range(65_536))])
    text.write_text("7 65535\n" * 20)
    assert _prepare(text, tokenizer=tokenizer).splits["train"].ids[:3].tolist() == [9, 65537, 1]


def test_documents(tmp_path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train1.txt").write_text("ab\n--\n\n")
    (folder / "train2.txt").write_text("")
    (folder / "train3.txt").write_text("cd\n--\n   \n--\nef\n")
    (folder / "valid.txt").write_text("x")
    data = {"document_separator": "--"}
    byte = _prepare(folder, data=data).splits["train"]
    assert bytes(byte.ids.astype(np.uint8)) == b"ab\n\ncd\n   \nef\n"
    assert byte.document_starts.tolist() == [0, 3, 4, 7, 11]
    words = _prepare(folder, "word", data=data).splits["train"]
    assert words.document_starts.tolist() == [0, 2, 3, 5, 6]
    assert _prepare(folder, data=data).splits["test"].ids.shape == (0,)


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_number_of_workers_does_not_matter(text: Path, kind: str, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(encoding, "BATCH_BYTES", 5000)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(TEXT[i * 500 : i * 3000])
    results = []
    for n_workers in (1, 2):
        prepared = prepare(
            DataConfig(corpus=str(folder)),
            TokenizerConfig(kind=kind, vocab_size=300),
            cache=tmp_path / str(n_workers),
            n_workers=n_workers,
            progress=False,
        )
        results.append({path.name: path.read_bytes() for path in prepared.directory.iterdir()})
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "manifest.json", "documents.valid.npy"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_cache_is_rebuilt_with_a_notice(text: Path, name: str, damage: str, capsys) -> None:
    first = _prepare(text)
    path = first.directory / name
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    again = _prepare(text)
    notice = capsys.readouterr().err
    assert notice.count("\n") == 1
    assert "is damaged (" in notice
    assert "); preparing it again" in notice
    assert path.read_bytes() == content
    assert np.array_equal(again.splits["train"].ids, np.frombuffer(TEXT.encode()[: len(again.splits["train"].ids)], np.uint8))
    assert len([path for path in first.directory.parent.iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_interruption_leaves_nothing(text: Path, monkeypatch, interruption) -> None:
    def interrupt(*args, **kwargs):
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_size_and_hash", interrupt)
        with pytest.raises(interruption):
            _prepare(text)
    assert list((text.parent / "cache").iterdir()) == []
    assert len(_prepare(text).splits["train"].ids)


def test_killed_process_leaves_nothing_that_is_used(text: Path) -> None:
    code = (
        "import os, sys; from transformer_xl.config import *; from transformer_xl.data import prepare as p\n"
        "p._size_and_hash = lambda path: os._exit(9)\n"
        "p.prepare(DataConfig(corpus=sys.argv[1]), TokenizerConfig(), cache=p.Path(sys.argv[2]))"
    )
    cache = text.parent / "cache"
    killed = subprocess.run([sys.executable, "-c", code, str(text), str(cache)], check=False)
    assert killed.returncode == 9
    (left,) = cache.iterdir()
    assert ".tmp-" in left.name
    assert len(_prepare(text).splits["train"].ids)
    assert left.exists()  # perhaps still in use by another machine …
    os.utime(left, (0, 0))
    _prepare(text, "char")
    assert not left.exists()  # … but not after a day


def test_two_at_the_same_time(text: Path, monkeypatch) -> None:
    build = prepare_module._build

    def slow_build(*args, **kwargs):
        build(*args, **kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(prepare_module, "_build", build)
            patch.setattr(prepare_module.os, "getpid", lambda: 1)
            _prepare(text)  # the other process is faster

    monkeypatch.setattr(prepare_module, "_build", slow_build)
    assert len(_prepare(text).splits["train"].ids)
    assert len([path for path in (text.parent / "cache").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_full_disk(text: Path, monkeypatch, code: int) -> None:
    def full(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(prepare_module.np, "save", full)
    message = rf"cannot write the prepared corpus in '.*cache': {os.strerror(code)}; free space there or set TXL_CACHE"
    with pytest.raises(CorpusError, match=message):
        _prepare(text)
    assert list((text.parent / "cache").iterdir()) == []


def test_no_tokens(text: Path) -> None:
    text.write_text(" ")
    with pytest.raises(CorpusError, match=r"has no tokens in its train split; give more text or another data.split"):
        _prepare(text, tokenizer=WordTokenizer(["<unk>", "<eos>"]))
    with pytest.raises(TokenizerError, match=r"text.txt': no words to learn"):
        _prepare(text, "word")


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_text_that_is_not_utf8(text: Path, kind: str) -> None:
    text.write_bytes(b"ok\n" * 10 + b"\xff")
    assert _prepare(text).splits["test"].ids[-1] == 0xFF
    with pytest.raises(
        CorpusError, match=r"text.txt' is not UTF-8 at byte 30 \(0xff\); convert it, or use tokenizer.kind=byte"
    ):
        _prepare(text, kind, n_workers=2, data={"split": (1, 0, 0)})


def test_dead_workers_are_reported(text: Path, monkeypatch) -> None:
    monkeypatch.setattr(encoding, "_encode_in_worker", _die)
    with pytest.raises(CorpusError, match=r"an encoding process died, for lack of memory or because .*; use n_workers=1"):
        _prepare(text, n_workers=2)


def _die(batch) -> None:
    os._exit(1)


def test_canonical_sizes_are_checked(tmp_path, monkeypatch) -> None:
    splits = {
        name: SplitFiles(("text8",), n_bytes=4, start=start, stop=stop)
        for name, start, stop in zip(SPLITS, (0, 4, 8), (4, 8, None), strict=True)
    }
    monkeypatch.setitem(NAMED, "text8", replace(NAMED["text8"], splits=splits))
    (tmp_path / "text8").write_text("one two three")
    with pytest.raises(
        CorpusError, match=r"test split of corpus 'text8' has 5 bytes, expected 4; '.*text8' is another version"
    ):
        prepare(DataConfig(corpus="text8"), TokenizerConfig(), search=[tmp_path], cache=tmp_path / "cache", progress=False)


def test_content_of_named_corpora_is_checked_before_use(tmp_path) -> None:
    (tmp_path / "ptb").mkdir()
    for split in SPLITS:
        (tmp_path / "ptb" / f"{split}.txt").write_text("a b\n")
    message = r"train.txt' is not the published text of corpus 'ptb' \(sha256 01186fcf04b4…, expected fcea919f6cf8…\)"
    with pytest.raises(CorpusError, match=message):
        prepare(DataConfig(corpus="ptb"), TokenizerConfig(), search=[tmp_path], cache=tmp_path / "cache", progress=False)
    assert not list((tmp_path / "cache").glob("*")), "nothing is left behind"


def test_a_run_finds_what_was_prepared_for_its_training(tmp_path) -> None:
    """Training learns a tokenizer, scoring and resuming bring it: the ids are written once."""
    (tmp_path / "text.txt").write_text("one two three\n" * 50)
    config, cache = DataConfig(corpus=str(tmp_path / "text.txt")), tmp_path / "cache"
    first = prepare(config, TokenizerConfig(kind="char"), cache=cache, progress=False)
    again = prepare(config, first.tokenizer, cache=cache, progress=False)
    assert again.directory == first.directory
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_no_workers_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"n_workers \(0\) must be at least 1"):
        prepare(DataConfig(), TokenizerConfig(), cache=tmp_path, n_workers=0, progress=False)


@pytest.mark.data
@pytest.mark.parametrize("name", ["ptb", "wikitext-2"])
def test_real_word_counts(name: str, tmp_path) -> None:
    if not (_DATA / name).is_dir():
        pytest.skip(f"'{_DATA / name}' does not exist; set TXL_DATA to a directory with real corpora")
    config = DataConfig(corpus=name)
    prepared = prepare(config, TokenizerConfig(kind="word"), search=[_DATA], cache=tmp_path, progress=False)
    assert prepared.tokenizer.vocab_size == NAMED[name].vocabulary
    for split in SPLITS:
        assert len(prepared.splits[split].ids) == NAMED[name].splits[split].n_tokens
    manifest = json.loads((prepared.directory / "manifest.json").read_text())
    assert manifest["corpus"]["name"] == name
