"""What a text costs in all, with memory and without."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_xl.analysis.explain.facts import Facts


@dataclass(frozen=True)
class Totals:
    """Sums over all predicted tokens.

    Attributes:
        tokens: predicted tokens.
        n_characters: that these stand for.
        nats: in total.
        nats_without: the same without memory; None: the model has none.
    """

    tokens: int
    n_characters: int
    nats: float
    nats_without: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON; loss is in nats per token, bpc in bits per character."""
        without = self.nats_without
        figures: dict[str, Any] = {
            "tokens": self.tokens,
            "n_characters": self.n_characters,
            "nats": self.nats,
            "loss": self.nats / self.tokens,
            "bpc": self._bpc(self.nats),
        }
        if without is not None:
            figures |= {"nats_without_memory": without, "loss_without_memory": without / self.tokens}
            figures |= {"bpc_without_memory": self._bpc(without), "memory_is_worth_bpc": self._bpc(without - self.nats)}
        return figures

    def _bpc(self, nats: float) -> float:
        return nats / self.n_characters / math.log(2)


def totals(facts: Facts, *, n_characters: int) -> Totals:
    """Return the sums, in float64.

    Args:
        facts: of all tokens.
        n_characters: that they stand for.
    """
    without = None if facts.without is None else float(facts.without.sum(dtype=np.float64))
    return Totals(len(facts.nats), n_characters, float(facts.nats.sum(dtype=np.float64)), without)
