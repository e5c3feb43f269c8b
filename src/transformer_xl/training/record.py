"""The record of a run: `metrics.jsonl`, a picture of the loss curve, and other programs that log it.

Each line of `metrics.jsonl` ends with a checksum of what stands before it. A line that is not what was written is named and
left out; it costs no other line.

TensorBoard and Weights & Biases are imported only on request. The run's directory keeps the run's name in W&B, so a resumed
run goes on in the same place. No failure of theirs ends a training, because `metrics.jsonl` has everything.
"""

import json
import math
import os
import re
import shlex
import sys
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformer_xl.config import RunConfig
from transformer_xl.errors import CheckpointError, ConfigError, did_you_mean
from transformer_xl.files import DAMAGED_SUFFIX, regular_size, replace_file
from transformer_xl.pictures import MISSING, can_draw
from transformer_xl.seals import read_sealed, seal
from transformer_xl.training.curve import draw_curve
from transformer_xl.untrusted import read_json_object

METRICS_FILE = "metrics.jsonl"
PROJECT = "transformer_xl"

_LOGGERS = ("tensorboard", "wandb")
REMEDY = "free disk space, then --resume"

_FIELDS = {  # that an entry of a kind has besides kind and step; all but text are numbers or null
    "train": {"loss", "tokens", "seconds"},
    "valid": {"loss", "bpc", "tokens", "seconds"},
    "sample": {"text"},
    "final": {"loss", "bpc"},
}
_LONGEST_LINE = 16 * 2**20  # bytes
_LARGEST_LOG = 2**30  # bytes, of some three million lines
_SEAM = re.compile(rb'(?<="})[^\n](?={"kind": )')  # of two lines, where what ended the first is damaged

Warn = Callable[[str], None]  # shows a line of warning


class Record:
    """Log of a run, a JSON object per line; the `kind` of an entry is train, valid, sample or final.

    Without `loggers`, TensorBoard is used if it is installed. A logger that fails causes a warning and ends no run.

    Raises:
        ConfigError: an unknown logger, or one that is not installed.
        CheckpointError: the directory cannot be written; all methods that write may raise it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        loggers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        warn: Warn = warnings.warn,
    ) -> None:
        self.directory = directory
        self.path = directory / METRICS_FILE
        check_loggers(loggers)
        self._warn = warn
        self.n_entry = 0  # written so far, as far as they count in a resumed run
        self._loggers: dict[str, Logger] = {}
        for name in dict.fromkeys(loggers or ("tensorboard",)):
            identity = "" if name == "tensorboard" else _identity(directory, name, warn)
            with self._guarded(name):
                if name == "tensorboard":
                    self._loggers[name] = _TensorBoard(directory)
                else:
                    self._loggers[name] = _WeightsAndBiases(directory, identity, settings or {}, warn)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one entry."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                entry: dict[str, Any] = {"kind": kind, "step": step}
                for name, value in values.items():  # JSON has no infinity, but a perplexity may be infinite
                    entry[name] = None if isinstance(value, float) and not math.isfinite(value) else value
                file.write(_line(entry))
        except OSError as error:
            raise unwritable(self.directory, error) from None
        self.n_entry += kind != "final"
        self._call_loggers(lambda logger: logger.log(kind, step, values))

    def sync(self) -> None:
        """Force all entries to the disk. A checkpoint relies on them, so call this before it is saved."""
        try:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:  # nothing was logged yet
            return
        except OSError as error:
            raise unwritable(self.directory, error) from None

    def rewind(self, step: int, *, n_entry: int | None = None, is_finished: bool = False) -> dict[str, Any] | None:
        """Drop the entries after `step`, because a resumed run writes them again, and a half-written last line.

        Damaged lines are named in a warning and moved to `metrics.jsonl.damaged`.

        Args:
            step: the last step whose entries stay.
            n_entry: how many entries there were when the checkpoint of that step was saved; if they are fewer now, a warning
                says so. None: unknown.
            is_finished: the run was finished at that step, so its final entry may stay.

        Returns:
            The final entry, if it stays.
        """
        if not self.path.exists() and not n_entry:
            return None
        entries, damaged = _read(self.path)
        kept = [entry for entry in entries if entry["step"] <= step and entry["kind"] != "final"]
        final = [entry for entry in entries if entry["step"] == step and entry["kind"] == "final" and is_finished][-1:]
        aside = self.path.with_name(self.path.name + DAMAGED_SUFFIX)
        try:
            if damaged:
                _copy_damaged(self.path, aside)
            replace_file(self.path, "".join(map(_line, kept + final)).encode())
        except OSError as error:
            raise unwritable(self.directory, error) from None
        if damaged:
            self._warn(f"{_named(self.path, damaged)}; moved to {aside.name}, and the run goes on")
        if n_entry is not None and (n_missing := n_entry - len(kept) - len(damaged)) > 0:
            self._warn(
                f"{n_missing} of the {n_entry} entries up to step {step:,} are missing in '{self.path}'; the run goes on"
            )
        self.n_entry = len(kept)
        self._call_loggers(lambda logger: logger.rewind(step))
        return final[0] if final else None

    def draw(self, config: RunConfig, *, end: str = "") -> Path | None:
        """Draw the loss curve, see `draw_curve`; None if there is nothing to draw yet, or nothing to draw with."""
        if not can_draw():
            self._warn(f"no picture is drawn: {MISSING}")
            return None
        entries = read_metrics(self.directory, warn=self._warn)
        return draw_curve(entries, config, self.directory / "loss.png", end=end, remedy=REMEDY)

    def close(self) -> None:
        """Let all loggers send their remaining entries."""
        self._call_loggers(lambda logger: logger.close())

    def _call_loggers(self, call: Callable[["Logger"], object]) -> None:
        for name, logger in list(self._loggers.items()):
            with self._guarded(name):
                call(logger)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Turn a logger's failure into a warning, and drop the logger: training goes on without it."""
        try:
            yield
        except Exception as error:  # other programs raise anything; a network that is gone must not cost a run
            self._loggers.pop(name, None)
            self._warn(f"{name} failed ({_reason(error)}); it gets nothing more, metrics.jsonl has everything")


