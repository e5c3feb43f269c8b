"""Choose the next token from its scores, as a `Sampling` says.

`probabilities` is the definition: small functions, one after another, over all scores. `choose` draws from the same
distribution, but it sorts no vocabulary, and of an adaptive softmax it computes only the tails that can matter.

Shapes: R rows, V vocabulary.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from transformer_xl.generation.drawing import RejectionSampler, draw_known, infinite_beyond_fp32, require_drawable
from transformer_xl.generation.sampling import Sampling
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


def probabilities(logits: Tensor, sampling: Sampling, history: Sequence[int] = ()) -> Tensor:
    """Return the distribution fp32 (…, V) that tokens are drawn from.

    Args:
        logits: (…, V), unnormalized scores or log-probabilities.
        sampling: how tokens are drawn.
        history: the tokens before, the same for all rows.

    Raises:
        ConfigError: a bias that does not fit the vocabulary, or no token that can be drawn.
    """
    sampling.check(logits.shape[-1])
    seen = _penalized(sampling, history, logits.shape[-1])
    scores = torch.from_numpy(_adjusted(logits.float().numpy(force=True), 0, sampling, seen, sampling.logit_bias))
    best = scores.amax(-1, keepdim=True)
    require_drawable(bool(best.isfinite().all()))
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(logits.device, torch.float32)
    return _filtered(scores, best, sampling).softmax(-1).to(logits.device, torch.float32)


def choose_together(
    scores: Scores, rows: Sequence[int], sampling: Sampling, generators: Sequence[np.random.Generator]
) -> list[int] | None:
    """Draw the next tokens of some rows on the GPU that scored them, and wait for it once; None: use `choose` for each.

    A row's token depends on its own scores and its own generator alone, which gives one number for it.

    Args:
        scores: of the next token.
        rows: the rows to draw for.
        sampling: how tokens are drawn.
        generators: of these rows.

    Returns:
        A token of each row, -1 where none can be drawn; None also if penalties or biases apply.
    """
    if (all_BV := scores.on_device) is None or sampling.logit_bias or sampling.repetition_penalty != 1:
        return None
    if sampling.top_p is not None and torch.are_deterministic_algorithms_enabled():
        return None  # PyTorch refuses sums of a GPU whose order is not fixed
    scores_RV = all_BV if list(rows) == list(range(len(all_BV))) else all_BV[list(rows)]
    best_R1 = scores_RV.amax(-1, keepdim=True)
    if sampling.temperature == 0:
        token_R = scores_RV.argmax(-1)
    else:
        uniform_R = torch.tensor([generator.random() for generator in generators], dtype=torch.float64)
        token_R = _drawn(_filtered(scores_RV, best_R1, sampling), uniform_R.to(all_BV.device))
    return torch.where(best_R1.squeeze(1).isfinite(), token_R, -1).tolist()


def choose(scores: Scores, row: int, sampling: Sampling, history: Sequence[int], generator: np.random.Generator) -> int:
    """Draw the next token of one row, whatever the other rows are and draw.

    Args:
        scores: of the next token.
        row: the row to draw for.
        sampling: how tokens are drawn.
        history: the tokens before, in this row.
        generator: of this row.

    Raises:
        ConfigError: a bias that does not fit the vocabulary, or no token that can be drawn.
    """
    sampling.check(scores.vocab_size)
    if (drawn := choose_together(scores, [row], sampling, [generator])) is not None:
        require_drawable(drawn[0] >= 0)
        return drawn[0]
    seen = _penalized(sampling, history, scores.vocab_size)
    top_p = None if sampling.top_p == 1 else sampling.top_p
    filters = {"temperature": _divisor(sampling), "top_k": sampling.top_k, "top_p": top_p, "min_p": sampling.min_p}
    known = scores.known(row)
    if known is not None:
        known = _adjusted(known, 0, sampling, seen, sampling.logit_bias)
        if sampling.temperature == 0:
            token = int(known.argmax())
            require_drawable(math.isfinite(known[token]))
            return token
        return draw_known(known, generator, **filters)
    adjusted = _adjusted_row(scores.row(row), sampling, seen)
    if sampling.temperature == 0:
        best, token = likeliest(adjusted, 1)
        require_drawable(math.isfinite(best[0]))
        return int(token[0])
    if sampling.top_k is not None and adjusted.n_cluster == len(adjusted.opened):  # none can be left out
        best, tokens = likeliest(adjusted, sampling.top_k)
        return int(tokens[draw_known(best, generator, **filters)])
    return RejectionSampler(adjusted, **filters).draw(generator)


def _divisor(sampling: Sampling) -> float:
    return max(sampling.temperature, _COLDEST)


def _filtered(scores: Tensor, best: Tensor, sampling: Sampling) -> Tensor:
    """Return scores (…, V) less the best of each row, fp64, divided by the temperature; -inf where a filter removes."""
    scores = (scores.double() - best.double()) / _divisor(sampling)  # at most 0, so that nothing overflows
    if sampling.top_k is not None:
        scores = keep_top_k(scores, sampling.top_k)
    if sampling.top_p not in (None, 1):
        scores = keep_top_p(scores, sampling.top_p)
    return keep_min_p(scores, sampling.min_p) if sampling.min_p else scores


def _penalized(sampling: Sampling, history: Sequence[int], vocab_size: int) -> list[int]:
    if sampling.repetition_penalty == 1:
        return []
    window = sampling.repetition_window
    seen = sorted(set(history if window is None else history[-window:]))
    return seen[bisect_left(seen, 0) : bisect_left(seen, vocab_size)]


def _adjusted(
    scores: np.ndarray, first: int, sampling: Sampling, seen: Sequence[int], biased: Mapping[int, float]
) -> np.ndarray:
    """Apply penalty and bias to the scores of tokens from `first` on, in a copy if there is something to apply."""
    if not seen and not biased:
        return scores
    scores = scores.copy()
    if seen:
        penalize(scores, [token - first for token in seen], sampling.repetition_penalty)
    if biased:
        add_bias(scores, {token - first: bias for token, bias in biased.items()})
    return scores


def _adjusted_row(row: RowScores, sampling: Sampling, seen: Sequence[int]) -> RowScores:
    """Apply penalty and bias. Tails in which a token may rise are opened, because their totals are not bounds any more."""
    biased = sampling.logit_bias
    if not seen and not biased:
        return row
    penalized_in, biased_in = by_cluster(row.borders, seen), by_cluster(row.borders, biased)
    rising = by_cluster(row.borders, [token for token, bias in biased.items() if bias > 0])
    if sampling.repetition_penalty < 1:
        rising |= penalized_in

    @functools.cache
    def adjusted(i: int) -> np.ndarray:
        bias = {token: biased[token] for token in biased_in.get(i, ())}
        return _adjusted(row.cluster(i), row.borders[i], sampling, penalized_in.get(i, ()), bias)

    touched = frozenset(penalized_in) | frozenset(biased_in)
    return RowScores(row.borders, row.totals, adjusted, opened=row.opened | frozenset(rising), lowered=touched)


def _drawn(nats_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return a token of each row (R,), each as likely as e to the power of its score, which is at most 0."""
    # whole numbers, because a GPU adds numbers in any order, and the same seed shall give the same text
    ends_RV = (nats_RV.exp() * _LENGTH).long().cumsum(-1)
    point_R = (uniform_R * ends_RV[:, -1]).long()  # less than the end, even rounded, because the number is less than 1
    return torch.searchsorted(ends_RV, point_R.unsqueeze(1), right=True).squeeze(1)
