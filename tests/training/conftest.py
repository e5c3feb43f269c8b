"""One thread, so that runs in this process and in children are equal; no TensorBoard, which takes seconds to import."""

from pathlib import Path

import pytest
import torch

from tests.training.helpers import write_recipe, write_text


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.training.record._tensorboard", lambda *_: None)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "txl-cache"
    monkeypatch.setenv("TXL_CACHE", str(folder))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(write_recipe(tmp_path / "tiny.toml"))
