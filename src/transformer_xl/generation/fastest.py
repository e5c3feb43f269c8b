"""Find out what reads single tokens fastest, by trying, because it depends on the processor, the model and the rows."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from transformer_xl.errors import ConfigError
from transformer_xl.generation.speeds import COMPILE_SECONDS, KeptSpeeds, Speeds
from transformer_xl.model.precision import InferencePrecision, PrecisionName, cannot_compile, choose_precision
from transformer_xl.model.reader import has_not_compiled
from transformer_xl.reading.stream import KeptKeys

Compile = bool | Literal["auto"]

_TRIALS = 5
_WORTH_A_HINT = 1.1
"""What is faster by less is not worth a word."""

_COMPARED: tuple[InferencePrecision, ...] = ("fp32", "bf16", "int8")
_TRIAL_FROM = 1.0
"""Seconds that a text takes, from which on fp32 is timed beside a narrower precision, which may be slower."""


class Found(NamedTuple):
    """The streams that step fastest, why they are what they are, and where their speed may be kept; None: nowhere."""

    streams: KeptKeys
    reason: str
    kept: KeptSpeeds | None = None


def fastest_stream(
    open_stream: Callable[[InferencePrecision], KeptKeys],
    precisions: Sequence[InferencePrecision],
    *,
    compile: Compile,
    expected_tokens: int,
    kept: Callable[[InferencePrecision], KeptSpeeds],
    on_compile: Callable[[], object] = lambda: None,
) -> Found:
    """Open the streams that step fastest, and say why they are what they are; see `Decoder` for `compile` and `on_compile`.

    `open_stream` opens empty streams in one of `precisions`, and `kept` says where its speeds are kept. A single precision
    without compilation is taken without a trial.
    """
    check_compile(compile)
    if compile is True:
        on_compile()
        tried = {precision: _compiled(open_stream(precision)) for precision in precisions}
        best = _that_compiles(min(tried.values(), key=lambda found: found.seconds))
        figures = [f"{name} compiled {_ms(found.seconds)}" for name, found in tried.items()]
        return Found(best.streams, _measured(figures) if len(figures) > 1 else "as set")
    if compile is False:
        if len(precisions) == 1:
            return Found(open_stream(precisions[0]), "as set")
        streams = {precision: open_stream(precision) for precision in precisions}
        taken = {precision: _seconds_per_step(opened) for precision, opened in streams.items()}
        figures = [f"{name} {_ms(seconds)}" for name, seconds in taken.items()]
        return Found(streams[min(taken, key=taken.__getitem__)], _measured(figures))
    return _Choice(open_stream, precisions, expected_tokens, kept, on_compile).made()


def check_compile(compile: object) -> None:
    """Raise a ConfigError unless this is a `Compile`."""
    if compile not in (True, False, "auto"):
        raise ConfigError(f"compile ({compile!r}) must be True, False or 'auto'")


def captured_stream(
    open_stream: Callable[[InferencePrecision], KeptKeys],
    name: PrecisionName,
    device: torch.device,
    *,
    compile: Compile,
    on_compile: Callable[[], object] = lambda: None,
) -> Found:
    """Open streams on a GPU, where each step is one CUDA graph; the arguments are those of `fastest_stream`.

    Nothing is timed: kernels of our own read as fast as compiled code, which takes half a minute, and what a GPU multiplies
    natively is as fast as its bytes are few. Where that fails, tokens are read by the library's functions.
    """
    check_compile(compile)
    precision, reason = (name, "as set") if name == "int8" else choose_precision(name, device)
    if (name, precision) == ("auto", "fp16"):  # whose numbers end at 65,504
        precision, reason = "fp32", "this GPU multiplies no bf16 natively"
    streams = open_stream(precision)
    if compile is True:
        on_compile()
        _that_compiles(_compiled(streams))
    try:
        streams.reader.capture(streams.memory)
    except Exception as error:  # of a driver, of a compiler of kernels, or of an operation that a graph cannot hold
        streams.reader.use_library()
        return Found(streams, f"{reason}; no graph of steps ({str(error).strip().partition(chr(10))[0]})")
    return Found(streams, f"{reason}; each step is one graph")


class _Choice:
    """What `compile="auto"` chooses: what takes least time in all, by figures from earlier; only what they lack is tried."""

    def __init__(
        self,
        open_stream: Callable[[InferencePrecision], KeptKeys],
        precisions: Sequence[InferencePrecision],
        n_step: int,
        kept: Callable[[InferencePrecision], KeptSpeeds],
        on_compile: Callable[[], object],
    ) -> None:
        self._open, self._precisions, self._n_step, self._kept = open_stream, precisions, n_step, kept
        self._on_compile = on_compile
        self._opened: dict[InferencePrecision, KeptKeys] = {}  # used again, because rings may be large
        self._speeds = {precision: kept(precision).load() for precision in precisions}

    def made(self) -> Found:
        for precision in self._precisions:
            if self._speeds[precision].eager is None:
                self._try_eager(precision)
        precision, compiled = self._least([False, True])
        narrowest = self._precisions[-1]  # compiled, the narrowest numbers are read fastest
        if self._speeds[narrowest].worth_trying(self._n_step):
            precision, compiled = narrowest, True
        problem = self._compile(precision) if compiled else ""
        if problem:
            (precision, compiled), problem = self._least([False]), f"not compiled: {problem}"
        figures = [figure for name in self._precisions for figure in self._figures(name)]
        measured = _measured(figures) if len(figures) > 1 else ""
        hint = self._hint(precision, compiled)
        if not (compiled or problem or hint) and self._speeds[precision].compiled is None:
            is_long = self._speeds[precision].seconds(self._n_step, compiled=False) > COMPILE_SECONDS
            hint = "--compile yes may be faster" if is_long else "compiling takes longer than this text"
        reason = "; ".join(filter(None, [measured, problem, hint]))
        return Found(self._streams(precision), reason, self._kept(precision))

    def _streams(self, precision: InferencePrecision) -> KeptKeys:
        if precision not in self._opened:
            self._opened[precision] = self._open(precision)
        return self._opened[precision]

    def _least(self, codes: Sequence[bool]) -> tuple[InferencePrecision, bool]:
        ways: list[tuple[InferencePrecision, bool]] = [(name, compiled) for name in self._precisions for compiled in codes]
        return min(ways, key=lambda way: self._speeds[way[0]].seconds(self._n_step, compiled=way[1]))

    def _try_eager(self, precision: InferencePrecision) -> None:
        self._speeds[precision] = replace(self._speeds[precision], eager=_seconds_per_step(self._streams(precision)))

    def _compile(self, precision: InferencePrecision) -> str:
        """Compile, and time eager steps just before, because load changes; say why not to use the code, if so."""
        first = has_not_compiled()
        self._try_eager(precision)
        self._on_compile()
        begin = time.perf_counter()
        found = _compiled(self._streams(precision))
        took = time.perf_counter() - begin
        if not found.problem:
            eager = self._speeds[precision].eager or 0.0
            self._speeds[precision] = self._kept(precision).compare(eager, found.seconds, took, first=first)
        if found.seconds < min(speeds.eager or 0.0 for speeds in self._speeds.values()):
            return ""
        self._streams(precision).reader.interpret()
        return found.problem or f"{precision} compiled is slower"

    def _figures(self, precision: InferencePrecision) -> list[str]:
        speeds = self._speeds[precision]
        compiled = [] if speeds.compiled is None else [f"compiled {_ms(speeds.compiled)}"]
        return [f"{precision} {_ms(speeds.eager or 0.0)}", *compiled]

    def _hint(self, precision: InferencePrecision, compiled: bool) -> str:
        """Say what would be faster than this way, by the figures of this machine, and how to get it."""
        own = self._speeds[precision]
        chosen = (own.compiled if compiled else own.eager) or 0.0
        ways = [] if compiled or own.compiled is None else [(own.compiled, f"--compile yes, {own.ready_seconds:.1f} s later,")]
        others: list[InferencePrecision] = [name for name in _COMPARED if name not in self._speeds]
        for name in others:
            other = self._kept(name).load()
            if name == "fp32" and other.eager is None and not compiled and chosen * self._n_step > _TRIAL_FROM:
                with suppress(ConfigError):  # there may be no room for it
                    other = replace(other, eager=_seconds_per_step(self._open(name)))
            ways += [(seconds, f"--precision {name}{code}") for seconds, code in _ways(other)]
        seconds, options = min(ways, default=(chosen, ""))
        return f"{options} would be {chosen / seconds:.1f} times as fast" if chosen > _WORTH_A_HINT * seconds else ""


def _ways(speeds: Speeds) -> list[tuple[float, str]]:
    ways = [(speeds.eager, ""), (speeds.compiled, " --compile yes")]
    return [(seconds, option) for seconds, option in ways if seconds is not None]


class _Compiled(NamedTuple):
    """Streams with compiled code, the seconds of their step, and what went wrong, if anything."""

    streams: KeptKeys
    seconds: float
    problem: str | None = None


def _that_compiles(found: _Compiled) -> _Compiled:
    if found.problem:
        raise ConfigError(f"compile (True) cannot work here: {found.problem}; use compile='auto' or False")
    return found


def _measured(figures: Sequence[str]) -> str:
    """Say what was compared; the text that is written then may take longer, for example on a machine that is busy meanwhile."""
    return f"measured before: {', '.join(figures)} per token"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"


def _compiled(streams: KeptKeys) -> _Compiled:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    problem = cannot_compile(streams.reader.device)
    if problem:
        return _Compiled(streams, float("inf"), problem)
    streams.reader.compile()
    try:
        return _Compiled(streams, _seconds_per_step(streams))
    except (TorchDynamoException, FailOnRecompileLimitHit, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
        return _Compiled(streams, float("inf"), f"the compiler failed ({lines[0] if lines else type(error).__name__})")


def _seconds_per_step(streams: KeptKeys) -> float:
    """Time steps in which no row is active: they compute the same and change nothing. The first does not count."""
    device, n_row = streams.reader.device, streams.memory.batch_size
    nothing = torch.zeros(n_row, dtype=torch.int64, device=device)
    seconds = []
    for _ in range(1 + _TRIALS):
        begin = time.perf_counter()
        streams.reader.head(streams.step(nothing, nothing.bool()))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
