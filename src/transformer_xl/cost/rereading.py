"""What a memory is worth in time: a token scored with it, and by a vanilla model that reads a whole segment anew for it.

The setting of the paper's table 9. Both sides see as many positions, itself among them, and have the same sizes and precision:

    vanilla   reads L tokens, and predicts the one that follows them (the last S of them with a stride of S)
    ours      reads a segment after a memory of L positions whose keys and values are kept, and predicts all its tokens

Weights are random, because time does not depend on them; tokens are drawn from a text, because with an adaptive softmax it does
depend on how rare they are.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from transformer_xl.cost.machine import Clock, seconds_of
from transformer_xl.cost.operations import flops_per_token
from transformer_xl.errors import ConfigError
from transformer_xl.model.memory import Mems
from transformer_xl.model.precision import Precision, activation_dtype, autocast
from transformer_xl.model.reader import Reader
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.model_config import TransformerXLConfig, VanillaConfig

PUBLISHED = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""How many times longer a token takes the vanilla model, by attention length: arXiv 1901.02860, table 9 (on one GPU)."""

_SEGMENTS = 2
"""Segments of ours that are timed in a round, after one that brings back what the other side drove out of the caches."""


@dataclass
class Race:
    """Both sides at one attention length."""

    length: int  # positions that a token sees, itself among them
    vanilla: list[float] = field(default_factory=list)  # seconds per token of each round
    ours: list[float] = field(default_factory=list)  # the same
    # seconds per token of the vanilla model that reads anew every `stride` tokens; empty without a stride
    strided: list[float] = field(default_factory=list)

    @property
    def slowdowns(self) -> list[float]:
        """How many times longer the vanilla model takes, in each round."""
        return [theirs / own for theirs, own in zip(self.vanilla, self.ours, strict=False)]

    @property
    def strided_slowdowns(self) -> list[float]:
        """The same with a stride."""
        return [theirs / own for theirs, own in zip(self.strided, self.ours, strict=False)]


@dataclass(frozen=True)
class Sides:
    """The two models, the precision of both, and how they are read."""

    ours: TransformerXL  # with the limit of distances that it is scored with
    vanilla: Vanilla  # of the same sizes, with as many positions as the greatest length
    precision: Precision  # of matrix products, and of kept keys and values
    text: np.ndarray  # integers (N,), tokens as frequent as they are read: rare ones cost an adaptive softmax more
    tgt_len: int  # tokens of a segment of ours
    stride: int | None = None  # tokens that the strided vanilla model predicts at a time; None: it is not measured


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
    """Build both models with random weights.

    Args:
        config: of ours; `vocab_size` must be set.
        text: integers (N,), tokens as frequent as they shall be read.
        lengths: attention lengths.
        precision: of both.
        tgt_len: tokens of a segment of ours.
        stride: of the strided vanilla model.
        clamp_len: largest distance that ours tells apart; None: no limit.
        device: where both are.

    Raises:
        ConfigError: a stride longer than a segment.
    """
    if stride is not None and stride > min(lengths):
        raise ConfigError(f"stride ({stride}) must be at most the shortest attention length ({min(lengths)}): it is read anew")
    with device:
        vanilla = Vanilla(vanilla_config(config, max_len=max(lengths)))
        ours = TransformerXL(config).with_context(clamp_len=clamp_len)
    for module in vanilla.modules():
        if isinstance(module, nn.Linear):  # as ours keeps its weights: autocast would convert them for every token
            module.to(activation_dtype(precision, vanilla.dtype))
    return Sides(ours.eval(), vanilla.eval(), precision, text, tgt_len, stride)


def vanilla_config(config: TransformerXLConfig, *, max_len: int) -> VanillaConfig:
    """Return the settings of a vanilla model of the same sizes.

    Args:
        config: of the model that it is compared with.
        max_len: positions that it tells apart.
    """
    values = config.model_dump(exclude={"mem_len"})
    common = {name: value for name, value in values.items() if name in VanillaConfig.model_fields}
    return VanillaConfig(**common, max_len=max_len)


def with_length(model: TransformerXL, length: int) -> TransformerXL:
    """Return the model as it is read here: each token sees `length` positions, itself among them."""
    besides_self = model.config.same_length_besides_self
    return model.with_context(mem_len=max(length - besides_self, 1), same_length=True)


