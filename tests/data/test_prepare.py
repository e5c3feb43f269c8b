import hashlib
import json
import os
import select
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.config.run import DataConfig, TokenizerConfig
from transformer_xl.data import encoding
from transformer_xl.data import prepare as prepare_module
from transformer_xl.data.corpora import Corpus
from transformer_xl.data.named import NAMED, SPLITS, SplitFiles
from transformer_xl.data.prepare import PreparedCorpus, prepare
from transformer_xl.data.text import file_text
from transformer_xl.errors import CorpusError, TokenizerError
from transformer_xl.tokenizers.kinds import CharTokenizer, WordTokenizer

_DATA = Path(os.environ.get("TXL_DATA", "no such directory"))
TEXT = "".join(f"The {i}th line, naïve and 東京.\n" for i in range(2000))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def _prepare(path: Path, kind: str = "byte", **options) -> PreparedCorpus:
    tokenizer = options.pop("tokenizer", None) or TokenizerConfig.model_validate({"kind": kind})
    data = DataConfig(corpus=str(path), **options.pop("data", {}))
    return prepare(data, tokenizer, cache=path.parent / "cache", progress=False, **options)


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe", "unigram"])
def test_ids_are_the_text(text: Path, kind: str) -> None:
    prepared = _prepare(text, kind)
    decoded = "".join(prepared.tokenizer.decode(prepared.splits[split].ids[:]) for split in SPLITS)
    assert decoded.replace("\n", "").replace(" ", "") == TEXT.replace("\n", "").replace(" ", "") or kind == "word"
    train = prepared.splits["train"]
    assert train.ids.dtype == np.uint16
    assert train.document_starts.tolist() == [0]
    assert prepared.training_sha256 == hashlib.sha256(train.ids.tobytes()).hexdigest()
    assert sum(prepared.splits[split].n_characters for split in SPLITS) == len(TEXT)
    assert sum(prepared.splits[split].n_bytes for split in SPLITS) == len(TEXT.encode())


def test_what_may_not_be_meant_is_told_once(tmp_path: Path, capsys) -> None:
    folder, noise = tmp_path / "folder", tmp_path / "noise.bin"
    folder.mkdir()
    for name in "abcde":
        (folder / f"{name}.png").write_bytes(b"\0")
    for i in range(3):
        (folder / f"{i}.txt").write_text(TEXT, encoding="utf-8")
    noise.write_bytes(np.random.default_rng(0).bytes(10_000))
    cache = tmp_path / "cache"
    prepare(DataConfig(corpus=str(folder)), TokenizerConfig(), cache=cache)
    binary, cut = capsys.readouterr().err.splitlines()
    assert "5 of 8 files" in binary and "a.png, b.png, c.png and 2 more" in binary
    assert "the 3 files" in cut and "data.split" in cut
    prepare(DataConfig(corpus=str(folder)), TokenizerConfig(), cache=cache)
    assert not capsys.readouterr().err
    prepare(DataConfig(corpus=str(noise)), TokenizerConfig(), cache=cache)
    assert "noise.bin of '" in capsys.readouterr().err


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
    with pytest.raises(CorpusError, match=r"text.txt', from byte 0 on: character T \(U\+0054\) is not in the tokenizer's"):
        _prepare(text, tokenizer=CharTokenizer("a"))