def unwritable(directory: Path, error: OSError) -> CheckpointError:
    """Return what to say of a run's directory that cannot be written to."""
    return CheckpointError(f"cannot write to '{directory}': {error.strerror or error}; {REMEDY}")


def _line(entry: dict[str, Any]) -> str:
    # in ASCII, because a byte-level model may write lone surrogates, or line ends other than \n
    body = json.dumps(entry, allow_nan=False)[:-1]
    return f'{body}, "crc": "{zlib.crc32(body.encode()):08x}"}}\n'


def read_metrics(directory: Path, *, warn: Warn = warnings.warn) -> list[dict[str, Any]]:
    """Return the entries of a run's `metrics.jsonl`, if there is one; `warn` names damaged lines.

    A half-written last line is left out silently, because that is what a killed process leaves. The newest checkpoint knows how
    many entries there were, so `warn` also says whether some are missing.
    """
    path = directory / METRICS_FILE
    entries, damaged = _read(path)
    if damaged:
        warn(f"{_named(path, damaged)}; left out")
    step, n_entry = _saved(directory)
    n_kept = sum(entry["step"] <= step and entry["kind"] != "final" for entry in entries)
    if entries and (n_missing := n_entry - n_kept - len(damaged)) > 0:
        warn(f"{n_missing:,} of the {n_entry:,} entries up to step {step:,} are missing in '{path}'")
    return entries


def _saved(directory: Path) -> tuple[int, int]:
    """Return the step of the newest checkpoint, and how many entries there were then; 0 if it does not say."""
    states = sorted((directory / "checkpoints").glob("step-*/state.json"))
    try:
        return int(states[-1].parent.name.removeprefix("step-")), int(read_json_object(states[-1])["record"]["entries"] or 0)
    except (CheckpointError, IndexError, KeyError, TypeError, ValueError):
        return 0, 0


def _read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the entries of a log, and the numbers of its damaged lines."""
    entries, damaged = [], dict[int, None]()
    try:
        for number, _, entry in _lines(path):
            if entry is None:
                damaged[number] = None
            else:
                entries.append(entry)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"'{path}' cannot be read: {reason}; check the disk and the permissions") from None
    return entries, list(damaged)


def _copy_damaged(path: Path, aside: Path) -> None:
    """Append the damaged lines of a log to another file, and force that to the disk."""
    _is_file(aside)
    with aside.open("ab") as file:
        for _, line, entry in _lines(path):
            if entry is None:
                file.write(line.removesuffix(b"\n") + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yield number, bytes and entry of each line, None if it is damaged; a half-written last line is left out.

    A line that is too long for an entry comes in several pieces.
    """
    if not _is_file(path):
        return
    with path.open("rb") as file:
        number, begins = 1, True
        while piece := file.readline(_LONGEST_LINE):
            ends = piece.endswith(b"\n")
            if not begins or (len(piece) == _LONGEST_LINE and not ends):
                yield number, piece, None
            else:
                *lines, last = _SEAM.split(piece)
                yield from ((number, line, _entry(line)) for line in lines)
                entry = _entry(last)
                if entry or ends:  # else the process was killed while it wrote this line
                    yield number, last, entry
            number, begins = number + ends, ends


