"""How much time a memory saves: `txl bench eval-speed`, the setting of the paper's table 9.

Both models have the same sizes and precision, and a token sees L positions, itself among them:

    vanilla   reads L tokens, and predicts the one that follows them (with a stride of S the last S of them)
    ours      reads a segment after a memory of L positions whose keys and values are kept, and predicts all its tokens

Weights are random, because time does not depend on them. Tokens are drawn from a text, because an adaptive softmax takes longer
for rare ones.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transformer_xl.cost.hardware import Clock, seconds_of
from transformer_xl.cost.operations import flops_per_token
from transformer_xl.errors import ConfigError
from transformer_xl.model.precision import Precision, activation_dtype, autocast
from transformer_xl.model.reader import Reader
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.model_config import TransformerXLConfig, VanillaConfig

PUBLISHED = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""How many times longer the vanilla model takes for a token, by attention length: arXiv 1901.02860, table 9 (on one GPU)."""

_SEGMENTS = 2
"""Segments of ours that a round times, after one that brings its data back into the caches."""


@dataclass
class Times:
    """Seconds per token of both sides at one attention length, one value per round."""

    length: int  # positions that a token sees, itself among them
    vanilla: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    strided: list[float] = field(default_factory=list)  # of vanilla, which reads anew every `stride` tokens

    def slowdowns(self, theirs: Sequence[float]) -> list[float]:
        """Return how many times longer the vanilla model takes, in each round; `theirs` are its times."""
        return [each / own for each, own in zip(theirs, self.ours, strict=False)]


@dataclass(frozen=True)
class Sides:
    """The two models, the precision of both, and how they are read."""

    ours: TransformerXL
    vanilla: Vanilla  # of the same sizes, with positions for the greatest length
    precision: Precision  # of matrix products, and of kept keys and values
    text: np.ndarray  # integers (N,), tokens to draw from
    tgt_len: int  # tokens of a segment of ours
    stride: int | None = None  # tokens that the vanilla model predicts at a time, besides one; None: only one


def make_sides(
    config: TransformerXLConfig,
    text: np.ndarray,
    *,
    lengths: list[int],
    precision: Precision,
    tgt_len: int,
    stride: int | None = None,
    clamp_len: int | None = None,
    device: torch.device,
) -> Sides:
    """Build both models with random weights, for all attention lengths; `config` must have a `vocab_size`.

    Raises:
        ConfigError: the stride is longer than a segment of the vanilla model.
    """
    if stride is not None and stride > min(lengths):
        raise ConfigError(
            f"stride ({stride}) must be at most the shortest attention length ({min(lengths)}), "
            "which the vanilla model reads at once"
        )
    sizes = config.model_dump(include=VanillaConfig.model_fields.keys() - {"mem_len", "max_len"})
    with device:
        vanilla = Vanilla(VanillaConfig(**sizes, max_len=max(lengths)))
        ours = TransformerXL(config).with_context(clamp_len=clamp_len)
    for module in vanilla.modules():
        if isinstance(module, nn.Linear):  # as ours keeps its weights: autocast would convert them for every token
            module.to(activation_dtype(precision, vanilla.dtype))
    return Sides(ours.eval(), vanilla.eval(), precision, text, tgt_len, stride)


def with_length(model: TransformerXL, length: int) -> TransformerXL:
    """Return a view of the model whose tokens see `length` positions each, themselves among them."""
    besides_self = model.config.same_length_besides_self
    return model.with_context(mem_len=max(length - besides_self, 1), same_length=True)


def count_parameters(sides: Sides, *, max_len: int) -> dict[str, int]:
    """Count the parameters: `ours`, `vanilla`, and `vanilla_positions`, the part of vanilla in its tables of positions.

    These count `max_len` positions, as a vanilla model is trained, instead of the many that are timed.
    """
    ours, vanilla = (sum(p.numel() for p in model.parameters()) for model in (sides.ours, sides.vanilla))
    table = sides.vanilla.positions
    positions = table[:, 0].numel() * max_len
    return {"ours": ours, "vanilla": vanilla - table.numel() + positions, "vanilla_positions": positions}


