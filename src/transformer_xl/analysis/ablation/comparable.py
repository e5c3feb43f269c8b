"""In which unit the runs of an ablation can be compared, and why in none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformer_xl.analysis.ablation.plan import Plan
from transformer_xl.texts import text_difference

Unit = Literal["loss", "bpc"]


@dataclass(frozen=True)
class Comparable:
    """What can be compared.

    Attributes:
        unit: `loss`, nats per token, or `bpc`, bits per character; None: nothing.
        why_not: why nothing can, as a clause; empty if something can.
    """

    unit: Unit | None
    why_not: str = ""


def comparable(plan: Plan, results: Sequence[dict[str, Any]], *, tokens: int | None) -> Comparable:
    """Return the unit in which runs can be compared: per token, or where tokens are not the same, per character.

    Args:
        plan: of the ablation.
        results: of the runs that were scored.
        tokens: only so many of a split were read; None: all, or a share of the same text.
    """
    first, *others = (variant.config.data for variant in plan.variants)
    if len({result["text"] for result in results}) > 1 or any(text_difference(first, other) for other in others):
        return Comparable(None, "the variants were not scored on the same text")
    if len({result["tokenizer"] for result in results}) < 2:
        return Comparable("loss")
    lossy = dict.fromkeys(result["variant"] for result in results if result.get("loses"))  # older results do not say
    if lossy:
        why = f"vocabularies differ, and not all of the text is predicted by {', '.join(lossy)}"
        return Comparable(None, f"{why}, so that bits per character differ, too")
    if tokens is not None:
        return Comparable(None, f"vocabularies differ, so that {tokens:,} tokens are not the same text")
    return Comparable("bpc")
