"""Where a run is logged besides `metrics.jsonl`: TensorBoard, Weights & Biases, trackio.

Each is imported only when it is asked for. A run has one identity in each, kept in its directory, so that a resumed run goes on
in the same place. None of them may end a training: what cannot be sent is in `metrics.jsonl`.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformer_xl.errors import CheckpointError, ConfigError, did_you_mean
from transformer_xl.files import replace_file

IDENTITY_FILE = "loggers.json"
PROJECT = "transformer_xl"

_NAMES = ("tensorboard", "wandb", "trackio")

Warn = Callable[[str], None]
"""Takes a line that a person should see."""


class Logger(ABC):
    """What a run tells of itself."""

    @abstractmethod
    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Take an entry of the log."""

    def rewind(self, step: int) -> None:
        """Drop the entries after `step`, where that can be done: a resumed run logs them again."""
        return

    @abstractmethod
    def close(self) -> None:
        """Send what is left."""


def open_loggers(
    names: Sequence[str], directory: Path, settings: Mapping[str, Any], *, tensorboard: Callable[..., Any], warn: Warn
) -> list[Logger]:
    """Return the loggers of these names; with no name TensorBoard, if it is installed.

    Args:
        names: of `tensorboard`, `wandb`, `trackio`.
        directory: of the run.
        settings: of the run, shown beside its curves.
        tensorboard: given the directory and the first step to forget, returns TensorBoard's writer, or None where it is not
            installed.
        warn: told of a logger that fails.

    Raises:
        ConfigError: an unknown name, or a package that is not installed.
        CheckpointError: the directory cannot be written.
    """
    check_loggers(names)
    found: list[Logger] = []
    for name in dict.fromkeys(names or ("tensorboard",)):
        if name == "tensorboard":
            found.append(_Guarded(name, lambda: _TensorBoard(partial(tensorboard, directory)), warn))
        else:
            identity = _identity(directory, name)
            open_ = {"wandb": _open_wandb, "trackio": _open_trackio}[name]
            found.append(_Guarded(name, lambda open_=open_, i=identity: open_(directory, i, settings, warn), warn))
    return found


def check_loggers(names: Sequence[str]) -> None:
    """Refuse names that are unknown or not installed, before anything is done for a run.

    Raises:
        ConfigError: there is one.
    """
    for name in names:
        if name not in _NAMES:
            raise ConfigError(f"unknown logger '{name}'; {did_you_mean(name, _NAMES)}")
        if not _is_installed(name):
            raise ConfigError(f"logger '{name}' is not installed; pip install {name}, or leave out --logger {name}")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # a module that was not loaded from a file
        return name in sys.modules


class _TensorBoard(Logger):
    """Opened with the first entry: only then is it known which entries of an earlier part of the run it must forget."""

    def __init__(self, open_: Callable[[int | None], Any]) -> None:
        self._open = open_
        self._forgotten_from: int | None = None

    @cached_property
    def _writer(self) -> Any:
        return self._open(self._forgotten_from)

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if not self._writer:
            return
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{name}", value, step)
            elif name == "text":
                self._writer.add_text(kind, value, step)

    def rewind(self, step: int) -> None:
        self._forgotten_from = step + 1

    def close(self) -> None:
        if self.__dict__.get("_writer"):
            self._writer.close()


class _Guarded(Logger):
    """A logger of another program. Failures are warnings: the first one ends the logging, not the training."""

    def __init__(self, name: str, open_: Callable[[], Logger], warn: Warn) -> None:
        self._name, self._warn = name, warn
        self._inner: Logger | None = None
        self._try(lambda: setattr(self, "_inner", open_()))

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        inner = self._inner
        if inner:
            self._try(lambda: inner.log(kind, step, values))

    def rewind(self, step: int) -> None:
        inner = self._inner
        if inner:
            self._try(lambda: inner.rewind(step))

    def close(self) -> None:
        inner = self._inner
        if inner:
            self._try(inner.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever the other program raises: a network that is gone must not cost a run
            self._inner = None
            self._warn(f"{self._name} failed ({_reason(error)}); it gets nothing more, metrics.jsonl has everything")


class _Wandb(Logger):
    def __init__(self, run: Any) -> None:
        self._run = run
        # values carry their step: a resumed run may log a step again, which W&B's own counter would refuse
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        numbers = _numbers(kind, values)
        if numbers:
            self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio(Logger):
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        numbers = _numbers(kind, values)
        if numbers:
            self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def _open_wandb(directory: Path, identity: str, settings: Mapping[str, Any], warn: Warn) -> Logger:
    import wandb  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"project": PROJECT, "name": directory.name, "id": identity, "resume": "allow"}
    options |= {"dir": str(directory), "config": dict(settings)}
    try:
        return _Wandb(wandb.init(**options))
    except Exception as error:  # no key, no network: what is logged offline can be sent later
        warn(f"wandb cannot be reached ({_reason(error)}); it logs offline, send it with wandb sync {directory}/wandb/*")
        return _Wandb(wandb.init(**options, mode="offline"))


def _open_trackio(directory: Path, identity: str, settings: Mapping[str, Any], _: Warn) -> Logger:
    import trackio  # pyright: ignore[reportMissingImports]

    name = f"{directory.name}-{identity}"  # a name is all that trackio knows a run by
    return _Trackio(trackio.init(project=PROJECT, name=name, resume="allow", config=dict(settings)))


def _identity(directory: Path, logger: str) -> str:
    """Return the run's name in a logger, made up once and kept in its directory."""
    path = directory / IDENTITY_FILE
    known: dict[str, str] = {}
    with suppress(FileNotFoundError, ValueError):  # none yet, or damaged: then the run begins anew there
        known = json.loads(path.read_text(encoding="utf-8"))
    if logger not in known:
        known[logger] = uuid4().hex[:8]
        try:
            replace_file(path, (json.dumps(known, indent=2) + "\n").encode())
        except OSError as error:
            raise CheckpointError(
                f"cannot write to '{directory}': {error.strerror or error}; free disk space, then --resume"
            ) from None
    return known[logger]


def _numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
