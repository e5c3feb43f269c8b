"""A run and an exported model are opened with their text, their device and how they are read."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_model
from tests.training.helpers import write_recipe, write_text
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.opening import open_run
from transformer_xl.reading.how import Reading
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
        overrides = ["train.max_steps=2", "eval.mem_len=9", "eval.ext_len=1"]
        train(
            str(home / "tiny.toml"),
            out=home / "run",
            corpus=str(home / "text.txt"),
            overrides=overrides,
            display=Display(quiet=True),
        )
    tiny_model(vocab_size=256).save_pretrained(home / "exported")
    ByteTokenizer().save(home / "exported" / "tokenizer.json")
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("TXL_CACHE", str(home / "cache"))


def test_a_run_is_read_as_it_says_and_has_a_text_of_its_own() -> None:
    opened = open_run("run", device="cpu")
    assert (opened.source, opened.is_run, opened.config.name) == ("run", True, "tiny")
    assert (opened.device.type, opened.model.training) == ("cpu", False)
    assert opened.reading() == Reading(tgt_len=5, mem_len=9, ext_len=1, batch_size=2)
    assert opened.reading(mem_len=3, ext_len=0, same_length=None) == Reading(tgt_len=5, mem_len=3, batch_size=2)
    assert opened.text().what.startswith("test split of ")
    assert opened.text(split="valid").what.startswith("valid split of ")
    assert len(opened.text(limit=7).ids) == 8


def test_an_exported_model_needs_a_text() -> None:
    opened = open_run(Path("exported"))
    assert (opened.is_run, opened.config.model) == (False, opened.model.config)
    assert opened.n_parameter == sum(parameter.numel() for parameter in opened.model.parameters())
    with pytest.raises(ConfigError, match=r"^'exported' is a model without a corpus of its own; give --file or --corpus$"):
        opened.text()
    assert opened.text(corpus="text.txt").what.startswith("test split of ")
    text = opened.text(file=Path("text.txt"))
    assert (text.what, len(text.ids)) == ("file text.txt", len(Path("text.txt").read_bytes()))


@pytest.mark.parametrize("other", [{"split": "test"}, {"corpus": "text.txt"}])
def test_a_file_is_no_split(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave --split and --corpus out"):
        open_run("run").text(file=Path("text.txt"), **other)


def test_a_file_may_be_refused_for_what_it_holds() -> None:
    def check(data: bytes) -> None:
        raise ConfigError(f"{len(data)} bytes")

    with pytest.raises(ConfigError, match=f"^{len(Path('text.txt').read_bytes())} bytes$"):
        open_run("run").text(file=Path("text.txt"), check=check)


def test_damaged_checkpoints_are_told_of(tmp_path: Path) -> None:
    open_run("run", which="last", on_damaged=pytest.fail)
    weights = max(Path("run/checkpoints").glob("step-*")) / "model.safetensors"
    good = weights.read_bytes()
    told: list[str] = []
    try:
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(CheckpointError):
            open_run("run", on_damaged=told.append)
    finally:
        weights.write_bytes(good)
    assert "is damaged" in told[0]


def test_a_device_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.opening.load", None)
    with pytest.raises(ConfigError, match="device 'gpu' cannot be used here"):
        open_run("run", device="gpu")
