"""What is scored, and how much text its tokens stand for."""

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.config import DataConfig, TokenizerConfig, load_recipe
from transformer_xl.data.prepare import prepare
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import CorpusError
from transformer_xl.texts import Text, file_text, split_text, text_difference


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))


def test_splits_and_their_beginnings(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("0123456789" * 10)
    config = load_recipe("quickstart", [f"data.corpus={tmp_path / 'text.txt'}", "data.split=[0.5, 0.5, 0]"])
    whole, part = split_text(config, ByteTokenizer()), split_text(config, ByteTokenizer(), limit=20)
    assert (whole.what, whole.is_whole, len(whole.ids)) == (f"valid split of {tmp_path / 'text.txt'}", True, 50)
    assert (whole.n_characters, whole.n_bytes) == (49, 49)
    assert (part.is_whole, len(part.ids), part.n_characters) == (False, 21, 20)
    assert part.what.startswith("first 20 tokens of the valid split")
    with pytest.raises(CorpusError, match="has no test split; choose another split or text"):
        split_text(config, ByteTokenizer(), split="test")


def test_the_characters_of_a_part_are_its_own(tmp_path: Path) -> None:
    """Two bytes a character in the first half, one in the second."""
    (tmp_path / "text.txt").write_text("x" * 81 + "é" * 20 + "e" * 40)
    config = load_recipe("quickstart", [f"data.corpus={tmp_path / 'text.txt'}", "data.split=[0.5, 0.5, 0]"])
    whole, part = split_text(config, ByteTokenizer()), split_text(config, ByteTokenizer(), limit=40)
    assert (whole.n_characters, whole.n_bytes) == (60, 80)
    assert (part.n_characters, part.n_bytes) == (20, 40)


def test_where_tokens_leave_text_out_a_part_has_its_share(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b c d e\n" * 10)
    names = [f"data.corpus={tmp_path / 'text.txt'}", "data.split=[0.5, 0.5, 0]"]
    config = load_recipe("quickstart", names)
    tokenizer = prepare(config.data, TokenizerConfig(kind="word")).tokenizer
    whole, part = split_text(config, tokenizer), split_text(config, tokenizer, limit=11)
    assert tokenizer.loses and not part.is_whole
    assert part.n_characters == round(50 * 12 / len(whole.ids)) - 1


def test_a_file_is_a_text_of_two_tokens_at_least(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("aé")
    text = file_text(tmp_path / "text.txt", ByteTokenizer())
    assert (text.what, text.ids.tolist(), text.n_bytes) == (f"file {tmp_path / 'text.txt'}", [*"aé".encode()], 2)
    (tmp_path / "text.txt").write_text("a")
    with pytest.raises(CorpusError, match=r"text.txt' has 1 tokens; at least 2 are needed"):
        file_text(tmp_path / "text.txt", ByteTokenizer())


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
