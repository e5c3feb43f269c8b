"""`Draft`: one text that is written, and what is reported of it."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from transformer_xl.errors import Bounds, ConfigError
from transformer_xl.generation.inputs import text_ids
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.seeds import seeded_generator
from transformer_xl.generation.stopping import Stopping, Transcript
from transformer_xl.tokenizers.base import Tokenizer

FinishReason = Literal["length", "stop", "interrupted", "failed"]
"""Why a text ended: all tokens were written, a stop token or string came, somebody ended it, or it could not be written."""


@dataclass(eq=False)
class Draft:
    """A text that is written: what it goes on from, how its tokens are drawn, what ends it, and how far it is.

    Each is written once, by `write` or a `Scheduler`.

    Attributes:
        prompt: token ids to go on from; may be empty if the row has read something already.
        seed: of its random numbers, 0 … 2^64 - 1; see `text_seed`.
        sampling: how its tokens are drawn.
        max_new_tokens: how many tokens to write at most.
        stopping: what else ends it; stop strings need the tokenizer.
        tokenizer: makes pieces of text of its tokens (`Chosen.piece`); None: there are none.
        before: tokens that its row has read before the prompt; the last ones decide what a repetition penalty looks at, and how
            the text begins: with or without a space, or within a character.
        likeliest: how many of the likeliest tokens to report with each token, and its log-probability; None: neither.
        score_prompt: report the tokens of the prompt in the same way (`Read.scored`); the row goes on with the same bits.
        remember: the row also reads the last token of the text (unless the text ended in a stop), so that `Decoder.take` then
            returns all of it. Otherwise nobody needs the step that reads it.
        label: anything by which the caller knows it.
        ids: the prompt, int64 (n,).
        generator: of its random numbers.
        row: of the decoder, once it has begun.
        n_read: tokens of the prompt that were read.
        n_written: tokens of the text.
        reason: why it ended; None: it has not.
        stopped_by: the stop token or stop string that ended it.
        error: why it could not be written.
        reading: seconds that reading the prompt took.
        writing: seconds from then to the end; other rows' prompts were read in between.

    Raises:
        ConfigError: a negative number of tokens, a seed out of range, or stop strings without a tokenizer.
        ValueError: a prompt that is not the token ids of one text.
    """

    prompt: InitVar[Sequence[int] | np.ndarray | Tensor]
    _: KW_ONLY
    seed: int
    sampling: Sampling = Sampling()
    max_new_tokens: int = 200
    stopping: Stopping = Stopping()
    tokenizer: Tokenizer | None = None
    before: Sequence[int] = ()
    likeliest: int | None = None
    score_prompt: bool = False
    remember: bool = False
    label: Any = None
    ids: np.ndarray = field(init=False)
    generator: np.random.Generator = field(init=False)
    row: int = field(default=-1, init=False)
    n_read: int = field(default=0, init=False)
    n_written: int = field(default=0, init=False)
    reason: FinishReason | None = field(default=None, init=False)
    stopped_by: int | str | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    reading: float = field(default=0.0, init=False)
    writing: float = field(default=0.0, init=False)

    def __post_init__(self, prompt: Sequence[int] | np.ndarray | Tensor) -> None:
        self.ids = text_ids(prompt, "prompt").numpy(force=True).copy()  # the caller may change theirs
        self.generator = seeded_generator(self.seed)
        Bounds(0, whole=True).check("max_new_tokens", self.max_new_tokens)
        if self.likeliest is not None and self.likeliest < 0:
            raise ConfigError(f"likeliest ({self.likeliest}) must be at least 0; None reports no log-probabilities")
        if self.stopping.strings and self.tokenizer is None:
            raise ConfigError("a stop string is looked for in text, which needs the tokenizer; give it, or stop tokens")

    @property
    def n_left(self) -> int:
        """How many tokens of the prompt are not read yet."""
        return len(self.ids) - self.n_read

    @property
    def history(self) -> list[int]:
        """The tokens that a repetition penalty looks at: the last ones, or each token once, so that it does not grow."""
        return list(self._seen)

    def begin(self, row: int, *, n_read: int = 0) -> None:
        """Take a row, which has read the first `n_read` tokens of the prompt."""
        context = np.concatenate([np.array(self.before, np.int64), self.ids])
        window = self.sampling.repetition_window
        if self.sampling.repetition_penalty == 1:
            self._seen = deque[int](maxlen=0)
        elif window is None:
            self._seen = dict.fromkeys(context.tolist())
        else:
            self._seen = deque[int](context[-window:].tolist(), window)
        self._transcript = None if self.tokenizer is None else Transcript(self.tokenizer, context, self.stopping)
        self.row, self.n_read, self._since = row, n_read, time.perf_counter()

    def count_read(self, n: int) -> None:
        """Count `n` more tokens of the prompt as read."""
        self.n_read += n
        now = time.perf_counter()
        self.reading, self._since = self.reading + now - self._since, now

    def add(self, token: int) -> str:
        """Append a token that was chosen, unless it is a stop token; return the piece of text that is certain now."""
        if token in self.stopping.tokens:
            self.reason, self.stopped_by = "stop", token
            return ""
        self.n_written += 1
        if isinstance(self._seen, dict):
            self._seen[token] = None
        else:
            self._seen.append(token)
        piece = ""
        if self._transcript is not None:
            piece, self.stopped_by = self._transcript.push(token), self._transcript.stopped_by
        if self.stopped_by is not None:
            self.reason = "stop"
        elif self.n_written >= self.max_new_tokens:
            self.reason = "length"
        return piece

    def interrupt(self) -> None:
        """Let it end as it is; while a step is made, it is still given the token of that step."""
        self.reason = self.reason or "interrupted"

    def finish(self) -> str:
        """Return the rest of its text: a beginning of a stop string, or U+FFFD for a part of a character."""
        self.writing = time.perf_counter() - self._since
        return self._transcript.finish() if self._transcript else ""


class Chosen(NamedTuple):
    """A token of a text.

    Attributes:
        draft: the text.
        token: its id.
        log_probability: nats that the model itself gave it, before any sampling setting; None unless asked for.
        likeliest: the likeliest tokens and their log-probabilities, the likeliest first.
        piece: the text that is certain since this token.
    """

    draft: Draft
    token: int
    log_probability: float | None
    likeliest: tuple[tuple[int, float], ...]
    piece: str = ""


class Read(NamedTuple):
    """A piece of a prompt was read.

    Attributes:
        draft: the text.
        n: tokens of the piece.
        scored: its tokens, if the draft asks for them; of the first token of a row, the log-probability is None.
    """

    draft: Draft
    n: int
    scored: tuple[Chosen, ...] = ()


class Ended(NamedTuple):
    """A text has ended, as its draft says.

    Attributes:
        draft: the text.
        rest: the rest of it, which is certain only now.
    """

    draft: Draft
    rest: str


Event = Read | Chosen | Ended
"""What is reported of a text."""
