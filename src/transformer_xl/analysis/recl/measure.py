"""Relative effective context length: how far back a group of models makes use of a text (Dai et al. 2019, sec. 4.4, app. C).

    l_i(c, t)             loss of model i on token t, given c tokens of context
    b_c(t)                min over i of l_i(c, t), the group's baseline
    T                     the share r of tokens with the largest b_c(t), the hardest ones for all
    f_i(c, c')            mean over T of min(b_c(t), l_i(c', t))
    g_i(c, c')            (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c), what the longer context gains
    RECL_i                the first c, going up in steps of Δ, from which g_i(c, c + Δ) is below a threshold (0.01)

f_i(c, c) is the mean of b_c over T for every i. All models of a group have the same baseline, so a worse model does not seem to
gain more only because there is more left to gain.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_xl.errors import ConfigError

Losses = Callable[[int], np.ndarray]  # takes a context; returns nats (N,) of the same N tokens at every context


@dataclass(frozen=True)
class EffectiveLength:
    """The relative effective context length of one model."""

    context: int  # tokens
    at_least: bool  # the model still gained when the search ended, so the length may be larger

    def __str__(self) -> str:
        return f"{'≥ ' * self.at_least}{self.context:,}"


@dataclass(frozen=True)
class Recl:
    """What is known about a group of models."""

    lengths: dict[str, dict[float, EffectiveLength]]  # by model and r
    gains: dict[str, dict[float, dict[int, float]]]  # by model and r: g(c, c') by c', as far as the group went on
    losses: dict[str, dict[int, float]]  # by model: mean nats of all tokens, by c


def hardest(baseline: np.ndarray, share: float) -> np.ndarray:
    """Return the places of the `share` of largest losses, at least one; among equal ones the first.

    Example:
        >>> hardest(np.array([1.0, 3.0, 2.0, 3.0]), 0.5).tolist()
        [1, 3]
    """
    n = max(1, round(share * len(baseline)))
    return np.argsort(-baseline, kind="stable")[:n]


def relative_gain(baseline: np.ndarray, longer: np.ndarray, *, share: float) -> float:
    """Return g, the share by which a longer context, with nats l_i(c'), lowers the perplexity of the hardest tokens.

    Example:
        >>> round(relative_gain(np.log([8.0, 2.0]), np.log([4.0, 4.0]), share=0.5), 6)
        0.5
    """
    chosen = hardest(baseline, share)
    before = baseline[chosen].astype(np.float64)
    after = np.minimum(before, longer[chosen])
    return -math.expm1(float(after.mean() - before.mean()))


def measure(
    losses: Mapping[str, Losses],
    *,
    shares: Sequence[float] = (0.1, 0.5, 1.0),
    delta: int = 50,
    start: int | None = None,
    max_context: int = 1000,
    threshold: float = 0.01,
    longest: Mapping[str, int] | None = None,
) -> Iterator[Recl]:
    """Measure a group of models, asking for losses at longer contexts only as long as a model gains.

    Yields what is known after each step; the last one is the result. `shares` are values of r, `delta` is Δ, and `start` is the
    first c (None: `delta`). `longest` has, by model, the context beyond which its losses stay the same; its length is at most
    this.

    Example:
        >>> gains_until_20 = lambda context: np.full(4, 3.0 - min(context, 20) / 10)
        >>> *_, found = measure({"a": gains_until_20}, shares=[1.0], delta=5)
        >>> str(found.lengths["a"][1.0])
        '20'
    """
    context = delta if start is None else start
    _check(losses, shares, delta, context, max_context, threshold)
    lengths = {name: {share: EffectiveLength(context, at_least=True) for share in shares} for name in losses}
    gains: dict[str, dict[float, dict[int, float]]] = {name: {share: {} for share in shares} for name in losses}
    means: dict[str, dict[int, float]] = {name: {} for name in losses}
    baseline: np.ndarray | None = None
    ends = longest or {}

    def score(name: str, at: int) -> np.ndarray:
        """Return the losses at a context; record their mean, and the gains of the step that leads there."""
        own, at = losses[name](at), min(at, ends.get(name, at))
        means[name][at] = float(own.mean(dtype=np.float64))
        if baseline is not None:
            for share in shares:
                gains[name][share].setdefault(at, relative_gain(baseline, own, share=share))
        return own

    def still_gaining() -> list[str]:
        return [name for name, own in lengths.items() if any(length.at_least for length in own.values())]

    while True:
        baseline = np.minimum.reduce([score(name, context) for name in losses])
        yield copy.deepcopy(Recl(lengths, gains, means))
        longer = context + delta
        if longer > max_context:
            return
        for name in still_gaining():
            score(name, longer)
            for share, length in lengths[name].items():
                if length.at_least:
                    end = ends.get(name, longer + 1)
                    gained = gains[name][share][min(longer, end)] >= threshold
                    lengths[name][share] = EffectiveLength(
                        min(longer if gained else context, end), at_least=gained and longer < end
                    )
            yield copy.deepcopy(Recl(lengths, gains, means))
        if not still_gaining():
            return
        context = longer


def measure_groups(groups: Sequence[Sequence[str]], losses: Mapping[str, Losses], **options: Any) -> Iterator[list[Recl]]:
    """Measure one group of model names after another with `measure`; yields what is known about the groups begun so far."""
    known: list[Recl] = []
    for i, names in enumerate(groups):
        for found in measure({name: losses[name] for name in names}, **options):
            known[i:] = [found]
            yield list(known)


def _check(
    losses: Mapping[str, Losses], shares: Sequence[float], delta: int, start: int, max_context: int, threshold: float
) -> None:
    if not losses or not shares:
        raise ConfigError(f"{len(losses)} models and {len(shares)} values of r: at least one of each is needed")
    if not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"r ({', '.join(f'{share:g}' for share in shares)}) must be above 0 and at most 1")
    if delta < 1 or start < 1:
        raise ConfigError(f"delta ({delta}) and start ({start}) must be at least 1")
    if start + delta > max_context:
        raise ConfigError(
            f"max_context ({max_context:,}) leaves no step of delta ({delta:,}) after start ({start:,}); make it at least "
            f"{start + delta:,}"
        )
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold ({threshold:g}) must be between 0 and 1")
