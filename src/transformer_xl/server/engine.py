"""The thread that computes: it alone touches the decoder. Jobs wait, get a row, read, write, and leave it.

A turn of its loop obeys what was asked meanwhile, gives rows to jobs that wait, and lets the scheduler read at most one piece
of a prompt and write one token of every text. So a prompt delays texts that are written by one piece, however long it is, and
what is cancelled costs at most one piece or step.

A session that is not used keeps its row until another job needs it; then it is parked: what the row remembers is copied to
main memory. Back in a row, any row, it goes on to the last bit.
"""

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch

from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Chosen, Draft, Ended, Event, Read
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scheduler import Scheduler
from transformer_xl.generation.session import TextState
from transformer_xl.generation.session_file import RowState
from transformer_xl.generation.stopping import Stopping
from transformer_xl.server.jobs import (
    Answer,
    Job,
    RefusalError,
    Session,
    Ticket,
    Writing,
    no_session,
    refusal_of,
    shutting_down,
)
from transformer_xl.server.metrics import Metrics
from transformer_xl.server.prefixes import Prefixes
from transformer_xl.tokenizers.base import Tokenizer

T = TypeVar("T")

_AHEAD = 512
"""Tokens of a text that may wait for its reader; with more, the text ends."""

_IDLE_SECONDS = 0.25
"""Between two looks at deadlines while nothing is computed."""


_NOTHING = Writing(sampling=Sampling(), stopping=Stopping(), max_tokens=0, seeds=(0,))


@dataclass(eq=False)
class _Part:
    """What a row does for a ticket: all of it, or the prompt that several texts share, or one of these."""

    ticket: Ticket  # whose it is
    prompt: np.ndarray  # what is read first
    index: int | None = None  # of the text among those of the ticket; None: it only reads
    state: RowState | None = None  # what it continues; None: the session's, or nothing
    before: TextState | None = None  # text of the session that it was copied from
    due: dict[int, bytes] = field(default_factory=dict)  # where in the prompt what the row remembers is kept, see `Prefixes`

    @property
    def session(self) -> Session | None:
        """The session whose row this is."""
        job = self.ticket.job
        return None if job.forks else job.session

    @property
    def shares(self) -> bool:
        """Whether it is one of several texts of a prompt that was read for all of them."""
        return self.index is not None and self.ticket.job.n_text > 1


