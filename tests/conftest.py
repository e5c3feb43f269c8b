"""Warnings are errors (pyproject), random numbers are seeded, and uninitialized memory is poisoned."""

import math
import os
import shutil
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models lose time on more
os.environ.pop("COLUMNS", None)  # which pytest-xdist sets, and which tables are fitted to

import pytest
import torch

if not torch.cuda.is_available():  # without a GPU, Triton's kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings
from torch.utils._device import _device_constructors

from tests.helpers import default_dtype, examples

settings.register_profile(
    "suite", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("suite")

_empty = torch.empty
_device_constructors()  # remembers what torch.empty is, so that `with torch.device("meta")` reaches the real one below


def _poisoned_empty(*args, **kwargs):
    """Return `torch.empty` filled with NaN (or a huge integer), so that reading it shows."""
    tensor = _empty(*args, **kwargs)
    if tensor.is_floating_point():
        tensor.detach().fill_(float("nan"))
    elif tensor.dtype == torch.int64:
        tensor.fill_(2**62)
    return tensor


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available() and "TXL_TEST_DEVICE" not in os.environ:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU here"))


@pytest.fixture(scope="session")
def browser():
    """A Chromium: the one that TXL_BROWSER names, or that of this machine or of playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make test-browser does that")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("TXL_BROWSER") or next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as running:
        if path is None and not Path(running.chromium.executable_path).exists():
            pytest.skip("there is no Chromium; install one, or name one in TXL_BROWSER")
        as_root = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = running.chromium.launch(executable_path=path, args=as_root)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(torch, "empty", _poisoned_empty)
    new_empty = torch.Tensor.new_empty

    def poisoned_new_empty(self, *args, **kwargs):
        tensor = new_empty(self, *args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned_new_empty)


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch):
    """On a machine with much else to do, any command may take the ten seconds after which it says how far it is."""
    monkeypatch.setattr("transformer_xl.console.LINE_SECONDS", math.inf)


@pytest.fixture
def double_precision():
    with default_dtype(torch.float64):
        yield


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter):
    """Show the figures that tests recorded, such as how many of how many attempts ended well."""
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, figure in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(figure)
