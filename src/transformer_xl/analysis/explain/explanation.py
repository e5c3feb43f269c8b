"""A text explained by facts, totals and the passages that gain most from memory; page and pictures show them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from transformer_xl.analysis.explain.facts import Facts, gather
from transformer_xl.analysis.explain.shown import shown_text
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import Precision
from transformer_xl.model_config import ModelConfig
from transformer_xl.reading.evaluation import Reading


@dataclass(frozen=True)
class Passage:
    """A few tokens in a row."""

    begin: int  # place of the first token in the text
    end: int  # place after the last one
    score: float  # nats that memory saved on them; without memory, their nats
    best: int  # place of the token with the largest share of the score


@dataclass(frozen=True)
class Explanation:
    """What a model made of a text."""

    name: str  # of the text
    run: str  # of the model
    ids: np.ndarray  # int64 (N,)
    n_left_out: int  # tokens after these that were not read
    tokenizer: Tokenizer = field(repr=False)
    config: ModelConfig
    reading: Reading
    precision: str
    facts: Facts = field(repr=False)
    n_characters: int | None = None  # of the predicted tokens; None: as many as are shown

    @cached_property
    def passages(self) -> list[Passage]:
        """The passages that gain most from memory; without memory, the most surprising ones."""
        gain = self.facts.gain
        return best_passages(self.facts.nats if gain is None else gain, tgt_len=self.reading.tgt_len)

    @cached_property
    def totals(self) -> dict[str, Any]:
        """Sums and means over all predicted tokens, as JSON values."""
        facts, n_token = self.facts, len(self.facts.nats)
        n_characters = self.n_characters
        if not n_characters:
            shown, first = (shown_text(self.tokenizer, ids).text for ids in (self.ids, self.ids[:1]))
            n_characters = max(1, len(shown) - len(first))
        nats = float(facts.nats.sum(dtype=np.float64))

        def bpc(nats: float) -> float:
            return nats / n_characters / math.log(2)

        figures = {"tokens": n_token, "n_characters": n_characters, "nats": nats, "loss": nats / n_token, "bpc": bpc(nats)}
        if facts.without is None:
            return figures
        without = float(facts.without.sum(dtype=np.float64))
        figures |= {"nats_without_memory": without, "loss_without_memory": without / n_token}
        return figures | {"bpc_without_memory": bpc(without), "memory_is_worth_bpc": bpc(without - nats)}

    @property
    def heads(self) -> tuple[int, int] | None:
        """Layers and heads per layer; None where nothing attends."""
        return (self.config.n_layer, self.config.heads_per_layer) if self.config.attends else None


def explain(
    model: LanguageModel,
    tokenizer: Tokenizer,
    ids: np.ndarray,
    reading: Reading,
    *,
    name: str = "text",
    run: str = "model",
    top: int = 5,
    most: int | None = None,
    n_characters: int | None = None,
    precision: Precision = "fp32",
    on_tokens: Callable[[int], object] | None = None,
) -> Explanation:
    """Read at most `most` tokens of a text with memory and without, and find what memory gained each; raises as `gather`.

    See `Explanation` for the other arguments; `top` is the number of likeliest tokens shown.
    """
    read = ids if most is None else ids[:most]
    facts = gather(model, read, reading, top=top, precision=precision, on_tokens=on_tokens)
    left_out = len(ids) - len(read)
    known = None if left_out else n_characters
    return Explanation(name, run, read, left_out, tokenizer, model.config, reading, precision, facts, known)


def best_passages(values: np.ndarray, *, tgt_len: int, n: int = 50) -> list[Passage]:
    """Return the `n` passages with the highest sums above zero, the highest first; none crosses a border of segments.

    `values` begin with the second token of the text.

    Example:
        >>> best_passages(np.array([0.0, 1.0, 5.0, 0.0]), tgt_len=2)
        [Passage(begin=3, end=5, score=5.0, best=3), Passage(begin=1, end=3, score=1.0, best=2)]
    """
    length = -(-tgt_len // -(-tgt_len // 64))  # equal passages of 64 tokens at most
    segment_starts = np.arange(0, len(values), tgt_len)
    starts = np.concatenate([np.arange(start, min(start + tgt_len, len(values)), length) for start in segment_starts])
    sums = np.add.reduceat(values.astype(np.float64), starts)
    ends = np.append(starts[1:], len(values))
    order = np.argsort(-sums, kind="stable")[:n]
    chosen = [(int(starts[i]), int(ends[i]), float(sums[i])) for i in order if sums[i] > 0]
    return [Passage(a + 1, b + 1, score, int(a + values[a:b].argmax()) + 1) for a, b, score in chosen]
