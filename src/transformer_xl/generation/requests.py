"""Requests for texts, and what is reported of them; torch is not imported, so that the help of a command is quick."""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from transformer_xl.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from transformer_xl.generation.sampling import Sampling

FinishReason = Literal["length", "stop", "interrupted"]
"""Why a text ended: all tokens were written, a stop token or string came, or somebody interrupted or cancelled it."""

EMPTY_PROMPT = "the prompt is empty; give at least one token, of text that the tokenizer keeps"


@dataclass(frozen=True)
class Prompt:
    """A text to go on from."""

    ids: "np.ndarray"  # its tokens, (n,), int64
    origin: dict[str, str]  # how to name it in JSON: `prompt` with the text, or `prompt_file` with the name of its file
    seed: int | None = None  # its own seed, if it has one
    shown: bool = False  # whether it was typed, so that it is shown before what is written


@dataclass(frozen=True, kw_only=True)
class Request:
    """A text to write.

    Attributes:
        prompt: token ids to go on from; may be empty if the row has read something already.
        seed: of the text, 0 … 2^64 - 1; see `text_seed`.
        sampling: how its tokens are drawn; None: as `write` or the `Scheduler` says.
        max_new_tokens: how many tokens to write at most.
        stop_tokens: ids that end the text and are not part of it.
        ends: called with every token of the text; returns why it was the last one, or None.
        history: tokens that the row has read before, for a repetition penalty.
        generator: of its random numbers; None: `seeded_generator(seed)`.
        likeliest: how many of the likeliest tokens to report with each token, and its log-probability; None: as `write` or the
            `Scheduler` says.
        score_prompt: report the tokens of the prompt in the same way (`Read.scored`); the row goes on with the same bits.

    Raises:
        ConfigError: a negative number of tokens, or a seed out of range.
    """

    prompt: "Sequence[int] | np.ndarray | Tensor"
    seed: int
    sampling: "Sampling | None" = None
    max_new_tokens: int = 200
    stop_tokens: Collection[int] = frozenset()
    ends: Callable[[int], FinishReason | None] | None = None
    history: Sequence[int] = ()
    generator: "np.random.Generator | None" = None
    likeliest: int | None = None
    score_prompt: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens ({self.max_new_tokens}) must be at least 0")
        if self.likeliest is not None and self.likeliest < 0:
            raise ConfigError(f"likeliest ({self.likeliest}) must be at least 0; None reports no log-probabilities")
        check_seed(self.seed)


class Chosen(NamedTuple):
    """A token of a text.

    Attributes:
        text: number of the request, in order.
        token: its id.
        log_probability: nats that the model itself gave it, before any sampling setting; None unless asked for.
        likeliest: the likeliest tokens and their log-probabilities, the likeliest first.
    """

    text: int
    token: int
    log_probability: float | None
    likeliest: tuple[tuple[int, float], ...]


class Read(NamedTuple):
    """A piece of a prompt was read.

    Attributes:
        text: number of the request, in order.
        n: tokens of the piece.
        scored: its tokens, if the request asks for them; of the first token of a row, the log-probability is None.
    """

    text: int
    n: int
    scored: tuple[Chosen, ...] = ()


class Finished(NamedTuple):
    """The end of a text.

    Attributes:
        text: number of the request, in order.
        reason: why it ended.
        n_read: tokens of the prompt.
        n_written: tokens of the text.
        reading: seconds that reading the prompt took.
        writing: seconds from then to the end; other rows' prompts were read in between.
        stop_token: the stop token that came; None if the text ended otherwise.
    """

    text: int
    reason: FinishReason
    n_read: int
    n_written: int
    reading: float
    writing: float
    stop_token: int | None = None


class Failed(NamedTuple):
    """The end of a text that could not be written.

    Attributes:
        text: number of the request, in order.
        error: why.
        n_read: tokens of the prompt that were read before.
        n_written: tokens of the text that were written before.
    """

    text: int
    error: Exception
    n_read: int
    n_written: int


Event = Read | Chosen | Finished | Failed
"""What a `Scheduler` reports of a text."""


def check_seed(seed: int) -> int:
    """Return the seed; ConfigError if it is outside 0 … 2^64 - 1."""
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed ({seed}) must be between 0 and 2^64 - 1; leave it out to get another text each time")
    return seed


def fresh_seed() -> int:
    """Return a random seed."""
    return secrets.randbits(32)


def seeded_generator(seed: int) -> "np.random.Generator":
    """Return the random numbers of a seed, the same on every machine and with every version of numpy.

    Example:
        >>> seeded_generator(7).random()
        0.625095466604667
    """
    import numpy as np

    return np.random.Generator(np.random.PCG64(check_seed(seed)))


def text_seed(seed: int, prompt: int, sample: int) -> int:
    """Return the seed of text number `sample` of prompt number `prompt`, from which it can be written again alone.

    The very first text has the seed itself. The others have the first 32 bits that numpy's
    `SeedSequence([seed, prompt, sample])` generates, so that neighboring seeds do not give the same texts in another order.

    Example:
        >>> text_seed(7, 0, 0), text_seed(7, 0, 1) == text_seed(8, 0, 0)
        (7, False)
    """
    import numpy as np

    check_seed(seed)
    if prompt == sample == 0:
        return seed
    return int(np.random.SeedSequence([seed, prompt, sample]).generate_state(1)[0])