def run(
    sides: Sides,
    times: Sequence[Times],
    *,
    n_round: int,
    clock: Clock = time.perf_counter,
    report: Callable[[str], object] = lambda _: None,
) -> None:
    """Fill in the times round by round. Both sides take turns at all lengths, so that what slows the machine slows all."""
    runners = [_Runner(sides, entry.length) for entry in times]
    device, stride = sides.ours.device, sides.stride
    with torch.no_grad():
        for i, (entry, runner) in itertools.product(range(n_round), zip(times, runners, strict=True)):
            report(f"round {i + 1} of {n_round}, attention length {entry.length:,}")
            vanilla = seconds_of(partial(runner.read_anew, 1), device, clock)
            strided = [seconds_of(partial(runner.read_anew, stride), device, clock) / stride] if stride else []
            runner.read_on(1)
            ours = seconds_of(partial(runner.read_on, _SEGMENTS), device, clock) / (_SEGMENTS * sides.tgt_len)
            entry.vanilla.append(vanilla)
            entry.strided += strided
            entry.ours.append(ours)


def eval_speed_figures(times: Times, sides: Sides) -> dict[str, Any]:
    """Return times and operations per token of both sides at one attention length, after at least one round."""
    length, ids = times.length, sides.text

    def vanilla_flops(n_predicted: int) -> float:
        return flops_per_token(sides.vanilla.with_context(ext_len=length - n_predicted), ids, tgt_len=n_predicted)

    theirs, ours = vanilla_flops(1), flops_per_token(with_length(sides.ours, length), ids, tgt_len=sides.tgt_len)
    strided = sides.stride and {
        "tokens": sides.stride,
        "vanilla_seconds": _spread(times.strided),
        "slowdown": _spread(times.slowdowns(times.strided)),
        "flops_ratio": vanilla_flops(sides.stride) / ours,
    }
    return {
        "length": length,
        "rounds": len(times.ours),
        "vanilla_seconds": _spread(times.vanilla),
        "our_seconds": _spread(times.ours),
        "slowdown": _spread(times.slowdowns(times.vanilla)),
        "published_slowdown": PUBLISHED.get(length),
        "vanilla_flops": theirs,
        "our_flops": ours,
        "flops_ratio": theirs / ours,
        **({"stride": strided} if strided else {}),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class _Runner:
    """Both sides at one length, ready to run."""

    def __init__(self, sides: Sides, length: int) -> None:
        self._sides = sides
        self._drawn = np.random.default_rng(0)
        self._text = self._tokens(length + 1)
        self._segment = self._tokens(sides.tgt_len + 1)
        model = with_length(sides.ours, length)
        self._reader = Reader(model, tgt_len=sides.tgt_len, precision=sides.precision)
        empty = model.init_mems(1)
        full = replace(
            empty, hidden=tuple(map(torch.randn_like, empty.hidden)), n_valid=torch.full_like(empty.n_valid, model.mem_len)
        )
        self._memory = self._reader.from_mems(full)

    def _tokens(self, n: int) -> Tensor:
        drawn = self._drawn.choice(self._sides.text, (1, n)).astype(np.int64)
        return torch.from_numpy(drawn).to(self._sides.ours.device)

    def read_anew(self, n_predicted: int) -> None:
        """Read a context with the vanilla model, and score its last tokens."""
        vanilla = self._sides.vanilla
        with autocast(vanilla.device, self._sides.precision):
            h_BTD, _ = vanilla.read(self._text[:, :-1])
            vanilla.softmax.nll(h_BTD[:, -n_predicted:], self._text[:, -n_predicted:], vanilla.embedding)

    def read_on(self, n_segment: int) -> None:
        """Read segments with ours, and score them."""
        for _ in range(n_segment):
            h_BTD = self._reader.read(self._segment[:, :-1], self._memory)
            self._reader.softmax.nll(h_BTD.flatten(0, 1), self._segment[0, 1:])
