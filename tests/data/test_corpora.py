import lzma
import re
from pathlib import Path

import pytest

from transformer_xl.config.run import DataConfig
from transformer_xl.data.corpora import Corpus, cache_dir, choose_corpus, data_dir, find_corpus
from transformer_xl.data.named import SPLITS
from transformer_xl.errors import ConfigError, CorpusError


@pytest.fixture(autouse=True)
def no_data(monkeypatch, tmp_path_factory) -> None:
    monkeypatch.setenv("TXL_DATA", str(tmp_path_factory.mktemp("data")))


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


WIKI = [f"wiki.{split}.tokens.xz" for split in SPLITS]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([*WIKI, "README.md", ".hidden"], dict(zip(SPLITS, WIKI, strict=True))),
        (
            ["train/b.txt", "train/a.txt", "validation/c.txt"],
            {"train": "train/a.txttrain/b.txt", "valid": "validation/c.txt", "test": ""},
        ),
        (["train1.txt", "train2.txt"], {"train": "train1.txttrain2.t", "valid": "x", "test": "t"}),  # by ratio
    ],
)
def test_a_directory_by_names_in_order_of_path(tmp_path, names: list[str], expected: dict[str, str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lzma.compress(name.encode()) if name.endswith(".xz") else name.encode())
    assert _texts(_corpus(tmp_path)) == expected
    assert _texts(_corpus(f"{tmp_path}/**/*.*")) == expected


def test_directory_with_a_file_without_split_is_divided_by_ratio(tmp_path) -> None:
    for name in ("train.py", "test.py", "model.py"):
        (tmp_path / name).write_text("x" * 10)
    (tmp_path / "binary").write_bytes(b"\0\1")
    pieces = _corpus(tmp_path).splits
    names = [[piece.path.name for piece in pieces[split]] for split in SPLITS]
    assert names == [["model.py", "test.py", "train.py"], ["train.py"], ["train.py"]]


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
    for name, why in (
        ("wikitext2", "no such file or name; did you mean 'wikitext-2'"),
        (f"{tmp_path}/*.txt", "no such file"),
        ("/dev/null", "a pipe or device"),
    ):
        with pytest.raises(CorpusError, match=rf"corpus '{re.escape(name)}': {why}"):
            find_corpus(DataConfig(corpus=name))
    with pytest.raises(ConfigError, match=r"^corpus \(''\)"):
        choose_corpus(DataConfig(corpus="ptb"), "")
    with pytest.raises(CorpusError, match=r"is empty; give a file or directory with text"):
        _corpus(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match=r"is empty; give a file or directory with text"):
        _corpus(tmp_path / "empty.txt")
    (tmp_path / "empty.txt").write_bytes(b"\0")
    with pytest.raises(CorpusError, match=r"all 1 files are binary \(NUL or control bytes\)"):
        _corpus(tmp_path)


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
