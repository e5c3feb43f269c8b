import lzma
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from transformer_xl.config.run import DataConfig
from transformer_xl.data.corpora import Corpus, cache_dir, choose_corpus, data_dir, find_corpus
from transformer_xl.data.named import SPLITS
from transformer_xl.data.text_files import Chunk
from transformer_xl.errors import ConfigError, CorpusError

_DATA = Path(os.environ.get("TXL_DATA", "no such directory"))


@pytest.fixture(autouse=True)
def no_data(monkeypatch, tmp_path_factory) -> None:
    monkeypatch.setenv("TXL_DATA", str(tmp_path_factory.mktemp("data")))


def real_corpus(name: str) -> Corpus:
    """Return a real corpus, or skip the test."""
    if not (_DATA / name).is_dir():
        pytest.skip(f"'{_DATA / name}' does not exist; set TXL_DATA to a directory with real corpora")
    return find_corpus(DataConfig(corpus=name, directory=str(_DATA)))


def _texts(corpus: Corpus) -> dict[str, str]:
    return {split: "".join(chunk.text() for chunk in corpus.chunks(split)) for split in SPLITS}


def _corpus(path, **config) -> Corpus:
    return find_corpus(DataConfig(corpus=str(path), **config))


def test_one_file_is_cut_by_ratio_between_code_points(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("é" * 100, encoding="utf-8")
    assert {split: len(text) for split, text in _texts(_corpus(path)).items()} == {"train": 90, "valid": 5, "test": 5}
    path.write_text("東" * 7, encoding="utf-8")
    texts = _texts(_corpus(path, split=(0.5, 0.5, 0)))
    assert texts == {"train": "東東東東", "valid": "東東東", "test": ""}


@pytest.mark.parametrize("ending", ["", ".xz"])
def test_directory_by_names(tmp_path, ending: str) -> None:
    compress = lzma.compress if ending else bytes
    for name in ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"):
        (tmp_path / f"{name}{ending}").write_bytes(compress(name.encode()))
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden").write_text("hidden")
    expected = {split: f"wiki.{split}.tokens" for split in SPLITS}
    assert _texts(_corpus(tmp_path)) == expected
    assert _texts(_corpus(f"{tmp_path}/wiki*")) == expected


def test_directory_by_subdirectories_in_order_of_path(tmp_path) -> None:
    for name in ("train/b.txt", "train/a.txt", "validation/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert _texts(_corpus(tmp_path)) == {"train": "train/a.txttrain/b.txt", "valid": "validation/c.txt", "test": ""}


def test_directory_with_a_file_without_split_is_divided_by_ratio(tmp_path) -> None:
    for name in ("train.py", "test.py", "model.py"):
        (tmp_path / name).write_text("x" * 10)
    (tmp_path / "binary").write_bytes(b"\0\1")
    pieces = _corpus(tmp_path).splits
    names = [[piece.path.name for piece in pieces[split]] for split in SPLITS]
    assert names == [["model.py", "test.py", "train.py"], ["train.py"], ["train.py"]]


def test_files_of_train_alone_are_divided_by_ratio(tmp_path) -> None:
    for name in ("train1.txt", "train2.txt"):
        (tmp_path / name).write_text("x" * 100)
    assert {split: len(text) for split, text in _texts(_corpus(tmp_path)).items()} == {"train": 180, "valid": 10, "test": 10}


def _documents(chunks: Iterable[Chunk]) -> list[tuple[bytes, bool]]:
    return [(chunk.data, chunk.starts_document) for chunk in chunks]


def test_documents_begin_with_files_and_separators(tmp_path) -> None:
    (tmp_path / "train.txt").write_text("a\n---\nb\n")
    (tmp_path / "train2.txt").write_text("c\n")
    (tmp_path / "valid.txt").write_text("d")
    corpus = _corpus(tmp_path, document_separator="---")
    assert _documents(corpus.chunks("train")) == [(b"a\n", True), (b"b\n", True), (b"c\n", True)]
    assert _documents(_corpus(tmp_path).chunks("train", 4)) == [
        (b"a\n", True),
        (b"---\n", False),
        (b"b\n", False),
        (b"c\n", True),
    ]


def test_cut_moves_to_the_next_separator(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{'x' * 30}{i}\n---\n" for i in range(200)))
    texts = _texts(_corpus(tmp_path, document_separator="---"))
    assert all(text.startswith("x" * 30) and text.endswith("\n") for text in texts.values())
    assert [text.count("\n") for text in texts.values()] == [181, 10, 9]


def test_standard_library() -> None:
    corpus = find_corpus(DataConfig(corpus="python-stdlib"))
    sizes = {split: sum(piece.path.stat().st_size for piece in corpus.splits[split]) for split in SPLITS}
    total = sum(sizes.values())
    assert total > 5e6
    assert abs(sizes["train"] / total - 0.9) < 0.01
    assert abs(sizes["valid"] / total - 0.05) < 0.01
    assert not any({"site-packages", "test"} & set(file.parts) for file in corpus.files)
    assert corpus.fingerprint == find_corpus(DataConfig(corpus="python-stdlib")).fingerprint


def test_fingerprint_follows_files_and_settings(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    first = _corpus(path).fingerprint
    assert _corpus(path).fingerprint == first
    assert _corpus(path, split=(0.8, 0.1, 0.1)).fingerprint != first
    assert _corpus(path, document_separator="-").fingerprint != first
    path.write_text("text!")
    assert _corpus(path).fingerprint != first


def test_nothing_there(tmp_path) -> None:
    for name, near in (("wikitext2", "; did you mean 'wikitext-2'"), (f"{tmp_path}/*.txt", "")):
        with pytest.raises(CorpusError, match=rf"corpus '{re.escape(name)}': no such file or name{near}"):
            find_corpus(DataConfig(corpus=name))
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/null", f"{tmp_path}/pipe"):
        with pytest.raises(CorpusError, match=rf"corpus '{re.escape(name)}': a pipe or device; give a file$"):
            find_corpus(DataConfig(corpus=name))
    (tmp_path / "pipe").unlink()
    for make in (lambda: DataConfig(corpus=""), lambda: choose_corpus(DataConfig(corpus="ptb"), "")):
        with pytest.raises(ConfigError, match=r"^corpus \(''\)"):
            make()
    with pytest.raises(CorpusError, match=r"is empty; give a file or directory with text"):
        _corpus(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match=r"is empty; give a file or directory with text"):
        _corpus(tmp_path / "empty.txt")
    (tmp_path / "empty.txt").write_bytes(b"\0")
    with pytest.raises(CorpusError, match=r"all 1 files are binary \(NUL or control bytes\)"):
        _corpus(tmp_path)


def test_shrunk_while_reading(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x\n" * 500_000)
    chunks = _corpus(path).chunks("train", 1000)
    next(chunks)
    path.write_text("x")
    with pytest.raises(CorpusError, match=r"ends at byte .* it is incomplete or was changed while being read"):
        list(chunks)


def test_not_utf8(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"ok\n" * 400_000 + b"\xff" + b"ok\n" * 100)
    message = r"a.txt': byte 1200000 \(0xff\) is not UTF-8; convert it .*, or use tokenizer.kind=byte"
    with pytest.raises(CorpusError, match=message):
        for chunk in _corpus(path, split=(1, 0, 0)).chunks("train"):
            chunk.text()


def test_named_corpus_in_a_directory(tmp_path) -> None:
    folder = tmp_path / "ptb"
    folder.mkdir()
    for split in SPLITS:
        (folder / f"{split}.txt.xz").write_bytes(lzma.compress(split.encode()))
    expected = {split: split for split in SPLITS}
    for directory in (tmp_path, folder):
        assert _texts(find_corpus(DataConfig(corpus="ptb", directory=str(directory)))) == expected
    with pytest.raises(CorpusError, match=r"corpus 'pg19' is not downloaded automatically; gsutil .*--corpus DIR or TXL_DATA"):
        find_corpus(DataConfig(corpus="pg19"))


def test_two_languages_become_pairs_line_by_line(tmp_path) -> None:
    """In both directions, from files that are packed or not; a tab inside a line would end the source."""
    folder = tmp_path / "multi30k"
    folder.mkdir()
    for name in ("train", "val", "test_2016_flickr"):
        (folder / f"{name}.en").write_bytes(f"a\t{name} \r\n\nb\n".encode())
        (folder / f"{name}.de.xz").write_bytes(lzma.compress("ä\n\nö".encode()))
    there, back = (
        find_corpus(DataConfig(corpus=f"multi30k-{direction}", documents="lines", directory=str(tmp_path)))
        for direction in ("en-de", "de-en")
    )
    assert _texts(there)["valid"] == "a val \tä\n\t\nb\tö\n"
    assert _texts(back)["test"] == "ä\ta test_2016_flickr \n\t\nö\tb\n"
    assert len(there.files) == len(set(there.files)) == 6 and there.fingerprint != back.fingerprint
    (folder / "val.en").write_bytes(b"a\n")
    with pytest.raises(CorpusError, match=r"val.en' ends before line 2, which '.*val.de.xz' has; they must have as many lines"):
        list(there.chunks("valid"))
    (folder / "val.en").unlink()
    with pytest.raises(CorpusError, match=r"corpus 'multi30k-de-en' is not downloaded .*; get train, val and test_2016"):
        find_corpus(DataConfig(corpus="multi30k-de-en", directory=str(tmp_path)))


@pytest.mark.data
def test_real_tiny_shakespeare_split() -> None:
    texts = _texts(real_corpus("tinyshakespeare"))
    assert len(texts["train"]) == 1_003_854
    assert len(texts["valid"]) == 111_540
    assert texts["test"] == texts["valid"]


def test_a_directory_that_holds_the_named_corpus_is_remembered(tmp_path) -> None:
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text("to be")
    chosen = choose_corpus(DataConfig(corpus="tinyshakespeare"), str(tmp_path))
    assert (chosen.corpus, chosen.directory) == ("tinyshakespeare", str(tmp_path))
    assert find_corpus(chosen).name == "tinyshakespeare"
    other = choose_corpus(DataConfig(corpus="ptb"), str(tmp_path))
    assert (other.corpus, other.directory) == (str(tmp_path), None), "it holds no PTB, so it is a text of its own"


def test_directories(monkeypatch) -> None:
    for name in ("TXL_CACHE", "TXL_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/transformer_xl")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/transformer_xl")
    monkeypatch.setenv("TXL_CACHE", "~/cache")
    assert cache_dir() == Path("/home/someone/cache")
    assert data_dir() == Path("/home/someone/cache/corpora")
    monkeypatch.setenv("TXL_DATA", "/data")
    assert data_dir() == Path("/data")
