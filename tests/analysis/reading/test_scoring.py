"""What of a run's corpus is scored."""

from pathlib import Path

import pytest

from transformer_xl.analysis.reading.scoring import split_of, text_difference, text_of
from transformer_xl.config import DataConfig, load_recipe
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import CorpusError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))


def test_splits_and_their_beginnings(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("0123456789" * 10)
    config = load_recipe("quickstart", [f"data.corpus={tmp_path / 'text.txt'}", "data.split=[0.5, 0.5, 0]"])
    what, split = split_of(config, ByteTokenizer())  # valid, for there is no test
    assert (what, len(split.ids)) == (f"valid split of {tmp_path / 'text.txt'}", 50)
    whole, part = text_of(config, ByteTokenizer()), text_of(config, ByteTokenizer(), limit=20)
    assert (whole.is_whole, whole.n_characters) == (True, 49)
    assert (part.is_whole, len(part.ids), part.n_characters) == (False, 21, 20)
    assert part.what.startswith("first 20 tokens of the valid split")
    with pytest.raises(CorpusError, match="has no test split; choose another split or text"):
        split_of(config, ByteTokenizer(), split="test")


def test_texts_differ_by_what_they_are_cut_of() -> None:
    assert text_difference(DataConfig(directory="here"), DataConfig(directory="there", shuffle="documents")) is None
    assert text_difference(DataConfig(), DataConfig(documents="lines")) == ("documents", "files", "lines")
