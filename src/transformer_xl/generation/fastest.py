"""Find out what reads single tokens fastest, by trying, because it depends on the processor, the model and the rows."""

import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from transformer_xl.errors import ConfigError
from transformer_xl.model.precision import InferencePrecision, cannot_compile
from transformer_xl.reading.stream import KeptKeys

Compile = bool | Literal["auto"]

COMPILE_SECONDS = 10.0
"""About what compiling takes the first time (4 to 12 s on two cores); `auto` compiles if tokens would take twice as long."""

_TRIALS = 5


def fastest_stream(
    open_stream: Callable[[InferencePrecision], KeptKeys],
    precisions: Sequence[InferencePrecision],
    *,
    compile: Compile,
    expected_tokens: int,
) -> tuple[KeptKeys, str]:
    """Open the streams that step fastest, and say why they are what they are; see `Decoder` for `compile`.

    `open_stream` opens empty streams in one of `precisions`. A single precision without compilation is taken without a trial.
    """
    if compile not in (True, False, "auto"):
        raise ConfigError(f"compile ({compile!r}) must be True, False or 'auto'")
    if compile is True:
        tried = {precision: _compiled(open_stream(precision)) for precision in precisions}
        best = min(tried.values(), key=lambda found: found.seconds)
        if best.problem:
            raise ConfigError(f"compile (True) cannot work here: {best.problem}; use compile='auto' or False")
        figures = [(f"{name} compiled", found.seconds) for name, found in tried.items()]
        return best.streams, _reason(figures) if len(figures) > 1 else "as set"
    if compile is False and len(precisions) == 1:
        return open_stream(precisions[0]), "as set"

    figures, best, seconds = [], None, float("inf")
    for precision in precisions:
        streams = open_stream(precision)
        taken = _seconds_per_step(streams)
        figures.append((precision, taken))
        if taken < seconds:
            best, seconds = streams, taken
    assert best is not None
    if compile is False or seconds * expected_tokens <= 2 * COMPILE_SECONDS:
        return best, _reason(figures)
    # the narrowest numbers are read fastest; open streams are used again, because rings may be large
    candidate = best if best.reader.precision == precisions[-1] else open_stream(precisions[-1])
    found = _compiled(candidate)
    if found.seconds < seconds:
        return candidate, _reason([*figures, (f"{precisions[-1]} compiled", found.seconds)])
    candidate.reader.interpret()
    return best, f"{_reason(figures)}, not compiled: {found.problem or f'{found.seconds * 1e3:.1f} ms'}"


class _Compiled(NamedTuple):
    """Streams with compiled code, the seconds of their step, and what went wrong, if anything."""

    streams: KeptKeys
    seconds: float
    problem: str | None = None


def _reason(figures: Sequence[tuple[str, float]]) -> str:
    return f"measured per token: {', '.join(f'{name} {seconds * 1e3:.1f} ms' for name, seconds in figures)}"


def _compiled(streams: KeptKeys) -> _Compiled:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    problem = cannot_compile(streams.reader.device)
    if problem:
        return _Compiled(streams, float("inf"), problem)
    streams.reader.compile()
    try:
        return _Compiled(streams, _seconds_per_step(streams))
    except (TorchDynamoException, FailOnRecompileLimitHit, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
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
