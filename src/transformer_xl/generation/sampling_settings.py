"""How the next token is chosen: the settings, which are checked without torch; `sampling.py` says what they mean."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from transformer_xl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """What `Sampling` is told; see there."""

    repetition_penalty: float = 1.0
    repetition_window: int | None = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller may change theirs
        _require(
            0 < self.repetition_penalty < math.inf,
            f"repetition_penalty ({self.repetition_penalty}) must be above 0 and finite; 1 changes nothing",
        )
        _require(
            self.repetition_window is None or self.repetition_window >= 1,
            f"repetition_window ({self.repetition_window}) must be at least 1; repetition_penalty 1 turns the penalty off",
        )
        _require(
            0 <= self.temperature < math.inf,
            f"temperature ({self.temperature}) must be at least 0 and finite; 0 takes the likeliest token",
        )
        _require(
            self.top_k is None or self.top_k >= 1, f"top_k ({self.top_k}) must be at least 1; leave it out to keep all tokens"
        )
        _require(
            self.top_p is None or 0 < self.top_p <= 1,
            f"top_p ({self.top_p}) must be above 0 and at most 1; leave it out to keep all tokens",
        )
        _require(
            self.min_p is None or 0 <= self.min_p <= 1,
            f"min_p ({self.min_p}) must be at least 0 and at most 1; leave it out to keep all tokens",
        )
        for token, bias in self.logit_bias.items():
            _require(token >= 0, f"logit_bias has token id {token}; ids are 0 or more")
            _require(
                bias < math.inf,
                f"logit_bias of token id {token} ({bias}) must be a number below infinity; 100 all but forces a token",
            )
        idle = {"top_k": self.top_k not in (None, 1), "top_p": self.top_p not in (None, 1), "min_p": bool(self.min_p)}
        for name in (name for name, is_set in idle.items() if is_set and self.temperature == 0):
            raise ConfigError(
                f"temperature 0 takes the likeliest token, so {name} ({getattr(self, name)}) would do nothing; "
                f"drop {name}, or give a temperature above 0"
            )

    def check(self, vocab_size: int) -> None:
        """Raise a ConfigError for a bias of an id outside the vocabulary, or one that bans all of it."""
        if not self.logit_bias:
            return
        highest = max(self.logit_bias)
        _require(highest < vocab_size, f"logit_bias has token id {highest}, which is outside the vocabulary ({vocab_size})")
        n_banned = sum(bias == -math.inf for bias in self.logit_bias.values())
        _require(n_banned < vocab_size, f"logit_bias bans all {vocab_size} tokens; leave one that can be drawn")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
