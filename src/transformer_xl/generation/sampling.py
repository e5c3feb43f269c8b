"""Choose the next token from its scores.

`Sampling.probabilities` is the definition: small functions, one after another, over all scores. `Sampling.choose` draws from
the same distribution, but it sorts no vocabulary, and of an adaptive softmax it computes only the tails that can matter.

Shapes: V vocabulary.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from transformer_xl.errors import ConfigError
from transformer_xl.generation.drawing import RejectionSampler, draw_known, infinite_beyond_fp32, require_drawable
from transformer_xl.generation.scores import RowScores, Scores, by_cluster, likeliest

_COLDEST = 1e-30
"""The least divisor. At lower temperatures, and far above it, only tokens with the very best score are ever drawn."""


@infinite_beyond_fp32
def penalize(scores: np.ndarray, ids: Sequence[int], penalty: float) -> None:
    """Divide positive scores (…, V) of some different tokens by a penalty, and multiply negative ones by it, in place.

    Reference: Keskar et al. 2019 (CTRL, arXiv 1909.05858) section 4.1, who divide; negative scores are multiplied as in other
    programs, because division would make the tokens likelier.
    """
    index = np.array(ids)
    chosen = scores[..., index]
    scores[..., index] = chosen * np.where(chosen < 0, penalty, 1 / penalty)


@infinite_beyond_fp32
def add_bias(scores: np.ndarray, bias: Mapping[int, float]) -> None:
    """Add to the scores (…, V) of some tokens, in place; -inf bans a token."""
    scores[..., list(bias)] += np.array(list(bias.values()), scores.dtype)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k best scores (…, V), of equal scores those with the lowest ids; the others become -inf."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return scores.scatter(-1, order[..., k:], float("-inf"))


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the fewest best scores (…, V) whose probabilities add up to at least p; the others become -inf.

    Reference: Holtzman et al. 2020 (arXiv 1904.09751) section 3.1. Of equal scores those with the lowest ids come first.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[..., :1]).exp()
    before = weights.cumsum(-1) - weights  # the token that crosses the border stays
    outside = before >= p * weights.sum(-1, keepdim=True)
    return scores.scatter(-1, order, ordered.masked_fill(outside, float("-inf")))


def keep_min_p(scores: Tensor, p: float) -> Tensor:
    """Keep tokens that are at least p times as likely as the likeliest (…, V); the others become -inf.

    Reference: Nguyen et al. 2024 (arXiv 2407.01082) section 3.
    """
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + (math.log(p) if p else -math.inf), float("-inf"))


_LENGTH = 2.0**40
"""Length of the likeliest token on the line that `_drawn` draws from; 8 million such tokens fit 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw from the distribution of the next token; the settings apply in the order of the attributes.

    That is the order of Hugging Face, except that a bias is added after the penalty, so that the penalty does not change it.
    Two others differ where it matters: llama.cpp filters before it applies the temperature, vLLM has min-p before top-k.

    Attributes:
        repetition_penalty: for tokens that were there already; see `penalize`. It applies to scores. With an adaptive softmax
            these are log-probabilities, all negative, so the same number penalizes likely tokens little.
        repetition_window: how many of the last tokens count as being there; None: all, which takes longer with each token.
        logit_bias: added to the scores of some token ids; -inf bans a token.
        temperature: divides the scores; 0 takes the most likely token, of equally likely ones the lowest id.
        top_k: keep the k most likely tokens.
        top_p: keep the fewest most likely tokens whose probabilities reach this sum.
        min_p: keep tokens at least this many times as likely as the most likely one.

    Raises:
        ConfigError: a value out of range, or values that contradict each other.

    Example:
        >>> Sampling(top_k=2).probabilities(torch.tensor([0.5, 0.1, 0.3, 0.1]).log())
        tensor([0.6250, 0.0000, 0.3750, 0.0000])
    """

    repetition_penalty: float = 1.0
    repetition_window: int | None = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller may change theirs
        ranges = {
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0 and finite; 1 changes nothing"),
            "repetition_window": (self.repetition_window is None or self.repetition_window >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "at least 0 and finite; 0 takes the likeliest token"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1; leave it out to keep all tokens"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1; leave it out to keep all tokens"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1; leave it out to keep all tokens"),
        }
        for name, (fits, range_) in ranges.items():
            if not fits:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be {range_}")
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

    def probabilities(self, logits: Tensor, history: Sequence[int] | None = None) -> Tensor:
        """Return the distribution fp32 (…, V) that tokens are drawn from.

        Args:
            logits: (…, V), unnormalized scores or log-probabilities.
            history: the tokens before, the same for all rows; None: there are none.

        Raises:
            ConfigError: a bias that does not fit the vocabulary, or no token that can be drawn.
        """
        self.check(logits.shape[-1])
        seen = self._penalized(history or (), logits.shape[-1])
        scores = torch.from_numpy(self._adjusted(logits.float().numpy(force=True), 0, seen, self.logit_bias))
        best = scores.amax(-1, keepdim=True)
        require_drawable(bool(best.isfinite().all()))
        if self.temperature == 0:
            return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(logits.device, torch.float32)
        return self._filtered(scores, best).softmax(-1).to(logits.device, torch.float32)

    def _filtered(self, scores: Tensor, best: Tensor) -> Tensor:
        """Return scores (…, V) less the best of each row, fp64, divided by the temperature; -inf where a filter removes."""
        scores = (scores.double() - best.double()) / self._temperature  # at most 0, so that nothing overflows
        if self.top_k is not None:
            scores = keep_top_k(scores, self.top_k)
        if self._top_p is not None:
            scores = keep_top_p(scores, self._top_p)
        return keep_min_p(scores, self.min_p) if self.min_p else scores

    def choose_together(
        self, scores: Scores, rows: Sequence[int], generators: Sequence[np.random.Generator]
    ) -> Sequence[int] | None:
        """Draw the next tokens of some rows on the GPU that scored them, and wait for it once; None: use `choose` for each.

        A row's token depends on its own scores and its own generator alone, which gives one number for it.

        Args:
            scores: of the next token.
            rows: the rows to draw for.
            generators: of these rows.

        Returns:
            A token of each row, -1 where none can be drawn; None also if penalties or biases apply.
        """
        if (all_BV := scores.on_device) is None or self.logit_bias or self.repetition_penalty != 1:
            return None
        if self.top_p is not None and torch.are_deterministic_algorithms_enabled():
            return None  # PyTorch refuses sums of a GPU whose order is not fixed
        scores_RV = all_BV if list(rows) == list(range(len(all_BV))) else all_BV[list(rows)]
        best_R1 = scores_RV.amax(-1, keepdim=True)
        if self.temperature == 0:
            token_R = scores_RV.argmax(-1)
        else:
            uniform_R = torch.tensor([generator.random() for generator in generators], dtype=torch.float64)
            token_R = _drawn(self._filtered(scores_RV, best_R1), uniform_R.to(all_BV.device))
        return torch.where(best_R1.squeeze(1).isfinite(), token_R, -1).tolist()

    def choose(self, scores: Scores, row: int, history: Sequence[int], generator: np.random.Generator) -> int:
        """Draw the next token of one row, whatever the other rows are and draw.

        Args:
            scores: of the next token.
            row: the row to draw for.
            history: the tokens before, in this row.
            generator: of this row.

        Raises:
            ConfigError: a bias that does not fit the vocabulary, or no token that can be drawn.
        """
        self.check(scores.vocab_size)
        if (drawn := self.choose_together(scores, [row], [generator])) is not None:
            require_drawable(drawn[0] >= 0)
            return drawn[0]
        seen = self._penalized(history, scores.vocab_size)
        filters = {"top_k": self.top_k, "top_p": self._top_p, "min_p": self.min_p}
        known = scores.known(row)
        if known is not None:
            known = self._adjusted(known, 0, seen, self.logit_bias)
            if self.temperature == 0:
                token = int(known.argmax())
                require_drawable(math.isfinite(known[token]))
                return token
            return draw_known(known, generator, temperature=self._temperature, **filters)
        adjusted = self._adjusted_row(scores.row(row), seen)
        if self.temperature == 0:
            best, token = likeliest(adjusted, 1)
            require_drawable(math.isfinite(best[0]))
            return int(token[0])
        if self.top_k is not None and adjusted.n_cluster == len(adjusted.opened):  # none can be left out
            best, tokens = likeliest(adjusted, self.top_k)
            return int(tokens[draw_known(best, generator, temperature=self._temperature, **filters)])
        return RejectionSampler(adjusted, self._temperature, **filters).draw(generator)

    @property
    def _temperature(self) -> float:
        return max(self.temperature, _COLDEST)

    @property
    def _top_p(self) -> float | None:
        return None if self.top_p == 1 else self.top_p

    def _penalized(self, history: Sequence[int], vocab_size: int) -> list[int]:
        if self.repetition_penalty == 1:
            return []
        seen = sorted(set(history if self.repetition_window is None else history[-self.repetition_window :]))
        return seen[bisect_left(seen, 0) : bisect_left(seen, vocab_size)]

    def _adjusted(self, scores: np.ndarray, first: int, seen: Sequence[int], biased: Mapping[int, float]) -> np.ndarray:
        """Apply penalty and bias to the scores of tokens from `first` on, in a copy if there is something to apply."""
        if not seen and not biased:
            return scores
        scores = scores.copy()
        if seen:
            penalize(scores, [token - first for token in seen], self.repetition_penalty)
        if biased:
            add_bias(scores, {token - first: bias for token, bias in biased.items()})
        return scores

    def _adjusted_row(self, row: RowScores, seen: Sequence[int]) -> RowScores:
        """Apply penalty and bias. Tails in which a token may rise are opened, because their totals are not bounds any more."""
        biased = self.logit_bias
        if not seen and not biased:
            return row
        penalized_in, biased_in = by_cluster(row.borders, seen), by_cluster(row.borders, biased)
        rising = by_cluster(row.borders, [token for token, bias in biased.items() if bias > 0])
        if self.repetition_penalty < 1:
            rising |= penalized_in

        @functools.cache
        def adjusted(i: int) -> np.ndarray:
            own_bias = {token: biased[token] for token in biased_in.get(i, ())}
            return self._adjusted(row.cluster(i), row.borders[i], penalized_in.get(i, ()), own_bias)

        touched = frozenset(penalized_in) | frozenset(biased_in)
        return RowScores(row.borders, row.totals, adjusted, opened=row.opened | frozenset(rising), lowered=touched)


def _drawn(nats_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return a token of each row (R,), each as likely as e to the power of its score, which is at most 0."""
    # whole numbers, because a GPU adds numbers in any order, and the same seed shall give the same text
    ends_RV = (nats_RV.exp() * _LENGTH).long().cumsum(-1)
    point_R = (uniform_R * ends_RV[:, -1]).long()  # less than the end, even rounded, because the number is less than 1
    return torch.searchsorted(ends_RV, point_R.unsqueeze(1), right=True).squeeze(1)
