"""What is asked of the engine, and what it answers: plain values, which know nothing of the web."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from transformer_xl.errors import TxlError, one_line
from transformer_xl.generation.draft import Chosen, FinishReason
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.stopping import Stopping

if TYPE_CHECKING:
    from transformer_xl.server.sessions import Session

LONGEST_SECONDS = 600.0
"""A job that says nothing else may take so long, with the time that it waits."""


class RefusalError(Exception):
    """What a client asked for cannot be done; the server goes on."""

    def __init__(
        self, status: int, message: str, *, code: str, retry_after: int | None = None, extra: dict[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after, self.extra = status, message, code, retry_after, extra or {}


def refusal_of(error: Exception) -> RefusalError:
    """Return what a client is told of an error: ours are theirs to mend, those of the disk the operator's, others our fault."""
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, TxlError):
        return RefusalError(400, one_line(error), code="invalid_request")
    if isinstance(error, OSError):
        message = f"the disk refuses it ({error.strerror}); what is in memory and what was saved before is intact"
        return RefusalError(507, message, code="not_saved")
    return RefusalError(500, f"computing failed ({type(error).__name__}); the texts beside it go on", code="internal")


def no_session() -> RefusalError:
    """Return what is said of a session that does not exist, and of a foreign one."""
    return RefusalError(404, "no such session; GET /v1/sessions lists yours", code="not_found")


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How texts are written."""

    sampling: Sampling
    stopping: Stopping  # what ends a text, besides its length
    max_tokens: int
    seeds: tuple[int, ...]  # one for each text
    keeps_drawing: bool = False  # the random numbers of the session go on, and the seed only begins them


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt to read, and perhaps texts to write after it."""

    owner: str  # whose it is
    prompt: np.ndarray  # token ids (n,)
    writing: Writing | None = None  # None: nothing is written
    session: "Session | None" = None  # the session that reads it; None: a text of its own, which is forgotten at the end
    forks: bool = False  # the session stays as it is; a copy of it reads and writes
    score: bool = False  # report the tokens of the prompt with their log-probabilities
    # how many of the likeliest tokens to report with each token, and its log-probability; None: neither
    likeliest: int | None = None
    streams: bool = False  # the client gets the tokens as they come, and has to read them
    timeout: float = LONGEST_SECONDS  # seconds after which the job is ended, waiting included


@dataclass(frozen=True, slots=True)
class Progress:
    """A piece of the prompt was read: so many tokens, and these if they are scored."""

    n: int
    scored: tuple[Chosen, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of a text, and the characters that are certain since."""

    index: int
    token: Chosen
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """A text has ended; `rest` is certain only now. Of a job that writes nothing it says that all was read."""

    index: int
    reason: FinishReason
    rest: str
    n_read: int  # tokens of the prompt
    n_written: int
    n_kept: int = 0  # of those read, tokens that an earlier prompt had read already


@dataclass(frozen=True, slots=True)
class Problem:
    """The job has failed; nothing more comes."""

    refusal: RefusalError


Answer = Progress | Piece | End | Problem


@dataclass(eq=False)
class Ticket:
    """A job on its way."""

    job: Job  # what was asked
    tell: Callable[[Answer], object]  # called in the engine's thread with each answer; must return at once
    submitted: float
    cancelled: str = ""  # set by `Engine.cancel`; by whom
    n_ahead: int = 0  # tokens that were told and not yet taken by who reads them
    n_open: int = 0

    @property
    def n_text(self) -> int:
        """How many texts it asks for."""
        return len(self.job.writing.seeds) if self.job.writing else 1
