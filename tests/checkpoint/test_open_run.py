"""Runs and exported models are opened with their device and way of reading; texts are counted correctly."""

import gzip
import hashlib
import math
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import tiny_model
from tests.training.helpers import write_recipe, write_text
from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import DataConfig, RunConfig, TokenizerConfig
from transformer_xl.data.prepare import prepare
from transformer_xl.data.text import Text, file_text, split_text, text_difference
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.reading import Reading
from transformer_xl.tokenizers.kinds import ByteTokenizer, CharTokenizer, train_tokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.run import train


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with text.txt, the run `run` and the exported model `exported`."""
    home = tmp_path_factory.mktemp("home")
    write_text(home / "text.txt")
    write_recipe(home / "tiny.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TXL_CACHE", str(home / "cache"))
        patch.setattr("transformer_xl.training.record._tensorboard", lambda *_: None)
        how: dict[str, Any] = {"overrides": ["train.max_steps=2", "eval.mem_len=9", "eval.ext_len=1"]}
        train(str(home / "tiny.toml"), out=home / "run", corpus=str(home / "text.txt"), **how, display=Display(quiet=True))
    tiny_model(vocab_size=256).save_pretrained(home / "exported", tokenizer=ByteTokenizer())
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("TXL_CACHE", str(home / "cache"))


def test_a_run_is_read_as_it_says_and_has_a_text_of_its_own() -> None:
    opened = open_run("run", device="cpu")
    assert (opened.source, opened.is_run, opened.config.name) == ("run", True, "tiny")
    assert (opened.device.type, opened.model.training) == ("cpu", False)
    own = Reading(tgt_len=5, mem_len=9, ext_len=1, batch_size=2, precision="auto")
    assert opened.reading() == own
    assert opened.reading(mem_len=3, ext_len=0, same_length=None) == replace(own, mem_len=3, ext_len=0)
    assert opened.text().what.startswith("test split of ")
    assert opened.text(split="valid").what.startswith("valid split of ")
    assert len(opened.text(limit=7).ids) == 8


def test_a_directory_without_a_model_is_none_and_one_near_is_named(tmp_path: Path) -> None:
    shutil.copytree("exported", tmp_path / "model")
    (tmp_path / "models").mkdir()
    with pytest.raises(CheckpointError, match=r"is a directory without config.json, and not that of a model; .*model'"):
        open_run(tmp_path / "models")


def test_an_exported_model_needs_a_text() -> None:
    opened = open_run(Path("exported"))
    assert (opened.is_run, opened.config.model) == (False, opened.model.config)
    assert opened.n_parameter == sum(parameter.numel() for parameter in opened.model.parameters())
    with pytest.raises(ConfigError, match=r"^'exported' is a model without a corpus of its own; give --file or --corpus$"):
        opened.text()
    assert opened.text(corpus="text.txt").what.startswith("test split of ")
    text = opened.text(file=Path("text.txt"))
    assert (text.what, len(text.ids)) == ("file text.txt", len(Path("text.txt").read_bytes()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    """But not large ones, whose sum is infinite."""
    model = tiny_model(vocab_size=256)
    with torch.no_grad():
        model.get_parameter("layers.1.feed_forward.inner.weight")[3, 1] = value
        model.get_parameter("softmax.bias").fill_(value)
    model.save_pretrained(tmp_path / "spoiled", tokenizer=ByteTokenizer())
    if math.isfinite(value):
        assert open_run(tmp_path / "spoiled").model.get_parameter("softmax.bias").max() > 2e38
        return
    with pytest.raises(CheckpointError, match=r"not finite numbers: \S+, 2 of its tensors in all; .*lower optim.lr"):
        open_run(tmp_path / "spoiled")
    with pytest.raises(CheckpointError, match="are not finite numbers"):
        TransformerXL.from_pretrained(tmp_path / "spoiled")


def test_a_device_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.checkpoint.open_run.load", None)
    with pytest.raises(ConfigError, match="unknown device 'gpu'; did you mean 'cuda'"):
        open_run("run", device="gpu")


def halved(path: Path, text: str) -> RunConfig:
    """The settings of a run on a text, the second half of which it validates on."""
    path.write_text(text)
    return load_recipe("quickstart", [f"data.corpus={path}", "data.split=[0.5, 0.5, 0]"])


def test_splits_and_their_beginnings(tmp_path: Path) -> None:
    config = halved(tmp_path / "text.txt", "0123456789" * 10)
    whole, part = split_text(config, ByteTokenizer()), split_text(config, ByteTokenizer(), limit=20)
    assert (whole.what, whole.is_whole, len(whole.ids)) == (f"valid split of {tmp_path / 'text.txt'}", True, 50)
    assert (whole.n_characters, whole.n_bytes) == (49, 49)
    assert (part.is_whole, len(part.ids), part.n_characters) == (False, 21, 20)
    assert part.what.startswith("first 20 tokens of the valid split")
    with pytest.raises(CorpusError, match="has no test split; choose another split or text"):
        split_text(config, ByteTokenizer(), split="test")


def test_the_characters_of_a_part_are_its_own(tmp_path: Path) -> None:
    """A character has two bytes in the first half and one in the second."""
    config = halved(tmp_path / "text.txt", "x" * 81 + "é" * 20 + "e" * 40)
    whole, part = split_text(config, ByteTokenizer()), split_text(config, ByteTokenizer(), limit=40)
    assert (whole.n_characters, whole.n_bytes) == (60, 80)
    assert (part.n_characters, part.n_bytes) == (20, 40)


def test_where_tokens_leave_text_out_a_part_has_its_share(tmp_path: Path) -> None:
    config = halved(tmp_path / "text.txt", "a b c d e\n" * 10)
    tokenizer = prepare(config.data, TokenizerConfig(kind="word")).tokenizer
    whole, part = split_text(config, tokenizer), split_text(config, tokenizer, limit=11)
    assert tokenizer.loses and not part.is_whole
    assert part.n_characters == round(50 * 12 / len(whole.ids)) - 1


def test_a_file_is_a_text_of_two_tokens_at_least(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("aé")
    text = file_text(tmp_path / "text.txt", ByteTokenizer())
    assert (text.what, text.ids.tolist(), text.n_bytes) == (f"file {tmp_path / 'text.txt'}", [*"aé".encode()], 2)
    (tmp_path / "text.txt").write_text("a")
    with pytest.raises(CorpusError, match=r"text.txt' has 1 token; at least 2 are needed"):
        file_text(tmp_path / "text.txt", ByteTokenizer())


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe", "unigram"])
def test_a_large_file_is_encoded_in_pieces(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"line {i}: an é, a 東 and a 🙂\r\n" for i in range(300))
    (tmp_path / "text.txt").write_text(lines, newline="")
    tokenizer = train_tokenizer(TokenizerConfig(kind=kind, vocab_size=300 if kind in ("bpe", "unigram") else None), [lines])
    whole = file_text(tmp_path / "text.txt", tokenizer)
    monkeypatch.setattr("transformer_xl.data.text.CHUNK_BYTES", 100)
    text = file_text(tmp_path / "text.txt", tokenizer)
    np.testing.assert_array_equal(text.ids, tokenizer.encode(lines))
    first = tokenizer.decode(text.ids[:1].tolist())
    assert (text.n_characters, text.n_bytes) == (len(lines) - len(first), len(lines.encode()) - len(first.encode()))
    assert text == replace(whole, ids=text.ids) and text.digest() == whole.digest()


def test_a_large_file_is_never_held_as_a_whole(tmp_path: Path) -> None:
    n_byte = 20_000_000
    (tmp_path / "text.txt").write_bytes(b"a line of thirty characters ..\n" * (n_byte // 31))
    tracemalloc.start()
    try:
        text = file_text(tmp_path / "text.txt", ByteTokenizer())
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text.ids.nbytes == pytest.approx(2 * n_byte, rel=1e-3)
    assert held < 2.3 * n_byte and most < 3.5 * n_byte  # ids, some of them twice while their place grows, and 20 MB of buffers


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("déjà vu".encode("latin-1") * 20, "is not UTF-8, and its bytes are read as they are; convert it"),
        (b"\x1f\x8b\x08\x9c\xff\x01" * 20, "is binary, and its bytes are read as they are; convert it"),
        (b"deja vu", ""),
    ],
)
def test_bytes_that_are_no_text_are_told_of(content: bytes, said: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "it").write_bytes(content)
    assert len(file_text(tmp_path / "it", ByteTokenizer()).ids) == len(content)
    assert (said in (err := capsys.readouterr().err)) and bool(err) == bool(said)


def test_texts_differ_by_what_they_are_cut_of() -> None:
    assert text_difference(DataConfig(directory="here"), DataConfig(directory="there", shuffle="documents")) is None
    assert text_difference(DataConfig(), DataConfig(documents="lines")) == ("documents", "files", "lines")


def test_a_mapped_text_is_hashed_without_being_copied(tmp_path: Path) -> None:
    np.arange(3_000_001, dtype=np.uint32).tofile(tmp_path / "ids")
    text = Text("ids", np.memmap(tmp_path / "ids", np.uint32, "r"), 1, 1)
    tracemalloc.start()
    try:
        found = text.digest()
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert found == hashlib.sha256((tmp_path / "ids").read_bytes()).hexdigest()


def test_a_compressed_file_is_read_as_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\ntwo"))
    text = file_text(tmp_path / "a.txt.gz", ByteTokenizer())
    assert bytes(text.ids.tolist()) == b"one\r\ntwo"
    assert text.n_bytes == 7


def test_files_that_cannot_be_encoded_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_text(tmp_path / "gone.txt", ByteTokenizer())
    (tmp_path / "other.txt").write_text("abx")
    with pytest.raises(CorpusError, match=r"other.txt', from byte 0 on: .*x"):
        file_text(tmp_path / "other.txt", CharTokenizer("ab"))
