"""How fast tokens were read on this machine, kept on the disk, so that `compile="auto"` need not try everything again."""

import math
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from typing import Any

import torch

from transformer_xl.data.corpora import cache_dir
from transformer_xl.errors import CheckpointError
from transformer_xl.files import canonical_json, make_directories, whole_file
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import InferencePrecision, device_name
from transformer_xl.untrusted import read_json_object
from transformer_xl.version import __version__

COMPILE_SECONDS = 10.0
"""About what compiling takes the first time (4 to 12 s on two cores). Where no compiled step was timed, it is tried once eager
tokens take twice as long as this, and is assumed to halve their time."""

_FOUND_SECONDS = 2.0
"""About what it takes to find compiled code on the disk again; used until it was measured."""

_DOUBT_SECONDS = 7 * 86_400.0
"""After this time nobody believes any longer that compiled code is slower; the machine was perhaps busy."""

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e9


@dataclass(frozen=True)
class Speeds:
    """Seconds, each None if nobody has measured it.

    Attributes:
        eager: of a step without compilation.
        compiled: of a compiled step.
        ready: until compiled code is ready, if it is found on the disk.
        spent: that eager steps have taken while nobody knew how long compiled ones take.
        compared: when `eager` and `compiled` were measured one after the other (time.time).
    """

    eager: float | None = None
    compiled: float | None = None
    ready: float | None = None
    spent: float = 0.0
    compared: float = 0.0

    def seconds(self, n_step: int, *, compiled: bool) -> float:
        """Return what so many steps would take; infinity if nobody knows."""
        if not compiled:
            return math.inf if self.eager is None else n_step * self.eager
        return math.inf if self.compiled is None else self.ready_seconds + n_step * self.compiled

    @property
    def ready_seconds(self) -> float:
        """Seconds until compiled code is ready, or a guess."""
        return _FOUND_SECONDS if self.ready is None else self.ready

    def worth_trying(self, n_step: int) -> bool:
        """Whether compilation should be tried for the first time, because eager steps take so long."""
        return self.compiled is None and self.spent + self.seconds(n_step, compiled=False) > 2 * COMPILE_SECONDS

    def after(self, n_step: int, seconds: float, *, compiled: bool) -> "Speeds":
        """Return what is known after a text was written; whatever else the machine does slows both ways down."""
        took = seconds / n_step
        if None not in (self.eager, self.compiled):
            assert self.eager is not None and self.compiled is not None
            factor = took / (self.compiled if compiled else self.eager)
            return replace(self, eager=self.eager * factor, compiled=self.compiled * factor)
        if compiled:
            return self
        return replace(self, eager=took, spent=min(self.spent + seconds, _MOST_SECONDS))


class KeptSpeeds:
    """The speeds of one machine, model shape, precision and number of rows, in a file of their own.

    A file that is damaged, or that somebody else wrote, counts as none and is replaced. Where nothing can be written, nothing
    is kept.

    Args:
        model: read by a decoder.
        n_row: rows of the decoder.
        tgt_len: longest piece that it reads at once.
        precision: of the decoder.
    """

    def __init__(self, model: LanguageModel, *, n_row: int, tgt_len: int, precision: InferencePrecision) -> None:
        context = [model.mem_len, model.window, model.clamp_len, tgt_len, n_row]
        versions = {"torch": torch.__version__, "transformer_xl": __version__}
        machine = {"device": device_name(model.device), "threads": torch.get_num_threads()}
        shape = {"config": model.config.model_dump(mode="json"), "context": context, "weights": str(model.dtype)}
        self._key = {**machine, **versions, **shape, "precision": precision}
        name = sha256(canonical_json(self._key)).hexdigest()[:32]
        self._path = cache_dir() / "speeds" / f"{name}.json"

    def load(self) -> Speeds:
        """Return what is known."""
        try:
            content = read_json_object(self._path)
        except CheckpointError:
            return Speeds()
        values: Any = content.get("seconds")
        names = {field.name for field in fields(Speeds)}
        if content.get("of") != self._key or not isinstance(values, dict) or values.keys() != names:
            return Speeds()
        least = dict.fromkeys(names, _LEAST_SECONDS) | {"spent": 0.0, "compared": 0.0}
        if not all(_is_time(x, least[name]) for name, x in values.items() if x is not None or not least[name]):
            return Speeds()
        speeds = Speeds(**values)
        seems_slower = speeds.seconds(1, compiled=False) <= (speeds.compiled or 0.0)
        if seems_slower and not 0 <= time.time() - speeds.compared < _DOUBT_SECONDS:
            return Speeds(eager=speeds.eager)
        return speeds

    def keep(self, speeds: Speeds) -> None:
        """Replace what is known, if the disk lets us; of two processes, the last one counts."""
        with suppress(OSError):
            make_directories(self._path.parent)
            with whole_file(self._path) as file:
                file.write_bytes(canonical_json({"of": self._key, "seconds": asdict(speeds)}) + b"\n")

    def compare(self, eager: float, compiled: float, took: float, *, first: bool) -> Speeds:
        """Keep and return what a comparison found.

        Args:
            eager: seconds of a step.
            compiled: of a compiled step.
            took: seconds until compiled code was ready; kept only if it was on the disk.
            first: whether this process had compiled nothing before; what it compiles later loads no compiler.
        """
        before = self.load()
        was_found = first and before.compiled is not None
        ready = took if was_found else before.ready
        self.keep(speeds := Speeds(eager, compiled, ready, compared=time.time()))
        return speeds


def keep_compiled_code() -> None:
    """Keep compiled code beside the speeds, unless the environment names a place; a restart deletes the default."""
    folder = cache_dir() / "compiled"
    with suppress(OSError):
        make_directories(folder)
        if os.access(folder, os.W_OK):
            os.environ.setdefault(_COMPILED, str(folder))


def _is_time(x: object, least: float) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and least <= x <= 4 * _MOST_SECONDS