def test_number_of_workers_does_not_matter(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(encoding, "BATCH_BYTES", 5000)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(TEXT[i * 500 : i * 3000])
    results = []
    for n_workers in (1, 2):
        prepared = prepare(
            DataConfig(corpus=str(folder), split=(1, 0, 0)),
            TokenizerConfig(kind="bpe", vocab_size=300),
            cache=tmp_path / str(n_workers),
            n_workers=n_workers,
            progress=False,
        )
        results.append({path.name: path.read_bytes() for path in prepared.directory.iterdir()})
    assert results[0] == results[1]


DAMAGE = [("train.bin", "cut"), ("documents.valid.bin", "remove"), ("manifest.json", "cut"), ("manifest.json", "remove")]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_damaged_cache_is_rebuilt_with_a_notice(text: Path, name: str, damage: str, capsys) -> None:
    first = _prepare(text)
    path = first.directory / name
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-8])  # whole numbers
    else:
        path.unlink()
    again = _prepare(text)
    assert capsys.readouterr().err == f"prepared corpus '{first.directory}' is damaged; preparing it again\n"
    assert path.read_bytes() == content
    assert np.array_equal(again.splits["train"].ids, np.frombuffer(TEXT.encode()[: len(again.splits["train"].ids)], np.uint8))
    assert _directories(text.parent / "cache") == [first.directory]


def _directories(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_an_interruption_leaves_nothing(text: Path, monkeypatch) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "replace_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _prepare(text)
    assert _directories(text.parent / "cache") == []
    assert len(_prepare(text).splits["train"].ids)


KILLED = """
import os, sys
from transformer_xl.config.run import *
from transformer_xl.data import encoding, prepare as p
encoding.BATCH_BYTES = 1000
located = p.Corpus.chunks
p.Corpus.chunks = lambda self, split: located(self, split, 1000)
def die(*_):
    os.kill(os.getpid(), 9)
def after(n):
    encode = p.encode_chunks
    def encode_and_die(*args, **kwargs):
        for i, batch in enumerate(encode(*args, **kwargs)):
            yield batch
            if i == n:
                die()
    p.encode_chunks = encode_and_die
match sys.argv[3]:
    case "batch": after(3)
    case "files": p.replace_file = die
    case "all": p.Path.rename = die
data = DataConfig(corpus=sys.argv[1], documents="lines")
p.prepare(data, TokenizerConfig(kind="word"), cache=p.Path(sys.argv[2]), n_workers=1)
"""


@pytest.mark.parametrize("moment", ["batch", "files", "all"])
def test_what_a_kill_leaves_is_not_taken_for_whole(text: Path, monkeypatch, moment: str) -> None:
    cache = text.parent / "cache"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(text), str(cache), moment], check=False)
    assert killed.returncode == -9
    (left,) = _directories(cache)
    assert left.suffix == ".unfinished"
    whole = _contents(_of_words(text, "whole"))
    monkeypatch.setattr(prepare_module, "_train", None)  # the vocabulary is kept
    again = _of_words(text, "cache")
    assert _contents(again) == whole
    assert _directories(cache) == [again.directory]


def _contents(prepared: PreparedCorpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prepared.directory.iterdir()}


def _of_words(text: Path, cache: str) -> PreparedCorpus:
    data = DataConfig(corpus=str(text), documents="lines")
    return prepare(data, TokenizerConfig(kind="word"), cache=text.parent / cache, progress=False)


def test_a_damaged_vocabulary_is_learned_again(text: Path) -> None:
    first = _of_words(text, "cache")
    (learned,) = (text.parent / "cache").glob("*.json")
    learned.write_bytes(learned.read_bytes()[:-9])
    assert _of_words(text, "cache").tokenizer.fingerprint == first.tokenizer.fingerprint


def test_a_vocabulary_is_kept_whatever_padding_of_ids_would_be(text: Path, monkeypatch) -> None:
    _of_words(text, "cache")
    monkeypatch.setattr(prepare_module, "_train", None)
    assert prepare(
        DataConfig(corpus=str(text), documents="lines"), TokenizerConfig(kind="word", pad_id=3), cache=text.parent / "cache"
    )


def test_a_text_that_changes_while_it_is_read(text: Path, monkeypatch) -> None:
    located = Corpus.chunks

    def chunks(self, split):
        text.write_text(TEXT + "more", encoding="utf-8")
        return located(self, split)

    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "chunks", chunks)
        with pytest.raises(CorpusError, match=r"text.txt' changed while it was read; try again when nothing writes to it"):
            _prepare(text)
    prepared = _prepare(text)
    assert sum(prepared.splits[split].n_bytes for split in SPLITS) == len(TEXT.encode()) + 4