def count_parameters(sides: Sides, *, max_len: int) -> dict[str, int]:
    """Count the parameters of ours, and of the vanilla model with and without its tables of positions.

    Args:
        sides: the two models.
        max_len: positions that a vanilla model as it is trained tells apart.

    Returns:
        ours; vanilla; vanilla_positions, of `max_len` positions, which are part of vanilla.
    """
    ours, vanilla = (sum(p.numel() for p in model.parameters()) for model in (sides.ours, sides.vanilla))
    table = sides.vanilla.positions
    positions = table[:, 0].numel() * max_len
    return {"ours": ours, "vanilla": vanilla - table.numel() + positions, "vanilla_positions": positions}


def run(
    sides: Sides,
    races: Sequence[Race],
    *,
    n_round: int,
    clock: Clock = time.perf_counter,
    report: Callable[[str], object] = lambda _: None,
) -> None:
    """Time both sides at all lengths in turn, so that whatever slows the machine slows all of them.

    Args:
        sides: the two models.
        races: filled in, round by round; what is interrupted has whole rounds.
        n_round: how often each is timed.
        clock: for tests.
        report: told what comes next.
    """
    runners = [_Runner(sides, entry.length) for entry in races]
    device, stride = sides.ours.device, sides.stride
    with torch.no_grad():
        for i, (entry, runner) in itertools.product(range(n_round), zip(races, runners, strict=True)):
            report(f"round {i + 1} of {n_round}, attention length {entry.length:,}")
            vanilla = seconds_of(partial(runner.read_anew, 1), device, clock)
            strided = [seconds_of(partial(runner.read_anew, stride), device, clock) / stride] if stride else []
            runner.read_on(1)
            ours = seconds_of(partial(runner.read_on, _SEGMENTS), device, clock) / (_SEGMENTS * sides.tgt_len)
            entry.vanilla.append(vanilla)
            entry.strided += strided
            entry.ours.append(ours)


def rereading_figures(race: Race, sides: Sides) -> dict[str, Any]:
    """Return the figures of both sides at one attention length, with the operations that a token takes each of them.

    Args:
        race: what was measured, a round at least.
        sides: the two models, and the text whose words say how often the tails of an adaptive softmax are needed.
    """
    length, ids = race.length, sides.text

    def vanilla_flops(n_predicted: int) -> float:
        return flops_per_token(sides.vanilla.with_context(ext_len=length - n_predicted), ids, tgt_len=n_predicted)

    theirs, ours = vanilla_flops(1), flops_per_token(with_length(sides.ours, length), ids, tgt_len=sides.tgt_len)
    strided = sides.stride and {
        "tokens": sides.stride,
        "vanilla_seconds": _spread(race.strided),
        "slowdown": _spread(race.strided_slowdowns),
        "flops_ratio": vanilla_flops(sides.stride) / ours,
    }
    return {
        "length": length,
        "rounds": len(race.ours),
        "vanilla_seconds": _spread(race.vanilla),
        "our_seconds": _spread(race.ours),
        "slowdown": _spread(race.slowdowns),
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
        self._memory = self._reader.from_mems(_full(model))

    def _tokens(self, n: int) -> Tensor:
        drawn = self._drawn.choice(self._sides.text, (1, n)).astype(np.int64)
        return torch.from_numpy(drawn).to(self._sides.ours.device)

    def read_anew(self, n_predicted: int) -> None:
        """Read a segment by the vanilla model, and score its last tokens."""
        vanilla = self._sides.vanilla
        with autocast(vanilla.device, self._sides.precision):
            h_BTD, _ = vanilla.read(self._text[:, :-1])
            vanilla.softmax.nll(h_BTD[:, -n_predicted:], self._text[:, -n_predicted:], vanilla.embedding)

    def read_on(self, n_segment: int) -> None:
        """Read segments by ours, and score them."""
        for _ in range(n_segment):
            h_BTD = self._reader.read(self._segment[:, :-1], self._memory)
            self._reader.softmax.nll(h_BTD.flatten(0, 1), self._segment[0, 1:])


def _full(model: TransformerXL) -> Mems:
    """Return a memory of random states, all of them valid."""
    empty = model.init_mems(1)
    return Mems(tuple(torch.randn_like(hidden) for hidden in empty.hidden), torch.full_like(empty.n_valid, model.mem_len))
