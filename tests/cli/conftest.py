"""A small finished run, made once, and `txl` called in this process as a person would call it; no curve is drawn."""

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import with_settings
from tests.training.helpers import write_recipe, write_text
from transformer_xl.cli import main
from transformer_xl.model.base import SequenceModel
from transformer_xl.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The error, which must be all that stderr says, on one line."""
        assert self.status != 0
        (line,) = self.err.splitlines()
        assert line.startswith("txl: error: ")
        return line.removeprefix("txl: error: ")


Txl = Callable[..., Answer]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """So that runs in this process and in children are equal."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long texts take on a machine with much else to do."""
    monkeypatch.setattr("transformer_xl.generation.fastest._COMPILE_SECONDS", math.inf)


def without_slow_parts(patch: pytest.MonkeyPatch) -> None:
    """Leave out of trainings what takes longer than they do."""
    patch.setattr("transformer_xl.training.record._tensorboard", lambda *_: None)
    patch.setattr("transformer_xl.training.record.draw_curve", lambda entries, config, path, **_: path)


@pytest.fixture(scope="session")
def home(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with text.txt, tiny.toml, the run `run` and the cache."""
    home = tmp_path_factory.mktemp("home")
    write_text(home / "text.txt")
    write_recipe(home / "tiny.toml")
    train_once(home, "tiny.toml", "text.txt", home / "run")
    return home


def train_once(home: Path, recipe: str, corpus: str, out: Path, *options: str) -> Path:
    """Make a run that several tests share, and return where it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TXL_CACHE", str(home / "cache"))
        without_slow_parts(patch)
        with pytest.raises(SystemExit) as exit:
            main(["train", str(home / recipe), "--corpus", str(home / corpus), "--out", str(out), "--quiet", *options])
    assert exit.value.code == 0
    return out


def save(model: SequenceModel, tokenizer: Tokenizer, where: str | Path) -> None:
    """Export a model with its tokenizer."""
    model.save_pretrained(where, tokenizer=tokenizer)


@contextmanager
def pipe_of(content: bytes) -> Iterator[str]:
    """Yield the path of a pipe that holds this, as the shell's `<(…)` does."""
    read, write = os.pipe()
    os.write(write, content)
    os.close(write)
    yield f"/dev/fd/{read}"
    os.close(read)


def change_settings(run: Path, section: str, **values: Any) -> None:
    """Change settings of a run."""
    with_settings(run, **{section: values})


@pytest.fixture
def workbench(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own copy of it, to work in."""
    place = tmp_path / "work"
    shutil.copytree(home, place, ignore=shutil.ignore_patterns("cache"), copy_function=shutil.copy2)
    monkeypatch.chdir(place)
    monkeypatch.setenv("TXL_CACHE", str(home / "cache"))
    monkeypatch.setenv("TXL_DATA", str(tmp_path / "data"))
    without_slow_parts(monkeypatch)
    return place


@pytest.fixture
def txl(workbench: Path, capsys: pytest.CaptureFixture[str]) -> Txl:
    def txl(*arguments: str) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main(list(arguments))
        captured = capsys.readouterr()
        code = exit.value.code
        return Answer(code if isinstance(code, int) else 0, captured.out, captured.err)

    return txl


@pytest.fixture
def nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of explanations are empty files, and those of lines none: drawing takes longer than the rest of a command."""
    monkeypatch.setattr("transformer_xl.explain.page.save_picture", lambda figure, path: path.touch())
    monkeypatch.setattr("transformer_xl.pictures.save_with_legend", lambda figure, axes, path: path)
