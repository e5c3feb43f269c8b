"""How long the segments of a step are: always the same, growing while training begins, or random.

Random lengths are drawn from the seed and the place in the run alone, so that a resumed run, and every process of a run, draws
the same ones, and nothing else that is random changes.
"""

import random

from transformer_xl.config import TrainConfig

_SHARE_OF_SHORT = 0.05
_DEVIATION = 5
_SHORTEST = 5
_MOST_ABOVE = 3 * _DEVIATION


class SegmentLengths:
    """The length of each segment of a run.

    With `varlen`, 95 % of the lengths are drawn around the length that is due, with a deviation of 5 tokens, and 5 % around
    half of it, rounded down; none is below 5 or more than 15 above what is due. So draws the authors' `get_varlen_iter`.

    Args:
        config: final length, warm-up, `varlen` and seed.

    Example:
        >>> lengths = SegmentLengths(TrainConfig(tgt_len=32, tgt_len_start=8, tgt_len_warmup=0.5, max_steps=8))
        >>> [lengths.at(step, 0, progress=step / 8) for step in range(8)]
        [8, 8, 16, 24, 32, 32, 32, 32]
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    @property
    def longest(self) -> int:
        """The most tokens that a segment can have."""
        return self._config.tgt_len + (_MOST_ABOVE if self._config.varlen else 0)

    def at(self, step: int, index: int, *, progress: float) -> int:
        """Return the tokens of a segment.

        Args:
            step: steps done before.
            index: of the segment within its step.
            progress: share of the budget used up before the step.
        """
        due = self._due(progress)
        if not self._config.varlen:
            return due
        draw = random.Random(f"varlen {self._config.seed} {step} {index}")
        mean = due / 2 if draw.random() < _SHARE_OF_SHORT else due
        return min(max(int(draw.gauss(mean, _DEVIATION)), _SHORTEST), due + _MOST_ABOVE)

    def _due(self, progress: float) -> int:
        config = self._config
        if config.tgt_len_start is None or progress >= config.tgt_len_warmup:
            return config.tgt_len
        n_rise = -(-(config.tgt_len - config.tgt_len_start) // config.tgt_len_increment)
        return config.tgt_len_start + int(progress / config.tgt_len_warmup * n_rise) * config.tgt_len_increment
