"""Attention length at evaluation: how a run can be read with more or less of the text before each segment.

With recurrence, the attention length is that of the memory. Without, it is the number of tokens before each segment that are
read again. A vanilla model has only `max_len` positions, so the more it reads again, the shorter are its segments. An LSTM has
no attention length.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from transformer_xl.config.run import RunConfig
from transformer_xl.reading.reading import Reading

MULTIPLES = tuple(map(Fraction, ("0", "1/2", "1", "2", "4")))  # of the trained length; an ablation scores these
_SHARES = tuple(map(Fraction, ("0", "1/2", "3/4")))  # of a vanilla model's positions


def has_length(config: RunConfig) -> bool:
    """Return whether a run can be read with more or less of the text; an LSTM's state holds all of it or nothing."""
    return config.model.remembers != "state"


def trained_length(config: RunConfig) -> int:
    """Return the length that a run was trained with: that of its memory, or of its segments if it has none."""
    return config.model.mem_len or config.train.tgt_len


def lengths_of(config: RunConfig, multiples: Sequence[Fraction] = MULTIPLES) -> list[int]:
    """Return attention lengths around that of training.

    Example:
        >>> from transformer_xl.config.recipes import load_recipe
        >>> lengths_of(load_recipe("quickstart"))
        [0, 64, 128, 256, 512]
    """
    base, shares = trained_length(config), multiples
    if config.model.remembers == "nothing":
        base, shares = _longest_segment(config), _SHARES
    return sorted({int(base * share) for share in shares})


def readings(config: RunConfig, lengths: Sequence[int] | None = None) -> list[Reading]:
    """Return readings with each of `lengths` that the kind of model can have; None: lengths around the trained one."""
    if not has_length(config):
        return []
    own = Reading.of_run(config)
    wanted = sorted(set(lengths_of(config) if lengths is None else lengths))
    if config.model.remembers != "nothing":
        again = {length: min(length, own.ext_len) if config.model.mem_len else length for length in wanted}
        return [replace(own, mem_len=length - n, ext_len=n) for length, n in again.items()]
    longest = _longest_segment(config)
    possible = [length for length in wanted if length < longest]
    # the shorter segments are, the more lanes, so that equally many tokens are scored at once
    lanes = {length: own.batch_size * max(1, own.tgt_len // (longest - length)) for length in possible}
    return [replace(own, tgt_len=longest - length, ext_len=length, batch_size=lanes[length]) for length in possible]


def _longest_segment(config: RunConfig) -> int:
    return config.model.longest_segment or config.train.tgt_len