def _is_file(path: Path) -> bool:
    """Return whether a file exists; refuse what is not a regular file."""
    try:
        if (size := regular_size(path)) > _LARGEST_LOG:
            raise ValueError(f"it has {size:,} bytes, and {_LARGEST_LOG:,} is the most that is read")
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise CheckpointError(f"'{path}' cannot be used: {error}; move it away") from None
    return True


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry that a line holds; None if it is not what `_line` writes. Lines of version 0.2.0 have no checksum."""
    body, has_checksum, rest = line.removesuffix(b"\n").rpartition(b', "crc": "')
    if has_checksum and rest != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        entry = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    if has_checksum:
        del entry["crc"]
    kind, step, text = (entry.get(name, "") for name in ("kind", "step", "text"))
    numbers = [value for name, value in entry.items() if name not in ("kind", "text") and value is not None]
    is_sound = (
        isinstance(kind, str)
        and isinstance(text, str)
        and kind in _FIELDS
        and _FIELDS[kind] <= entry.keys()
        and type(step) is int
        and step >= 0
        and None not in (entry.get("tokens", 0), entry.get("seconds", 0))
        and all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in numbers)  # False for NaN
    )
    return entry if is_sound else None


def _named(path: Path, damaged: list[int]) -> str:
    """Return a clause that names damaged lines, not all if they are many."""
    more = f" and {len(damaged) - 5:,} more" if len(damaged) > 5 else ""
    return f"'{path}' has damaged lines: {', '.join(map(str, damaged[:5]))}{more}"


def check_loggers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a logger that is unknown or not installed."""
    for name in names:
        if name not in _LOGGERS:
            raise ConfigError(f"unknown logger '{name}'; {did_you_mean(name, _LOGGERS)}")
        try:
            installed = find_spec(name) is not None
        except ValueError:  # a module that was not loaded from a file
            installed = name in sys.modules
        if not installed:
            raise ConfigError(f"logger '{name}' is not installed; pip install {name}, or leave out --logger {name}")


class Logger(ABC):
    """Another program that a run is logged to."""

    @abstractmethod
    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Take an entry of the log."""

    def rewind(self, step: int) -> None:  # noqa: B027 (most programs cannot)
        """Drop the entries after `step`, if that is possible, because a resumed run logs them again."""

    @abstractmethod
    def close(self) -> None:
        """Send the remaining entries."""


class _TensorBoard(Logger):
    """TensorBoard. It opens with the first entry, because only then is it known which old entries it must forget."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._forgotten_from: int | None = None

    @cached_property
    def _writer(self) -> Any:
        return _tensorboard(self._directory, self._forgotten_from)

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


class _WeightsAndBiases(Logger):
    """A run in W&B, which logs numbers only."""

    def __init__(self, directory: Path, identity: str, settings: Mapping[str, Any], warn: Warn) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        options: dict[str, Any] = {"project": PROJECT, "name": directory.name, "id": identity, "resume": "allow"}
        options |= {"dir": str(directory), "config": dict(settings)}
        try:
            self._run = wandb.init(**options)
        except Exception as error:  # without a key or a network, it logs offline, and that log can be sent later
            where = shlex.quote(str(directory))
            warn(f"wandb cannot be reached ({_reason(error)}); it logs offline, send it with wandb sync {where}/wandb/*")
            self._run = wandb.init(**options, mode="offline")
        # a value carries its step, because W&B's own counter refuses a step that a resumed run logs again
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        numbers: dict[str, float] = {
            f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)
        }
        if numbers:
            self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


def _tensorboard(directory: Path, forgotten_from: int | None) -> Any:
    """Return a TensorBoard writer that forgets all entries from a step on; None without the package."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory / "tensorboard"), purge_step=forgotten_from)


def _identity(directory: Path, logger: str, warn: Warn) -> str:
    """Return the run's random name in a logger, kept in the run's directory."""
    path = directory / "loggers.json"
    known: dict[str, str] = {}
    try:
        known = read_sealed(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        warn(f"'{path}' is damaged ({error}); the run begins anew in {logger}")
    if logger not in known:
        known[logger] = uuid4().hex[:8]
        try:
            replace_file(path, seal(known))
        except OSError as error:
            raise unwritable(directory, error) from None
    return known[logger]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
