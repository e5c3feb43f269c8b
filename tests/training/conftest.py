"""One thread, so that runs in this process and in children are equal; no TensorBoard, which takes seconds to import."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training.helpers import write_recipe, write_text


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def no_tensorboard() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_xl.training.record._tensorboard", lambda *_: None)
        yield


@pytest.fixture(autouse=True, scope="package")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.getbasetemp() / "txl-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TXL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipe and its text lie that runs of many tests read; a test that changes the text has its own."""
    home = tmp_path_factory.mktemp("home")
    write_text(home / "text.txt")
    write_recipe(home / "tiny.toml")
    return home


@pytest.fixture(scope="package")
def text(home: Path) -> Path:
    return home / "text.txt"


@pytest.fixture(scope="package")
def recipe(home: Path) -> str:
    return str(home / "tiny.toml")


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw the loss curve takes a third of the time of a tiny run; test_record does it."""
    stub = "transformer_xl.training.record.draw_curve"
    monkeypatch.setattr(stub, lambda entries, config, path, **_: path if entries else None)
