"""What a run's numbers depend on besides its settings: versions, machine and algorithms.

`environment.json` has one entry for each start or resumption of a run.
"""

import datetime
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from transformer_xl.config.run import TrainConfig
from transformer_xl.errors import CheckpointError
from transformer_xl.files import replace_file
from transformer_xl.process import cores
from transformer_xl.untrusted import read_json
from transformer_xl.version import __version__

ENVIRONMENT_FILE = "environment.json"

LAUNCH = "TORCHELASTIC_RUN_ID"  # torchrun sets it to the same value in all processes that it starts and restarts
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def write_environment(directory: Path, *, seed: int, device: torch.device, step: int = 0) -> None:
    """Add an entry to the run's `environment.json`; the run starts or goes on after `step`."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", _CUBLAS, "WORLD_SIZE", LAUNCH)
    entry = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "seed": seed,
        "command": sys.argv,
        "versions": _versions(),
        "machine": _machine(device),
        "variables": {name: os.environ[name] for name in variables if name in os.environ},
    }
    replace_file(directory / ENVIRONMENT_FILE, (json.dumps([*read_environment(directory), entry], indent=2) + "\n").encode())


def read_environment(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of a run, oldest first. A missing or damaged file has none; no run depends on it."""
    try:
        entries = read_json(directory / ENVIRONMENT_FILE)
    except (CheckpointError, FileNotFoundError):
        return []
    return entries if isinstance(entries, list) else []


def begun_by_this_launch(directory: Path) -> bool:
    """Return whether the `torchrun` that started this process also made the last start of the run."""
    return not read_environment(directory) or _last(directory, "variables", LAUNCH) == os.environ.get(LAUNCH)


def last_threads(directory: Path) -> int | None:
    """Return the number of threads at the last start of a run; None if nobody knows."""
    return _last(directory, "machine", "threads")


def _last(directory: Path, section: str, name: str) -> Any:
    try:
        return read_environment(directory)[-1][section][name]
    except (LookupError, TypeError):
        return None


def _versions() -> dict[str, str]:
    found = {"transformer_xl": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "tokenizers", "pydantic", "triton"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return found


def _machine(device: torch.device) -> dict[str, Any]:
    facts = {
        "name": platform.node(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpu_memory": properties.total_memory, "gpus": torch.cuda.device_count()}
    return facts


@contextmanager
def computing_with(train: TrainConfig) -> Iterator[None]:
    """Compute inside the block with a run's threads and, if it asks for it, only with deterministic algorithms.

    PyTorch then refuses operations that have no deterministic form. cuBLAS sums in a fixed order only if an environment
    variable sets the size of its workspace.
    """
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    if train.deterministic:
        os.environ.setdefault(_CUBLAS, ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warns)
