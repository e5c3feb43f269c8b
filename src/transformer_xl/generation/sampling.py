"""`Sampling`: how the next token is drawn, for Python, command line and server; torch is not imported, as of a command's help.

`choice.py` draws by it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, get_args, get_type_hints

from transformer_xl.errors import Bounds, ConfigError

_LARGEST = 2**31 - 1
"""More than any vocabulary or text has; every library can hold it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw from the distribution of the next token.

    Penalty and bias come first, then temperature, top-k, top-p and min-p: the order of Hugging Face, except that a bias is
    added after the penalty, so that the penalty does not change it. Two others differ where it matters: llama.cpp filters
    before it applies the temperature, vLLM has min-p before top-k. A penalty applies to scores; with an adaptive softmax these
    are log-probabilities, all negative, so the same number penalizes likely tokens little.

    Attributes:
        temperature: 1 draws with the model's own probabilities, lower favors likely tokens, 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the fewest likeliest tokens that together have this probability.
        min_p: draw from tokens at least this many times as likely as the likeliest.
        repetition_penalty: above 1 makes recent tokens less likely.
        repetition_window: how many of the last tokens count as recent; none: all.
        logit_bias: added to the scores of some token ids; -inf bans a token.

    Raises:
        ConfigError: a value out of range, or values that contradict each other.

    Example:
        >>> import torch
        >>> from transformer_xl.generation.choice import probabilities
        >>> probabilities(torch.tensor([0.5, 0.1, 0.3, 0.1]).log(), Sampling(top_k=2))
        tensor([0.6250, 0.0000, 0.3750, 0.0000])
    """

    temperature: Annotated[float, Bounds(0)] = 1.0
    top_k: Annotated[int | None, Bounds(1, _LARGEST, whole=True, optional=True)] = None
    top_p: Annotated[float | None, Bounds(0, 1, above=True, optional=True)] = None
    min_p: Annotated[float | None, Bounds(0, 1, optional=True)] = None
    # within these, a penalty leaves scores finite
    repetition_penalty: Annotated[float, Bounds(1e-9, 1e9)] = 1.0
    repetition_window: Annotated[int | None, Bounds(1, _LARGEST, whole=True, optional=True)] = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller may change theirs
        for name, bounds in NUMBERS.items():
            bounds.check(name, getattr(self, name))
        for token, bias in self.logit_bias.items():
            if token < 0 or not bias < math.inf:
                raise ConfigError(
                    f"logit_bias of token id {token} ({bias}) must be a number below infinity, and the id at least 0"
                )
        idle = {"top_k": self.top_k not in (None, 1), "top_p": self.top_p not in (None, 1), "min_p": bool(self.min_p)}
        for name in (name for name, is_set in idle.items() if is_set and self.temperature == 0):
            raise ConfigError(
                f"temperature 0 takes the likeliest token, so {name} ({getattr(self, name)}) would do nothing; "
                f"drop {name}, or give a temperature above 0"
            )

    def check(self, vocab_size: int) -> None:
        """Raise a ConfigError for a bias of an id outside the vocabulary, or one that bans all of it."""
        if self.logit_bias and (highest := max(self.logit_bias)) >= vocab_size:
            raise ConfigError(f"logit_bias has token id {highest}, which is outside the vocabulary ({vocab_size})")
        if sum(bias == -math.inf for bias in self.logit_bias.values()) == vocab_size:
            raise ConfigError(f"logit_bias bans all {vocab_size} tokens; leave one that can be drawn")


_HINTS = get_type_hints(Sampling, include_extras=True)

NUMBERS: dict[str, Bounds] = {name: get_args(hint)[1] for name, hint in _HINTS.items() if name != "logit_bias"}
"""The settings that are numbers, with their bounds."""
