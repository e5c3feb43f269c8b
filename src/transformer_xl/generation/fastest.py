"""Find out what reads single tokens fastest, by trying, because it depends on the processor, the model and the rows."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import torch

from transformer_xl.data.corpora import cache_dir
from transformer_xl.errors import ConfigError
from transformer_xl.files import make_directories
from transformer_xl.kernels.device import InferencePrecision, PrecisionName, cannot_compile, choose_precision
from transformer_xl.reading.stream import KeptKeys

Compile = bool | Literal["auto"]

_TRIALS = 5

_COMPILE_SECONDS = 10.0
"""About what compiling takes the first time (4 to 12 s on two cores). Compiled code is assumed to halve a step's time."""


class Found(NamedTuple):
    """The stream that steps fastest, and why it is what it is."""

    stream: KeptKeys
    reason: str


def open_fastest(
    open_stream: Callable[[InferencePrecision], KeptKeys],
    precision: PrecisionName,
    device: torch.device,
    *,
    compile: Compile,
    expected_tokens: int,
    on_compile: Callable[[], object] = lambda: None,
) -> Found:
    """Open the streams that step fastest on a device, in a precision; on a GPU that is known, on a CPU it is tried out."""
    if device.type == "cuda":
        return captured_stream(open_stream, precision, device, compile=compile, on_compile=on_compile)
    precisions: list[InferencePrecision] = ["fp32", "bf16"] if precision == "auto" else [precision]
    return fastest_stream(open_stream, precisions, compile=compile, expected_tokens=expected_tokens, on_compile=on_compile)


def fastest_stream(
    open_stream: Callable[[InferencePrecision], KeptKeys],
    precisions: Sequence[InferencePrecision],
    *,
    compile: Compile,
    expected_tokens: int,
    on_compile: Callable[[], object] = lambda: None,
) -> Found:
    """Open the streams that step fastest, and say why they are what they are; see `Decoder` for `compile` and `on_compile`.

    `open_stream` opens empty streams in one of `precisions`, the narrowest last. A single precision without compilation is
    taken without a trial.
    """
    if compile is True:
        tried = {precision: _compiled(open_stream(precision), on_compile) for precision in precisions}
        best = _that_compiles(min(tried.values(), key=lambda found: found.seconds))
        figures = [f"{name} compiled {_ms(found.seconds)}" for name, found in tried.items()]
        return Found(best.stream, _measured(figures) or "as set")
    if compile is False and len(precisions) == 1:
        return Found(open_stream(precisions[0]), "as set")
    streams = {precision: open_stream(precision) for precision in precisions}
    seconds = {precision: _seconds_per_step(opened) for precision, opened in streams.items()}
    chosen = min(seconds, key=seconds.__getitem__)
    figures = [f"{name} {_ms(taken)}" for name, taken in seconds.items()]
    if compile is False:
        return Found(streams[chosen], _measured(figures))
    total = expected_tokens * seconds[chosen]
    reason = "too short to compile for"
    if total > 2 * _COMPILE_SECONDS:
        narrowest = precisions[-1]  # compiled, the narrowest numbers are read fastest
        found = _compiled(streams[narrowest], on_compile)
        figures += [] if found.problem else [f"{narrowest} compiled {_ms(found.seconds)}"]
        if found.seconds < seconds[chosen]:
            return Found(found.stream, _measured(figures))
        found.stream.reader.interpret()
        reason = f"not compiled: {found.problem or 'that is slower'}"
    return Found(streams[chosen], "; ".join(filter(None, [_measured(figures), reason])))


def keep_compiled_code() -> None:
    """Keep compiled code in the cache, unless the environment names a place; torch's default does not outlast a restart."""
    folder = cache_dir() / "compiled"
    with suppress(OSError):
        make_directories(folder)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


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
    precision, reason = (name, "as set") if name == "int8" else choose_precision(name, device)
    if (name, precision) == ("auto", "fp16"):  # whose numbers end at 65,504
        precision, reason = "fp32", "this GPU multiplies no bf16 natively"
    streams = open_stream(precision)
    if compile is True:
        _that_compiles(_compiled(streams, on_compile))
    try:
        streams.reader.capture(streams.memory)
    except Exception as error:  # of a driver, of a compiler of kernels, or of an operation that a graph cannot hold
        streams.reader.interpret(fused=False)
        return Found(streams, f"{reason}; no graph of steps ({str(error).strip().partition(chr(10))[0]})")
    return Found(streams, f"{reason}; each step is one graph")


class _Compiled(NamedTuple):
    """A stream with compiled code, the seconds of its step, and what went wrong, if anything."""

    stream: KeptKeys
    seconds: float
    problem: str | None = None


def _that_compiles(found: _Compiled) -> _Compiled:
    if found.problem:
        raise ConfigError(f"compile (True) cannot work here: {found.problem}; use compile='auto' or False")
    return found


def _measured(figures: Sequence[str]) -> str:
    """Say what was compared, if anything was; the text may take longer, for example on a machine that is busy meanwhile."""
    return f"measured before: {', '.join(figures)} per token" if len(figures) > 1 else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"


def _compiled(streams: KeptKeys, on_compile: Callable[[], object]) -> _Compiled:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    problem = cannot_compile(streams.reader.device)
    if problem:
        return _Compiled(streams, float("inf"), problem)
    on_compile()
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
