"""What `evaluate` may spend time on to predict a text better: settings of the neural cache and of dynamic evaluation.

They are checked without torch; `cache.py` and `dynamic.py` give the equations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from transformer_xl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

DynamicRule = Literal["sgd", "rms"]
"""How the weights take a step."""

DEFAULT_LR: dict[DynamicRule, float] = {"sgd": 0.05, "rms": 3e-4}
"""Learning rates that suit small models; see docs/results.md."""


@dataclass(frozen=True)
class Cache:
    """Settings of the neural cache of `evaluate`.

    Attributes:
        size: n, how many places are kept.
        weight: λ, the share of the cache in the prediction.
        theta: θ, how much more similar states count than others; 0 counts tokens.

    Raises:
        ConfigError: values out of their range.

    Example:
        >>> Cache(500).weight
        0.1
    """

    size: int = 2000
    weight: float = 0.1
    theta: float = 5.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size of a cache ({self.size}) must be at least 1; to have no cache, leave it out")
        if not 0 < self.weight < 1:
            raise ConfigError(f"weight of a cache ({self.weight:g}) must be between 0 and 1, such as 0.1")
        if not 0 <= self.theta < math.inf:
            raise ConfigError(f"theta of a cache ({self.theta:g}) must be a number of at least 0, such as 5")

    def as_dict(self) -> dict[str, float]:
        """Return the settings for JSON."""
        return {"size": self.size, "weight": self.weight, "theta": self.theta}


@dataclass(frozen=True)
class Dynamic:
    """Settings of the dynamic evaluation of `evaluate`.

    Attributes:
        lr: η; None: a value that suits the rule.
        decay: λ, how far each step goes back towards the trained weights, 0 to 1.
        epsilon: ε of the RMS rule.
        mean_squares: MS of every parameter by name, see `mean_squares`; None: the SGD rule.

    Raises:
        ConfigError: values out of their range.

    Example:
        >>> Dynamic(decay=0.01).as_dict()
        {'rule': 'sgd', 'lr': 0.05, 'decay': 0.01}
    """

    lr: float | None = None
    decay: float = 0.0
    epsilon: float = 1.0
    mean_squares: "Mapping[str, Tensor] | None" = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf or not 0 < self.epsilon < math.inf:
            raise ConfigError(
                f"lr ({self.rate:g}) and epsilon ({self.epsilon:g}) of dynamic evaluation must be numbers above 0"
            )
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"decay ({self.decay:g}) of dynamic evaluation must be from 0 to 1")

    @property
    def rule(self) -> DynamicRule:
        """The rule: `rms` with mean squares, else `sgd`."""
        return "sgd" if self.mean_squares is None else "rms"

    @property
    def rate(self) -> float:
        """The learning rate η, whether it was given or not."""
        return DEFAULT_LR[self.rule] if self.lr is None else self.lr

    def as_dict(self) -> dict[str, str | float]:
        """Return the settings for JSON."""
        own: dict[str, str | float] = {"rule": self.rule, "lr": self.rate, "decay": self.decay}
        return own if self.mean_squares is None else own | {"epsilon": self.epsilon}
