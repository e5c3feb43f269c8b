"""The names of precisions that callers may give, `auto` among them."""

from collections.abc import Sequence
from typing import Literal, cast, get_args

import torch

from transformer_xl.errors import ConfigError, did_you_mean
from transformer_xl.model.frozen import InferencePrecision
from transformer_xl.model.precision import choose_precision

PrecisionName = Literal["auto", "fp32", "bf16", "fp16", "int8"]
"""An `InferencePrecision`, or `auto`: whatever is fast here."""


def check_precision(name: str, known: Sequence[str] = get_args(PrecisionName)) -> None:
    """Refuse a name that is not among those known.

    Raises:
        ConfigError: it is not.
    """
    if name not in known:
        raise ConfigError(f"unknown precision '{name}'; {did_you_mean(str(name), known)}")


def precision_of_segments(name: str, device: torch.device) -> InferencePrecision:
    """Return the precision in which a text is scored segment by segment; `auto` takes what the device multiplies natively.

    For single tokens, which are as fast as weights can be read, a `Decoder` finds out by trying.

    Raises:
        ConfigError: an unknown name.

    Example:
        >>> precision_of_segments("int8", torch.device("cpu"))
        'int8'
    """
    check_precision(name)
    return choose_precision(name, device)[0] if name == "auto" else cast(InferencePrecision, name)
