"""A text explained: facts, passages and totals together, from which page and pictures are made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from transformer_xl.analysis.explain.facts import Facts, gather
from transformer_xl.analysis.explain.passages import Passage, best_passages
from transformer_xl.analysis.explain.shown import shown_text
from transformer_xl.analysis.explain.totals import Totals, totals
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import Precision
from transformer_xl.model_config import AttentionConfig, ModelConfig
from transformer_xl.reading.how import Reading


@dataclass(frozen=True)
class Explanation:
    """What a model made of a text.

    Attributes:
        name: of the text.
        run: of the model.
        ids: int64 (N,), the tokens.
        n_left_out: tokens after these that were not read.
        tokenizer: of the ids.
        config: of the model.
        reading: how it was read.
        precision: of the matrix products.
        facts: about each token.
        n_characters: that the predicted tokens stand for; None: as many as are shown.
    """

    name: str
    run: str
    ids: np.ndarray
    n_left_out: int
    tokenizer: Tokenizer = field(repr=False)
    config: ModelConfig
    reading: Reading
    precision: str
    facts: Facts = field(repr=False)
    n_characters: int | None = None

    @cached_property
    def passages(self) -> list[Passage]:
        """Those that gain most from memory; without memory the most surprising ones."""
        gain = self.facts.gain
        return best_passages(self.facts.nats if gain is None else gain, tgt_len=self.reading.tgt_len)

    @cached_property
    def totals(self) -> Totals:
        """Sums over all tokens."""
        return totals(self.facts, n_characters=self.n_characters or self._n_shown())

    def _n_shown(self) -> int:
        shown, first = (shown_text(self.tokenizer, ids).text for ids in (self.ids, self.ids[:1]))
        return max(1, len(shown) - len(first))

    @property
    def heads(self) -> tuple[int, int] | None:
        """Layers and heads per layer; None where nothing attends."""
        return (self.config.n_layer, self.config.n_head) if isinstance(self.config, AttentionConfig) else None


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
    """Read a text with memory and without, and find what memory bought each token.

    Args:
        model: of any kind.
        tokenizer: of the ids.
        ids: integers (N,), N ≥ 2.
        reading: how long segments and memory are.
        name: of the text, for titles.
        run: of the model, for titles.
        top: tokens shown that the model found most likely.
        most: tokens read, at most; None: all.
        n_characters: that the predicted tokens stand for, if all are read; None: as many as are shown.
        precision: of the matrix products.
        on_tokens: called with the number of tokens just read.

    Raises:
        CorpusError: fewer than two tokens.
        ConfigError: lengths that cannot work together.
    """
    read = ids if most is None else ids[:most]
    facts = gather(model, read, reading, top=top, precision=precision, on_tokens=on_tokens)
    left_out = len(ids) - len(read)
    known = None if left_out else n_characters
    return Explanation(name, run, read, left_out, tokenizer, model.config, reading, precision, facts, known)
