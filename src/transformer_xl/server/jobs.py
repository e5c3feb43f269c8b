"""Jobs for the engine and the sessions they belong to, as plain values without anything of HTTP."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from transformer_xl.errors import TxlError, one_line
from transformer_xl.generation.draft import Event
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.session import TextState
from transformer_xl.generation.session_file import RowState
from transformer_xl.generation.stopping import Stopping

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


def shutting_down(what: str = "ask again later", *, retry_after: int = 5) -> RefusalError:
    """Return what is said while the server ends."""
    return RefusalError(503, f"the server is shutting down; {what}", code="shutting_down", retry_after=retry_after)


@dataclass(eq=False)
class Session:
    """A text that is read and written in turns."""

    id: str  # names it in requests
    owner: str  # hash of the key that made it
    created: float  # when, in seconds since 1970
    ttl: float | None  # seconds after its last use when it is deleted; None: never
    text: TextState = field(default_factory=TextState)  # what is known of it besides what its row remembers
    row: int | None = None  # of the decoder, where it lies; None: elsewhere. Which thread changes what: see `sessions`
    parked: RowState | None = None  # what its row remembered; None: it is in a row, or has read nothing
    busy: "Ticket | None" = None  # the job that reads or writes in it, or waits for a row to do so
    used: float = field(default_factory=time.time)  # when it was used last, in seconds since 1970
    saved_at: int | None = None  # how many tokens the file holds; None: there is none
    n_rewindable: int = 0  # by how many tokens it can go back now
    n_change: int = 0  # grows whenever what it remembers changes; a copy of another session begins with 1
    n_saved: int = 0  # how many of these changes its file holds
    is_gone: bool = False  # it was deleted, left to its file, or lost; never unset
    is_leaving: bool = False  # it is being left to its file; whoever asks for it must wait
    n_users: int = 0  # requests that go on and have it in hand
    lease: ExitStack = field(default_factory=ExitStack)  # what keeps other processes away

    @property
    def expires_at(self) -> float | None:
        """When it is deleted, in seconds since 1970."""
        return None if self.ttl is None else self.used + self.ttl

    def is_expired(self, now: float) -> bool:
        """Whether nobody uses it and its time is over."""
        return self.is_idle and self.expires_at is not None and self.expires_at < now

    @property
    def is_changed(self) -> bool:
        """Whether it is not what its file holds."""
        return self.n_change > self.n_saved

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it."""
        return not (self.busy or self.n_users or self.is_gone)

    @property
    def state(self) -> Literal["row", "parked"]:
        """Where it lies."""
        return "row" if self.row is not None else "parked"

    def require_free(self) -> None:
        """Refuse a session that is busy or gone."""
        if self.is_gone:
            raise no_session()
        if self.busy:
            message = "the session is busy; wait until its call has ended, or stop that by DELETE …/run"
            raise RefusalError(409, message, code="busy", extra={"n_tokens": self.text.n_tokens})

    def note(self) -> dict[str, str]:
        """Return what its file says of it, besides its memory."""
        times = {"created": self.created, "used": self.used} | ({} if self.ttl is None else {"ttl": self.ttl})
        return self.text.note() | {name: repr(float(value)) for name, value in times.items()}

    @classmethod
    def of_note(cls, name: str, owner: str, note: dict[str, str], *, vocab_size: int) -> "Session":
        """Return the session that a file's note describes, which is not verified."""
        text, now = TextState.of_note(note, vocab_size=vocab_size), time.time()
        created, ttl, used = (_time_of(note, key) for key in ("created", "ttl", "used"))
        return cls(name, owner, created or now, ttl, text, used=used or now, saved_at=text.n_tokens)


def _time_of(note: dict[str, str], key: str) -> float | None:
    """Return a time of a note, or None if it is missing or makes no sense."""
    try:
        value = float(note[key])
    except (KeyError, ValueError):
        return None
    return value if 0 <= value < 1e12 else None


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How texts are written."""

    sampling: Sampling
    stopping: Stopping  # what ends a text, besides its length
    max_tokens: int
    seeds: tuple[int, ...]  # one for each text
    keeps_drawing: bool = False  # the random numbers of the session go on, and the seed only begins them


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A prompt to read, and perhaps texts to write after it."""

    owner: str  # whose it is
    prompt: np.ndarray  # token ids (n,)
    writing: Writing | None = None  # None: nothing is written
    session: Session | None = None  # the session that reads it; None: a text of its own, which is forgotten at the end
    forks: bool = False  # the session stays as it is; a copy of it reads and writes
    score: bool = False  # report the tokens of the prompt with their log-probabilities
    # how many of the likeliest tokens to report with each token, and its log-probability; None: neither
    likeliest: int | None = None
    streams: bool = False  # the client gets the tokens as they come, and has to read them
    timeout: float = LONGEST_SECONDS  # seconds after which the job is ended, waiting included

    @property
    def n_text(self) -> int:
        """How many texts it has; one that writes nothing has one, its prompt."""
        return len(self.writing.seeds) if self.writing else 1

    @property
    def n_token(self) -> int:
        """How many tokens it reads and writes, at most."""
        return len(self.prompt) + (self.n_text * self.writing.max_tokens if self.writing else 0)


Answer = Event | RefusalError
"""What happens to a text of a job, whose number is the `label` of its draft; or why the job has failed; no more comes then."""


@dataclass(eq=False)
class Ticket:
    """A job on its way."""

    job: Job  # what was asked
    tell: Callable[[Answer], object]  # called in the engine's thread with each answer; must return at once
    submitted: float = field(default_factory=time.monotonic)
    cancelled: str = ""  # set by `Engine.cancel`; by whom
    n_told: int = 0  # tokens that its reader was told of; only the engine's thread changes this
    n_taken: int = 0  # how many of these the reader has taken; only the reader's thread changes this
    n_open: int = field(init=False)  # texts that have not ended

    def __post_init__(self) -> None:
        self.n_open = self.job.n_text
