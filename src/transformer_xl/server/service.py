"""What a server does for a request, between the routes and the engine: sessions opened, jobs run, files kept up to date."""

import asyncio
import math
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from transformer_xl.generation.seeds import seeded_generator
from transformer_xl.generation.session import TextState
from transformer_xl.generation.session_file import RowState
from transformer_xl.server.engine import Engine, why_cancelled
from transformer_xl.server.jobs import Answer, End, Job, Piece, Problem, Progress, RefusalError, no_session
from transformer_xl.server.metrics import Metrics
from transformer_xl.server.sessions import ID, Session, Sessions, Store, note_of, number_of
from transformer_xl.server.wire import SessionAnswer, SessionSource, ids_of
from transformer_xl.tokenizers.base import Tokenizer

T = TypeVar("T")

_SAVE_IDLE_SECONDS = 2.0
_GUEST_SECONDS = 1.0
"""After which a session of another worker is left to its file, so that its worker can have it when that is back."""

_LOOK_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.05
_PING_SECONDS = 15.0
_SWEEP_SECONDS = 60.0
_EMPTY_SECONDS = 60.0
"""After which a session that has read nothing is ended, if its memory is needed."""


class Service:
    """One server's engine, sessions and counts. Its coroutines run in one event loop.

    Args:
        engine: computes.
        sessions: of this process.
        metrics: counts.
        model: the name that clients give.
        details: what `/v1/models` says of it.
        save_every: tokens after which a session is saved while it is read or written.
        chats: messages are read as lines of a text (`--chat-template plain`).
    """

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        metrics: Metrics,
        *,
        model: str,
        details: dict[str, Any],
        save_every: int = 65_536,
        chats: bool = False,
    ) -> None:
        self.engine, self.sessions, self.metrics = engine, sessions, metrics
        self.model, self.details, self._save_every = model, details, save_every
        self.chats = chats
        self.began = int(time.time())
        self._adopting, self._writing = asyncio.Lock(), asyncio.Lock()
        self._told = deque[tuple[asyncio.Queue[Answer], Answer]]()
        self._next_sweep = 0.0
        metrics.queue.set_function(lambda: engine.n_waiting)
        metrics.rows_busy.set_function(lambda: engine.n_busy)
        for state in ("row", "parked"):
            metrics.sessions.labels(state).set_function(partial(self._n_sessions, state))
        self.n_unsaved = 0

    def _n_sessions(self, state: str) -> int:
        return sum(each.state == state for each in list(self.sessions.live.values()))

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.engine.tokenizer

    @property
    def mem_len(self) -> int:
        """Positions that a session remembers."""
        return self.engine.decoder.mem_len

    def fingerprint(self, seed: int) -> str:
        """Return what decides the bytes of an answer: with the same one and the same request, it is the same."""
        decoder = self.engine.decoder
        return f"{self.engine.format.own.model[:12]}-{decoder.precision}-rows{decoder.batch_size}-seed{seed}"

    async def encode(self, text: str | list[int] | None) -> np.ndarray:
        """Return the token ids of a text, or ids as they are."""
        return await asyncio.to_thread(ids_of, self.tokenizer, text or "")

    async def in_engine(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two ticks."""
        return await asyncio.wrap_future(self.engine.call(function))

    # jobs

    async def run(self, job: Job) -> AsyncGenerator[Answer | None, None]:
        """Run a job, and yield its answers; None where nothing has come for a while."""
        loop, answers = asyncio.get_running_loop(), asyncio.Queue[Answer]()
        begin, last = time.perf_counter(), 0.0

        def tell(answer: Answer) -> None:
            self._told.append((answers, answer))
            if len(self._told) == 1:  # only the engine tells, and one call takes all that it has told by then
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._deliver)

        ticket = self.engine.submit(job, tell)
        n_open = ticket.n_text
        try:
            while n_open:
                try:
                    async with asyncio.timeout(_PING_SECONDS):  # wait_for may lose a cancellation
                        answer = await answers.get()
                except TimeoutError:
                    yield None
                    continue
                if isinstance(answer, (Piece, Progress)):
                    _require_numbers(answer)
                if isinstance(answer, Piece):
                    ticket.n_ahead -= 1
                    now = time.perf_counter()
                    (self.metrics.between if last else self.metrics.first).observe(now - (last or begin))
                    last = now
                if isinstance(answer, Problem):
                    n_open = 0
                    raise answer.refusal
                if isinstance(answer, End):
                    n_open -= 1
                    if answer.reason == "interrupted":
                        n_open = 0
                        raise why_cancelled(ticket)
                if isinstance(answer, Progress):
                    known = [each.log_probability for each in answer.scored if each.log_probability is not None]
                    self.metrics.scored(-sum(known), len(known))
                yield answer
        finally:
            if n_open:
                self.engine.cancel(ticket, "client")

    def _deliver(self) -> None:
        """Hand over what the engine has told since the last time."""
        while self._told:
            answers, answer = self._told.popleft()
            answers.put_nowait(answer)

    # sessions

    def describe(self, session: Session) -> SessionAnswer:
        """Return what clients are told of a session."""
        return self._description(
            session.id,
            session.created,
            session.expires_at,
            session.text.n_tokens,
            state=session.state,
            busy=session.busy is not None,
            saved_at=session.saved_at,
            n_rewindable=session.n_rewindable,
        )

    def described_file(self, path: Path, note: dict[str, str]) -> SessionAnswer:
        """Return the same of a session that is only a file."""
        created, ttl, used = (number_of(note, key) for key in ("created", "ttl", "used"))
        expires_at, n_tokens = None if ttl is None or used is None else used + ttl, TextState.of_note(note).n_tokens
        now = {"state": "disk" if self._store().is_free(path) else "elsewhere", "busy": False}
        now |= {"saved_at": n_tokens, "n_rewindable": 0}
        return self._description(path.stem, created or 0, expires_at, n_tokens, **now)

    def _description(self, name: str, created: float, expires_at: float | None, n_tokens: int, **now: Any) -> SessionAnswer:
        return SessionAnswer(
            id=name,
            created=int(created),
            expires_at=None if expires_at is None else int(expires_at),
            model=self.model,
            n_tokens=n_tokens,
            mem_len=self.mem_len,
            n_remembered=min(n_tokens, self.mem_len),
            bytes=self.sessions.bytes_each,
            **now,
        )

    def described_files(self, owner: str) -> dict[str, SessionAnswer]:
        """Return the same of an owner's sessions that are only files, by their ids."""
        notes = self.sessions.store.notes(owner) if self.sessions.store else ()
        return {path.stem: self.described_file(path, note) for path, note in notes if path.stem not in self.sessions.live}

    async def open(self, owner: str, name: str) -> Session:
        """Return a session of an owner, from its file if it is not in memory; one of others is refused as an unknown one is."""
        session = self.sessions.find(owner, name)
        if session is None or session.is_leaving:
            async with self._adopting:
                session = self.sessions.find(owner, name) or await self._adopt(owner, name)
        session.used = time.time()  # so that others make room before it does
        self._keep_here(session)
        return session

    @staticmethod
    def _keep_here(session: Session) -> None:
        """Do not leave a session to its file before the request that runs now has ended."""
        request = asyncio.current_task()
        assert request

        def end(_: object) -> None:
            session.n_users -= 1

        session.n_users += 1
        request.add_done_callback(end)

    async def _missing(self, owner: str, name: str) -> RefusalError:
        """Return why there is no such session here: there is none, or another process has it and has never saved it."""
        store = self.sessions.store
        if store and ID.fullmatch(name):
            await asyncio.to_thread(store.require_free, store.path(owner, name), wait=_LOOK_AGAIN_SECONDS)
        return no_session()

    async def _adopt(self, owner: str, name: str) -> Session:
        store, path = self.sessions.store, self.sessions.file_of(owner, name)
        if store is None or path is None:
            raise await self._missing(owner, name)
        self._require_time()
        await self.make_room()
        lease = await asyncio.to_thread(store.lease, path, wait=_LOOK_AGAIN_SECONDS)
        try:
            if not path.is_file():  # deleted by another process before we had the lease
                raise no_session()
            state, note = await self._read(path)
        except BaseException:
            lease.close()
            raise
        return self.sessions.adopt(owner, name, state, note, lease, self.tokenizer.vocab_size)

    def _require_time(self) -> None:
        """Refuse what would keep a session from others while the server ends."""
        if self.engine.is_draining:
            raise RefusalError(503, "the server is shutting down; ask again later", code="shutting_down", retry_after=1)

    async def make_room(self) -> None:
        """Leave the session that was used least recently to its file, if memory is full."""
        now = time.time()
        old = [each for each in self.sessions.live.values() if each.text.n_tokens or now - each.used > _EMPTY_SECONDS]
        for session in sorted(old, key=lambda each: each.used) if self.sessions.store else ():
            if not self.sessions.is_full:
                break
            if not session.is_idle:
                continue
            with suppress(RefusalError, OSError):  # it is used again, deleted, or cannot be saved; another one may not be
                await self._leave_to_file(session)
        self.sessions.require_room()

    async def _leave_to_file(self, session: Session) -> None:
        """Save a session and let go of it, with its lease; call this only with `_adopting`, and while it is idle."""
        session.is_leaving = True
        try:
            if not session.text.n_tokens:  # no file can hold it, and nothing is lost
                await self._keep(session)
                await self._end(session)
                return
            await self.in_engine(lambda: self.engine.park(session))
            state = session.parked
            await self.save(session)
            if state is not None and await self.in_engine(lambda: self.engine.spill(session, state)):
                self.sessions.forget(session)
                self.metrics.evictions.labels("disk").inc()
        finally:
            session.is_leaving = False

    async def _let_go(self, session: Session) -> None:
        """Leave a session to its file, if nobody uses it and it can be saved."""
        async with self._adopting:
            if session.is_idle:
                with suppress(RefusalError, OSError):
                    await self._leave_to_file(session)

    async def create(
        self, owner: str, *, ttl: float | None = None, seed: int | None = None, source: SessionSource | None = None
    ) -> Session:
        """Begin a session: empty, as a copy of another one, or from a saved file."""
        self._require_time()
        async with self._adopting:
            await asyncio.to_thread(self.sessions.require_quota, owner)
            await self.make_room()
            state, text, own_ttl = await self._state_of(owner, source)
            if seed is not None:
                text.random = seed, seeded_generator(seed)
            session = self.sessions.create(owner, ttl=own_ttl if ttl is None else ttl, text=text, parked=state)
        session.is_changed = text.n_tokens > 0
        return session

    async def _state_of(self, owner: str, source: SessionSource | None) -> tuple[RowState | None, TextState, float | None]:
        if source is None:
            return None, TextState(), None
        if source.saved is not None:
            path = self._saved(owner, source.saved)
        elif session := self.sessions.find(owner, name := source.session or ""):
            session.used = time.time()
            return *await self.in_engine(lambda: self.engine.snapshot(session)), session.ttl
        elif path := self.sessions.file_of(owner, name):
            self._store().require_free(path)  # another process may have what the file does not hold yet
        else:
            raise await self._missing(owner, name)
        state, note = await self._read(path)
        return state, TextState.of_note(note, vocab_size=self.tokenizer.vocab_size), number_of(note, "ttl")

    async def _read(self, path: Path) -> tuple[RowState, dict[str, str]]:
        with self.metrics.restores.time():
            return await asyncio.to_thread(self._store().read, path)

    def _saved(self, owner: str, name: str) -> Path:
        path = self._store().path(owner, name, saved=True)
        if not path.is_file():
            raise RefusalError(404, "nothing is saved by that name", code="not_found")
        return path

    async def save(self, session: Session, *, name: str | None = None) -> int:
        """Write a session to its file, or to one by another name, and return how many tokens that holds."""
        store = self._store()
        path = store.path(session.owner, name or session.id, saved=name is not None)
        async with self._writing:  # one at a time, or two would write the same file
            if session.is_gone:
                raise no_session()
            if name is not None and not path.exists():
                await asyncio.to_thread(self.sessions.require_quota, session.owner)
            state, text, is_whole = await self.in_engine(lambda: (*self.engine.snapshot(session), not session.busy))
            if state is None:
                raise RefusalError(409, "the session has read nothing, so there is nothing to save", code="empty")
            note = note_of(session) | text.note() | ({} if name is None else {"name": name})
            with ExitStack() if name is None else store.lease(path):  # another worker may save by the same name
                if name is None and is_whole and session.text.n_tokens == text.n_tokens:
                    session.is_changed = False  # what comes while it is written is a change again
                try:
                    await asyncio.to_thread(store.write, path, state, note)
                except BaseException:
                    session.is_changed = True
                    raise
            if name is None:
                session.saved_at = text.n_tokens
        return text.n_tokens

    async def delete(self, owner: str, name: str) -> None:
        """End a session, and delete its file."""
        async with self._adopting:  # or somebody might open the file again before it is deleted
            session, path = self.sessions.find(owner, name), self.sessions.file_of(owner, name)
            if session is None and path is None:
                raise await self._missing(owner, name)
            if session is not None:
                await self._end(session)
            if self.sessions.store is not None:
                async with self._writing:
                    path = self.sessions.file_of(owner, name)
                    if path is not None:
                        with self.sessions.store.lease(path):
                            self.sessions.store.remove(path)

    def delete_saved(self, owner: str, name: str) -> None:
        """Delete what was saved by a name."""
        self._store().remove(self._saved(owner, name))

    async def _end(self, session: Session) -> None:
        if session.busy:
            self.engine.cancel(session.busy, "deleted")
        await self.in_engine(lambda: self.engine.release(session))
        self.sessions.forget(session)

    async def rewind(self, session: Session, n: int) -> None:
        """Let a session go back by `n` tokens."""
        self._require_time()
        await self.in_engine(lambda: self.engine.rewind(session, n))

    def _store(self) -> Store:
        if self.sessions.store is None:
            raise RefusalError(400, "this server keeps no files; start it with --sessions DIR", code="no_store")
        return self.sessions.store

    async def end_of(self, session: Session) -> tuple[int, list[int]]:
        """Return how many tokens a session has and the last of them, both of one moment."""
        return await self.in_engine(lambda: (session.text.n_tokens, list(session.text.tail)))

    # what goes on by itself

    async def look_after(self) -> None:
        """Save sessions that rest or have read much, and delete those whose time is over, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._look()
            except (RefusalError, OSError):  # the disk may be full only now
                continue
            except Exception:  # a fault of ours, which must not end all saving
                traceback.print_exc()

    async def _look(self) -> None:
        now = time.time()
        for session in [each for each in self.sessions.live.values() if each.is_gone]:
            self.sessions.forget(session)
        for session in self.sessions.expired(now):
            await self.delete(session.owner, session.id)
            self.metrics.evictions.labels("gone").inc()
        if self.sessions.store and now > self._next_sweep:
            self._next_sweep = now + _SWEEP_SECONDS
            await asyncio.to_thread(self._sweep, self.sessions.store, now)
        if self.sessions.store:
            for session in list(self.sessions.live.values()):
                unsaved = session.text.n_tokens - (session.saved_at or 0)
                rests = session.is_changed and not session.busy and now - session.used > _SAVE_IDLE_SECONDS
                if rests or (session.busy and unsaved > self._save_every):
                    with suppress(RefusalError, OSError):
                        await self._keep(session)
                if self.sessions.is_guest(session) and session.is_idle and now - session.used > _GUEST_SECONDS:
                    await self._let_go(session)

    async def _keep(self, session: Session) -> None:
        """Let the file of a session hold what it is now; one that has gone back to its beginning has none."""
        if session.text.n_tokens:
            await self.save(session)
            return
        async with self._writing:
            path = self.sessions.file_of(session.owner, session.id)
            if session.text.n_tokens:  # it has read on meanwhile
                return
            if path is not None and self.sessions.store:
                self.sessions.store.remove(path)
            session.saved_at, session.is_changed = None, False

    def _sweep(self, store: Store, now: float) -> None:
        """Delete files of sessions whose time is over and that nobody has open."""
        for path, note in store.all_notes():
            used, ttl = number_of(note, "used"), number_of(note, "ttl")
            if used is not None and ttl is not None and used + ttl < now:
                with suppress(RefusalError, OSError), store.lease(path):
                    if store.note(path) == note:  # else another worker has used or deleted it meanwhile
                        store.remove(path)
                        self.metrics.evictions.labels("gone").inc()
        store.tidy()

    async def shut_down(self, grace: float) -> None:
        """Refuse new work, let texts end for a while, and save every session; `n_unsaved` could not be."""
        self.engine.drain()
        until, tried = time.monotonic() + grace, set[Session]()
        while not self.engine.is_idle and time.monotonic() < until:
            for session in [each for each in self.sessions.live.values() if self.sessions.store and each.is_idle]:
                if session not in tried:  # another worker may have it at once
                    tried.add(session)
                    await self._let_go(session)
            await asyncio.sleep(0.05)
        for session in list(self.sessions.live.values()):
            if session.busy:
                self.engine.cancel(session.busy, "shutdown")
        while any(session.busy for session in self.sessions.live.values()) and time.monotonic() < until + 2:
            await asyncio.sleep(0.02)
        self.n_unsaved = 0
        for session in list(self.sessions.live.values()):
            if self.sessions.store and session.is_changed and not session.is_gone:
                try:
                    await self._keep(session)
                except (RefusalError, OSError):
                    self.n_unsaved += 1
                    continue  # it stays for another try
            session.is_gone = True  # whoever asks now must not change what others may read
            self.sessions.forget(session)


def _require_numbers(answer: Piece | Progress) -> None:
    """Refuse to go on where log-probabilities are no numbers, as after a file whose memory was made up."""
    tokens = [answer.token] if isinstance(answer, Piece) else answer.scored
    if not all(math.isfinite(each.log_probability) for each in tokens if each.log_probability is not None):
        raise RefusalError(409, "what the session remembers gives no numbers; delete it", code="not_finite")