class Engine:
    """Runs jobs on the rows of a decoder, which nobody else may use; `queue` jobs may wait, `per_owner` of each owner.

    Prompts without a session go on from the nearest of `n_prefix` places that earlier ones of their owner came by.
    `submit`, `cancel` and `call` may be called by any thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        queue: int,
        metrics: Metrics,
        per_owner: int | None = None,
        n_prefix: int = 0,
    ) -> None:
        self.decoder, self.tokenizer, self.metrics = decoder, tokenizer, metrics
        self.queue, self.per_owner = queue, queue if per_owner is None else per_owner
        self.format = decoder.session_format()
        self.last_turn = time.monotonic()  # began
        self.n_failed = 0  # ticks one after another
        self._scheduler = Scheduler(decoder)
        self.n_prefix = n_prefix
        self._prefixes = Prefixes(piece=decoder.tgt_len, most=n_prefix)
        self._residents: list[Session | None] = [None] * decoder.batch_size
        self._is_clean = True  # no row holds a text that is over
        self._parts: dict[Draft, _Part] = {}
        self._waiting: list[_Part] = []
        self._turns: dict[str, int] = {}  # by owner: how many parts had begun when the last one of theirs did
        self._n_begun = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._cancelled: set[Ticket] = set()
        self._wake = threading.Condition()
        self._stopping = self.is_draining = False
        self._speed = 0.0  # tokens per second, read or written, in the last while
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- for other threads ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to compute."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; texts that are written end."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def drain(self) -> None:
        """Refuse new jobs from now on."""
        self.is_draining = True

    @property
    def n_waiting(self) -> int:
        """How many jobs wait for a row."""
        return len(self._jobs_waiting())

    def _jobs_waiting(self) -> list[Job]:
        """Return what waits for a row; texts of a job that has begun do not count."""
        return [part.ticket.job for part in list(self._waiting) if not part.shares]

    @property
    def n_busy(self) -> int:
        """How many rows read or write."""
        return len(self._parts)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is read or written, and nothing waits."""
        return not self._parts and not self.n_waiting

    @property
    def is_healthy(self) -> bool:
        """Whether the thread lives, and its ticks end and succeed."""
        stuck = bool(self._parts) and time.monotonic() - self.last_turn > 10
        return self._thread.is_alive() and self.n_failed < 2 and not stuck

    def submit(self, job: Job, tell: Callable[[Answer], object]) -> Ticket:
        """Let a job wait for a row; `tell` is called in the engine's thread with each answer, and must return at once."""
        ticket = Ticket(job, tell)
        part = _Part(ticket, job.prompt, 0 if job.writing and job.n_text == 1 else None)
        with self._wake:
            if self._stopping or self.is_draining:
                raise shutting_down()
            waiting = self._jobs_waiting()
            own = sum(each.owner == job.owner for each in waiting)
            if len(waiting) >= self.queue or own >= self.per_owner:
                n, whose = (own, "of this key ") if own >= self.per_owner else (len(waiting), "")
                message = f"{n} requests {whose}wait already; ask again later"
                seconds = math.ceil(sum(each.n_token for each in waiting) / max(self._speed, 1.0))
                raise RefusalError(429, message, code="overloaded", retry_after=min(60, max(1, seconds)))
            if session := part.session:
                session.require_free()
                session.busy = ticket
            self._waiting.append(part)
            self._wake.notify()
        return ticket

    def cancel(self, ticket: Ticket, by: str) -> None:
        """End a job soon; what was shown of a session's text is remembered."""
        with self._wake:
            ticket.cancelled = ticket.cancelled or by
            self._cancelled.add(ticket)
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function in the engine's thread, between two ticks."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            if self._stopping:
                future.set_exception(shutting_down())
                return future
            self._calls.append(run)
            self._wake.notify()
        return future

    # --- in its own thread: the functions below `_run` are called there alone, or by `call` -----------------------------------

    def snapshot(self, session: Session) -> tuple[RowState | None, TextState]:
        """Return copies of what a session remembers now, also while it is read or written; None: nothing was read."""
        if session.is_gone:
            raise no_session()
        parked = session.parked
        if session.row is not None:
            state = self.decoder.take(session.row)
        else:  # a copy, too, because a session that is deleted leaves zeros
            state = parked and replace(parked, tensors={name: x.clone() for name, x in parked.tensors.items()})
        return state, session.text.copy()

    def release(self, session: Session) -> None:
        """Take a session out of its row and out of memory; nothing of it is left here."""
        session.is_gone = True
        self._empty(session)

    def _empty(self, session: Session) -> None:
        for draft in [draft for draft, part in self._parts.items() if part.session is session]:
            self._interrupt(draft)
        if session.row is not None:
            self._residents[session.row] = None
            self._clear([session.row])
            session.row = None
        if session.parked is not None:
            for x in session.parked.tensors.values():
                x.zero_()
            session.parked = None

    def rewind(self, session: Session, n: int) -> None:
        """Let a session go back by `n` tokens; the last one that is left is read anew."""
        session.require_free()
        if n == session.text.n_tokens:
            self._empty(session)
            session.text, session.n_rewindable = session.text.begun_anew(), 0
            session.n_change += 1
            return
        row = session.row
        if row is None or n > session.n_rewindable or n + 1 > len(session.text.tail):
            can = session.n_rewindable if row is not None else 0
            message = f"the session can go back by {can} tokens now, not {n}; save or fork it before what may be undone"
            raise RefusalError(409, message, code="cannot_rewind", extra={"n_rewindable": can})
        for _ in range(n):
            session.text.tail.pop()
        session.text.n_tokens -= n
        self.decoder.rewind(row, n + 1)
        self.decoder.read([[session.text.tail[-1]] if i == row else [] for i in range(self.decoder.batch_size)])
        self._used(session)

    def let_go(self, session: Session) -> bool:
        """Leave a session to its file, which holds it; return False if it is used, or was meanwhile."""
        is_needed = any(ticket.job.session is session for ticket in self._open_tickets())
        if is_needed or session.is_changed:
            return False
        self.release(session)
        return True

    def park(self, session: Session) -> None:
        """Copy what the row of a session remembers to main memory, and free the row, unless it reads or writes there."""
        if session.row in self._scheduler.free_rows:
            session.parked, row = self.decoder.take(session.row), session.row
            self._residents[row], self._is_clean = None, False
            session.row, session.n_rewindable = None, 0
            self.metrics.evictions.labels("parked").inc()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while not self._stopping or self._calls:
            try:
                self._turn()
            except Exception as error:  # a fault of ours: all are told, and the thread goes on
                traceback.print_exc()
                self.n_failed += 1
                for ticket in {part.ticket for part in self._parts.values()}:
                    self._fail(ticket, refusal_of(error))
        for ticket in self._open_tickets():
            self._fail(ticket, shutting_down())

    def _open_tickets(self) -> set[Ticket]:
        return {part.ticket for part in (*self._parts.values(), *list(self._waiting))}

    def _turn(self) -> None:
        self.last_turn = time.monotonic()  # before a row is given, or an engine that was idle would seem stuck
        with self._wake:
            calls, self._calls = self._calls, deque()
        for run in calls:
            run()
        self._end_cancelled()
        self._give_rows()
        if not self._scheduler.idle:
            self._tick()
            return
        if not self._is_clean:
            self._clear([row for row, session in enumerate(self._residents) if session is None])
            self._is_clean = True
        with self._wake:
            if not (self._calls or self._stopping or self._cancelled or self._waiting):
                self._wake.wait(_IDLE_SECONDS)

    def _tick(self) -> None:
        begin = time.monotonic()
        events = self._scheduler.tick(pieces=1)
        self.n_failed = 0
        n_read = sum(event.n for event in events if isinstance(event, Read))
        n_written = sum(isinstance(event, Chosen) for event in events)
        seconds = time.monotonic() - begin
        self._speed += 0.05 * ((n_read + n_written) / max(seconds, 1e-6) - self._speed)
        self.metrics.ticked(seconds, n_read=n_read, n_written=n_written)
        self._dispatch(events)

    # rows

    def _give_rows(self) -> None:
        """Let jobs begin that wait, of each owner in turn, while there are rows."""
        while self._waiting and self._scheduler.free_rows:
            part = min(list(self._waiting), key=lambda part: self._turns.get(part.ticket.job.owner, 0))
            self._n_begun += 1
            self._turns[part.ticket.job.owner] = self._n_begun
            try:
                self._begin(part)
            except Exception as error:
                self._fail(part.ticket, refusal_of(error))
            with self._wake:  # only now: a job that is neither here nor in `_parts` would make `is_idle` true
                self._waiting = [other for other in self._waiting if other is not part]

    def _begin(self, part: _Part) -> None:
        """Give a row to a part; there is a free one."""
        session, source = part.session, part.ticket.job.session
        if source and source.is_gone and part.state is None:
            raise no_session()
        row = self._free_row() if session is None or session.row is None else session.row
        if source and session is None and part.state is None:
            part.state, part.before = self.snapshot(source)
        self._submit(part, row)

    def _free_row(self) -> int:
        """Return a row for another text; the session that was used least recently is parked for it if need be."""

        def rank(row: int) -> tuple[bool, float]:  # a busy session in a free row has a job that waits for it: it comes last
            session = self._residents[row]
            return (session.busy is not None, session.used) if session else (False, -math.inf)

        row = min(self._scheduler.free_rows, key=rank)
        if session := self._residents[row]:
            self.park(session)
        return row

    def _submit(self, part: _Part, row: int) -> None:
        session, job, draft = part.session, part.ticket.job, self._draft(part)
        path = [] if session or part.state or job.score else self._prefixes.path(job.owner, part.prompt)
        n_read, state = self._prefixes.longest(path)  # of an earlier prompt that began like this one
        state = state or (session.parked if session else part.state)
        self._is_clean = False
        self._scheduler.submit(draft, row=row, state=state, n_read=n_read, go_on=session is not None and session.row == row)
        self._parts[draft] = part
        part.due = self._prefixes.due(path)
        self.metrics.kept.inc(n_read)
        if session is not None:
            session.row, session.parked, self._residents[row] = row, None, session
            if job.writing:  # only now, so that a refused call leaves the random numbers as they were
                session.text.random = session.text.draw(draft, on=job.writing.keeps_drawing)

    def _draft(self, part: _Part) -> Draft:
        job, session = part.ticket.job, part.session
        writing = None if part.index is None else job.writing
        how = writing or _NOTHING
        text = session.text if session else part.before
        before = list(text.tail) if text else []
        if part.shares:  # the prompt was read before
            before += job.prompt[-1024:].tolist()
        return Draft(
            part.prompt,
            seed=how.seeds[part.index or 0],
            sampling=how.sampling,
            max_new_tokens=how.max_tokens,
            stopping=how.stopping,
            tokenizer=self.tokenizer if writing else None,
            before=before,
            likeliest=job.likeliest,
            score_prompt=job.score,
            remember=session is not None,
            label=part.index or 0,
        )

    def _clear(self, rows: list[int]) -> None:
        """Forget what rows hold."""
        self.decoder.reset(torch.tensor([row in rows for row in range(self.decoder.batch_size)]))

    # what happens

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            part = self._parts.get(event.draft)
            if part is None:
                continue
            if part.session is not None:
                part.session.text.add(event)
                part.session.n_change += 1
            if isinstance(event, Read) and (key := part.due.get(event.draft.n_read)):
                self._prefixes.add(key, self.decoder.take(event.draft.row))
            if not isinstance(event, Ended):
                self._tell(part.ticket, event)
            elif event.draft.error is None:
                self._finish(part, event)
            else:
                self._lose(part, event.draft.error)

    def _finish(self, part: _Part, event: Ended) -> None:
        ticket = part.ticket
        del self._parts[event.draft]
        if part.index is None and ticket.job.writing is not None:  # the prompt that several texts share
            if event.draft.reason != "interrupted":
                self._branch(part, event.draft.row)
                return
            ticket.n_open = 1
        ticket.n_open -= 1
        self._leave(ticket)
        self._tell(ticket, event)

    def _branch(self, part: _Part, row: int) -> None:
        """Let the texts of a ticket begin that share a prompt, before whatever else their owner waits for."""
        ticket, state, nothing = part.ticket, self.decoder.take(row), np.empty(0, np.int64)
        texts = [_Part(ticket, nothing, index, state, part.before) for index in range(ticket.job.n_text)]
        with self._wake:
            self._waiting[:0] = texts

    def _lose(self, part: _Part, error: Exception) -> None:
        """End a ticket one of whose texts has failed; a session whose row was emptied has lost what no file holds."""
        self._fail(part.ticket, refusal_of(error))
        session = part.session
        if session and session.row is not None and np.isnan(self.decoder.scores_of(session.row).row(0).cluster(0)).any():
            self.release(session)

    def _tell(self, ticket: Ticket, answer: Answer) -> None:
        ticket.n_told += isinstance(answer, Chosen)
        ticket.tell(answer)

    def _leave(self, ticket: Ticket) -> None:
        session = ticket.job.session
        if session and session.busy is ticket and ticket.n_open <= 0:
            session.busy = None
            self._used(session)

    def _used(self, session: Session) -> None:
        session.used = time.time()
        session.n_change += 1
        if session.row is not None:
            session.n_rewindable = max(0, self.decoder.n_rewindable(session.row) - 1)

    def _fail(self, ticket: Ticket, refusal: RefusalError) -> None:
        with self._wake:
            self._waiting = [part for part in self._waiting if part.ticket is not ticket]
        for draft in [draft for draft, part in self._parts.items() if part.ticket is ticket]:
            self._scheduler.cancel(draft)
            del self._parts[draft]
        ticket.n_open = 0
        self._leave(ticket)
        self._tell(ticket, refusal)

    def _end_cancelled(self) -> None:
        now = time.monotonic()
        with self._wake:
            cancelled, self._cancelled = self._cancelled, set()
        for ticket in self._open_tickets() - cancelled:
            is_slow = ticket.job.streams and ticket.n_told - ticket.n_taken > _AHEAD * ticket.job.n_text
            if is_slow or now - ticket.submitted > ticket.job.timeout:
                ticket.cancelled = "slow_reader" if is_slow else "timeout"
                cancelled.add(ticket)
        for ticket in cancelled:
            if ticket.n_open <= 0:
                continue
            self.metrics.cancelled.labels(ticket.cancelled).inc()
            for draft in [draft for draft, part in self._parts.items() if part.ticket is ticket]:
                self._interrupt(draft)
            if ticket.n_open > 0:  # some of its texts have not begun
                self._fail(ticket, why_cancelled(ticket))

    def _interrupt(self, draft: Draft) -> None:
        """End what is read and written in a row; its session remembers what was shown."""
        if event := self._scheduler.cancel(draft):
            self._dispatch([event])


def why_cancelled(ticket: Ticket) -> RefusalError:
    """Return what a client is told whose job was cancelled."""
    if ticket.cancelled == "timeout":
        message = f"it took longer than {ticket.job.timeout:g} s (timeout); what was shown is kept"
        return RefusalError(504, message, code="timeout")
    if ticket.cancelled == "slow_reader":
        return RefusalError(504, "the answer was not read; what was shown is kept", code="slow_reader")
    if ticket.cancelled == "shutdown":
        return shutting_down("what was shown is kept")
    return RefusalError(409, "the call was stopped; what was shown is kept", code="stopped")