PREPARER = """
import sys, time
from transformer_xl.config.run import *
from transformer_xl.data import prepare as p
build = p._build
def slow_build(*args, **kwargs):
    print("builds", flush=True)
    sys.stdin.readline()
    return build(*args, **kwargs)
p._build = slow_build
prepared = p.prepare(DataConfig(corpus=sys.argv[1]), TokenizerConfig(), cache=p.Path(sys.argv[2]))
print(len(prepared.splits["train"].ids), flush=True)
"""


def test_of_many_processes_one_works_and_the_next_if_it_is_killed(text: Path) -> None:
    """The ranks of a training run do this at the same time."""
    command, pipe = [sys.executable, "-c", PREPARER, str(text), str(text.parent / "cache")], subprocess.PIPE
    with ExitStack() as stack:
        ranks = [stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)) for _ in range(3)]
        for rank in ranks:
            stack.callback(rank.kill)
        first = _who_builds(ranks)
        waiting = [rank for rank in ranks if rank is not first]
        for rank in waiting:
            assert rank.stderr is not None
            assert b"another process is preparing" in rank.stderr.readline()
        first.kill()
        second = _who_builds(waiting)
        assert second.stdin is not None
        second.stdin.write(b"\n")
        second.stdin.flush()
        printed = [rank.communicate(timeout=60)[0] for rank in waiting]
    assert len(set(printed)) == 1
    assert int(printed[0]) == len(_prepare(text).splits["train"].ids)


