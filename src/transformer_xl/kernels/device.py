"""What a device computes fast: its precision, the context that turns it on, and whether code can be compiled for it."""

import contextlib
import platform
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from transformer_xl.console import warn
from transformer_xl.errors import ConfigError, did_you_mean, shown
from transformer_xl.process import is_reporter

Precision = Literal["fp32", "bf16", "fp16"]
"""The type of matrix products in training."""

InferencePrecision = Literal["fp32", "bf16", "fp16", "int8"]
"""The type of weights at inference; with int8, keys, values and products are bf16."""

PrecisionName = Literal["auto", "fp32", "bf16", "fp16", "int8"]
"""An `InferencePrecision`, or `auto`: whatever is fast here."""

_CPUINFO = Path("/proc/cpuinfo")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """Return the device of a name; `auto` takes a GPU if there is one, and warns of one that cannot be used.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            name = "cuda" if torch.cuda.is_available() else "cpu"
        for each in told if name == "cpu" else ():
            reason = _first_sentence(str(each.message).removeprefix("CUDA initialization: "))
            warn(f"the GPU cannot be used ({reason}), so this computes on the CPU", quiet=not is_reporter())
    try:
        device = torch.device(name)
    except RuntimeError:
        known = ("auto", "cpu", "cuda", "cuda:N", "mps")
        near = "did you mean 'cuda'?" if name.startswith("gpu") else did_you_mean(name, known)
        raise ConfigError(f"unknown device {shown(name)}; {near}") from None
    try:
        torch.zeros(1, device=device).item()  # "meta" makes tensors, but computes nothing
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = "" if isinstance(error, NotImplementedError) else f" ({_first_sentence(str(error))})"  # of no interest
        raise ConfigError(f"this machine cannot compute on device '{name}'{reason}; use auto or cpu") from None
    return device


def _first_sentence(message: str) -> str:
    return message.strip().partition("\n")[0].partition(". ")[0].removesuffix(".")


def processor() -> str:
    """Return the processor's name."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'unknown'} ({platform.machine()})"


def choose_precision(name: str, device: torch.device) -> tuple[Precision, str]:
    """Return the precision of a name (auto, fp32, bf16, fp16) and a reason to print.

    `auto` takes bf16 where the processor multiplies it natively. A CPU without AVX512-BF16, AMX or ARM's BF16 instructions
    emulates bf16, which is slower than fp32.
    """
    if name in ("fp32", "bf16", "fp16"):
        return name, "as set"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return "bf16", f"{torch.cuda.get_device_name(device)} multiplies bf16 natively"
        return "fp16", f"{torch.cuda.get_device_name(device)} multiplies fp16 natively, bf16 not"
    if device.type == "cpu":
        known = instructions()
        fast = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in known]
        if fast:
            return "bf16", f"this processor multiplies bf16 natively ({fast[0]})"
        return "fp32", f"this processor ({platform.machine()}) has no bf16 instructions"
    return "fp32", f"nothing faster is known to be safe on {device.type}"


def instructions() -> Collection[str]:
    """Return the names of the processor's instructions, perhaps among other words."""
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, is_there in torch.cpu.get_capabilities().items() if is_there}
    # torch 2.10 does not say; Linux does, by the same names
    return set(_CPUINFO.read_text(encoding="utf-8").split()) if _CPUINFO.exists() else ()


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[object]:
    """Return the context in which matrix products use `precision`; weights and memory stay fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def in_autocast(device: torch.device) -> bool:
    """Return whether products on a device are rounded now; the meta device knows no autocast."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def in_full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Turn autocast off in a context."""
    return torch.autocast(device.type, enabled=False) if device.type != "meta" else contextlib.nullcontext()


def activation_dtype(precision: InferencePrecision, weights: torch.dtype) -> torch.dtype:
    """Return the type of activations, keys and values at inference; "fp32" means the type of the model's own weights."""
    return _DTYPES.get(precision, weights)


def at_least_fp32(x: Tensor) -> Tensor:
    """Return bf16 and fp16 numbers as fp32, and others as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def narrowed(x: Tensor) -> Tensor:
    """Return x in the type in which autocast multiplies it, so that what several products read is converted once."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if in_autocast(x.device) else x


def check_precision(name: str, known: Sequence[str] = get_args(PrecisionName)) -> None:
    """Refuse a name that is not among those known."""
    if name not in known:
        raise ConfigError(f"unknown precision '{name}'; {did_you_mean(str(name), known)}")


def precision_of_segments(name: str, device: torch.device) -> InferencePrecision:
    """Return the precision for scoring a text segment by segment; `auto` takes what the device multiplies natively.

    This is not for single tokens, whose speed is that of reading the weights: a `Decoder` tries what is fastest.

    Raises:
        ConfigError: an unknown name.

    Example:
        >>> precision_of_segments("int8", torch.device("cpu"))
        'int8'
    """
    check_precision(name)
    return choose_precision(name, device)[0] if name == "auto" else cast("InferencePrecision", name)


def cannot_compile(device: torch.device) -> str | None:
    """Say why nothing can be compiled for a device here; None if it can, as far as can be told without trying."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is not installed"
    if device.type != "cpu":
        return f"inductor is not known to compile for {device.type}"
    from torch._inductor import cpp_builder, exc  # imports half of torch, so only where it is asked for

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError) as error:
        return "no C++ compiler is found" if isinstance(error, exc.InvalidCxxCompiler) else str(error)
    return None
