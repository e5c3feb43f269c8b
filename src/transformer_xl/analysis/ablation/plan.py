"""What an ablation compares, and how: variants, seeds, a budget, and how they are scored."""

from dataclasses import dataclass
from typing import Any

from transformer_xl.analysis.ablation.variants import Variant, differences
from transformer_xl.config import RunConfig


@dataclass(frozen=True)
class Trial:
    """One run of an ablation: a variant, trained once.

    Attributes:
        variant: what is trained.
        seed: of weights and dropout.
    """

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{self.variant.name}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What is compared, and how; frozen when an ablation begins.

    Attributes:
        variants: that are compared.
        seeds: each is trained with so many: the recipe's, and those that follow.
        steps: budget of each run; None: another.
        minutes: budget of training time, turned into steps by the pace of each variant; None: another, or the recipe's own.
        validations: so many in each run, for its curve; None: as the recipe says.
        lengths: attention lengths to score; None: those around the trained one.
        exact: score vanilla models one position at a time, too.
        tokens: at most so many of the split are scored; None: all.
    """

    variants: tuple[Variant, ...]
    seeds: int = 1
    steps: int | None = None
    minutes: float | None = None
    validations: int | None = None
    lengths: tuple[int, ...] | None = None
    exact: bool = False
    tokens: int | None = None

    @property
    def trials(self) -> list[Trial]:
        """All runs in the order in which they are trained: every variant once, then all with the next seed."""
        return [Trial(variant, variant.config.train.seed + k) for k in range(self.seeds) for variant in self.variants]

    @property
    def paced(self) -> list[Variant]:
        """The variants whose budget is time."""
        return [variant for variant in self.variants if self.minutes_of(variant)]

    def minutes_of(self, variant: Variant) -> float | None:
        """Return the training time that a variant is given; None: its budget is another."""
        if self.steps:
            return None
        return self.minutes or variant.config.train.max_minutes

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        variants = [vars(variant) | {"config": variant.config.model_dump(mode="json")} for variant in self.variants]
        return vars(self) | {"variants": variants, "lengths": None if self.lengths is None else list(self.lengths)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        """Rebuild it from JSON values."""
        variants = tuple(Variant(**{**entry, "config": RunConfig(**entry["config"])}) for entry in values["variants"])
        lengths = values["lengths"]
        return cls(**{**values, "variants": variants, "lengths": None if lengths is None else tuple(lengths)})

    def difference(self, other: "Plan") -> str | None:
        """Return in what another plan differs first, as `what (its value) is not that (own value)`; None: in nothing."""
        for name in ("seeds", "steps", "minutes", "validations", "lengths", "exact", "tokens"):
            own, its = getattr(self, name), getattr(other, name)
            if own != its:
                return f"{name} ({_shown(its)}) differs from its {name} ({_shown(own)})"
        own, its = ([variant.name for variant in plan.variants] for plan in (self, other))
        if own != its:
            return f"variants ({', '.join(its)}) differ from its variants ({', '.join(own)})"
        for one, another in zip(self.variants, other.variants, strict=True):
            for key, before, after in differences(one.config, another.config):
                return f"{key} of '{one.name}' ({after!r}) differs from what it was ({before!r})"
        return None


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