def _who_builds(processes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Return the only process that prints this."""
    streams = {process.stdout: process for process in processes if process.stdout is not None}
    ready, _, _ = select.select(list(streams), [], [], 60)
    (stdout,) = ready
    assert stdout.readline() == b"builds\n"
    return streams[stdout]


def _small_chunks(monkeypatch) -> None:
    located = Corpus.chunks
    monkeypatch.setattr(Corpus, "chunks", lambda self, split: located(self, split, 1000))


def test_documents_without_a_word_are_no_documents_of_words(tmp_path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in {"train1": "ab\n--\n\n", "train2": " ", "train3": "cd\n--\n   \n--\nef\n", "valid": "x"}.items():
        (folder / f"{name}.txt").write_text(content)
    data = {"document_separator": "--"}
    byte = _prepare(folder, data=data).splits["train"]
    assert bytes(byte.ids[:].astype(np.uint8)) == b"ab\n\n cd\n   \nef\n"
    assert byte.document_starts.tolist() == [0, 3, 4, 5, 8, 12]
    assert _prepare(folder, "word", data=data).splits["train"].document_starts.tolist() == [0, 2, 3, 5, 6]
    large = WordTokenizer(["<unk>", "<eos>", *map(str, range(65_536)), "ab"])
    assert _prepare(folder, tokenizer=large, data=data).splits["train"].ids[:2].tolist() == [65538, 1]  # as uint32
    assert file_text(folder / "train1.txt", large).ids[:2].tolist() == [65538, 1]


@pytest.mark.parametrize("separator", [None, "--"])
def test_documents_of_any_length_in_batches(tmp_path, monkeypatch, separator: str | None) -> None:
    """Text of several batches, of one byte, and without any byte."""
    _small_chunks(monkeypatch)
    (tmp_path / "text").mkdir()
    for i, content in enumerate(["a" * 12_000, "", "b", "c\n--\n" * 900, "--\n--\n", "d" * 5_000, "e" * 4_999 + "\n", "f"]):
        (tmp_path / "text" / f"{i}.txt").write_text(content)
    data = DataConfig(corpus=str(tmp_path / "text"), document_separator=separator, split=(1, 0, 0))
    found = []
    for n_bytes in (1 << 20, 5000):
        monkeypatch.setattr(encoding, "BATCH_BYTES", n_bytes)
        prepared = prepare(data, TokenizerConfig(), cache=tmp_path / str(n_bytes), progress=False)
        found.append((prepared.splits["train"].ids.tolist(), prepared.splits["train"].document_starts.tolist()))
        assert all(prepared.splits[split].document_starts.tolist() == [] for split in ("valid", "test"))
    assert found[0] == found[1]
    n_documents = 7 if separator is None else 905
    assert len(found[0][1]) == n_documents


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe", "unigram"])
def test_lines_are_documents(tmp_path, kind: str) -> None:
    lines = ["one two\n", "\n", "thrée\rfour\n", " \n", "five five\n"] * 3 + ["no end"]
    (tmp_path / "text.txt").write_bytes("".join(lines).encode())
    config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 270 if kind in ("bpe", "unigram") else None})
    train = _prepare(tmp_path / "text.txt", tokenizer=config, data={"documents": "lines", "split": (1, 0, 0)})
    tokenizer, split = train.tokenizer, train.splits["train"]
    ends = [*split.document_starts[1:].tolist(), len(split.ids)]
    texts = [tokenizer.decode(split.ids[a:b]) for a, b in zip(split.document_starts.tolist(), ends, strict=True)]
    expected = lines if kind not in ("word", "unigram") else [tokenizer.decode(tokenizer.encode(line)) for line in lines]
    assert texts == expected


def test_no_tokens(text: Path) -> None:
    text.write_text(" ")
    with pytest.raises(CorpusError, match=r"has no tokens in its train split; give more text or another data.split"):
        _prepare(text, tokenizer=WordTokenizer(["<unk>", "<eos>"]))
    with pytest.raises(TokenizerError, match=r"text.txt': no words to learn"):
        _prepare(text, "word")


def test_text_that_is_not_utf8(text: Path) -> None:
    text.write_bytes(b"ok\n" * 10 + b"\xff")
    assert _prepare(text).splits["test"].ids[-1] == 0xFF
    with pytest.raises(CorpusError, match=r"text.txt': byte 30 \(0xff\) is not UTF-8; .* use tokenizer.kind=byte"):
        _prepare(text, "bpe", n_workers=2, data={"split": (1, 0, 0)})


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
    with pytest.raises(CorpusError, match=r"corpus 'text8' \(test has 5 bytes, expected 4\)"):
        prepare(
            DataConfig(corpus="text8", directory=str(tmp_path)), TokenizerConfig(), cache=tmp_path / "cache", progress=False
        )


def test_content_of_named_corpora_is_checked_before_use(tmp_path) -> None:
    (tmp_path / "ptb").mkdir()
    for split in SPLITS:
        (tmp_path / "ptb" / f"{split}.txt").write_text("a b\n")
    with pytest.raises(CorpusError, match=rf"sha256 01186fcf04b4…, expected fcea919f6cf8…\); .*data.corpus={tmp_path / 'ptb'}"):
        prepare(DataConfig(corpus="ptb", directory=str(tmp_path)), TokenizerConfig(), cache=tmp_path / "cache", progress=False)
    assert _directories(tmp_path / "cache") == [], "nothing is left behind"


@pytest.mark.data
@pytest.mark.parametrize("name", ["ptb", "wikitext-2"])
def test_real_word_counts(name: str, tmp_path) -> None:
    if not (_DATA / name).is_dir():
        pytest.skip(f"'{_DATA / name}' does not exist; set TXL_DATA to a directory with real corpora")
    config = DataConfig(corpus=name, directory=str(_DATA))
    prepared = prepare(config, TokenizerConfig(kind="word"), cache=tmp_path, progress=False)
    assert prepared.tokenizer.vocab_size == {"ptb": 10_000, "wikitext-2": 33_278}[name]
    for split in SPLITS:
        assert len(prepared.splits[split].ids) == NAMED[name].splits[split].n_tokens
    manifest = json.loads((prepared.directory / "manifest.json").read_text())
    assert manifest["corpus"] == name
