"""Sessions: a text and what remains of it, wherever that lies: in a row of the decoder, parked in memory, or on the disk.

A session is in this process (`Sessions.live`) or only a file. While it is here, a lock on a file beside its own, its lease,
keeps other processes with the same directory away.

    state       row and parked          lease  what ends it
    empty       None, None              held   its first job gives it a row
    in a row    a number, None          held   `Engine.park` takes the row for another job
    parked      None, a `RowState`      held   its next job gives it a row
    leaving     either                  held   saved and let go of: a file; used meanwhile: as it was
    a file      there is no `Session`   free   `Sessions.open` reads it: parked
    gone        None, None              free   nothing: `is_gone` stays, whoever still has the `Session` is refused

The engine's thread owns `row`, `parked`, `n_change` and `n_rewindable` of what is live, and changes `text` and `is_gone`. The
event loop's owns `saved_at`, `n_saved`, `is_leaving`, `n_users`, `lease` and `ttl`. Both set `used` to the time that it is.
`busy` is set by whoever submits a job, with the engine's lock held, and cleared by the engine. At the end of a server the loop
sets `is_gone`, too.
"""

import asyncio
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from transformer_xl.generation.seeds import seeded_generator
from transformer_xl.server.engine import Engine
from transformer_xl.server.jobs import RefusalError, Session, no_session, shutting_down
from transformer_xl.server.store import ID, Store, most_bytes

T = TypeVar("T")

_SAVE_IDLE_SECONDS = 2.0
_GUEST_SECONDS = 1.0
"""After which a session of another worker is left to its file, so that its worker can have it when that is back."""

_LOOK_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.05
_SWEEP_SECONDS = 60.0
_EMPTY_SECONDS = 60.0
"""After which a session that has read nothing is ended, if its memory is needed."""


class Sessions:
    """The sessions of this process, and those that are only files.

    Used by the thread of the event loop. Quotas are counted and files are read and written by helper threads meanwhile, which
    only look at `live`.

    Args:
        engine: reads and writes them.
        limit: bytes that all sessions in memory may take.
        store: None: sessions end with the process.
        worker: begins the ids of this process's sessions.
        ttl: of sessions that do not say.
        most_open: how many sessions in memory the process can keep a lease of; None: any number.
        quota: bytes that the sessions and saved files of one owner may take, in memory and on the disk; None: no limit.
        save_every: tokens after which a session is saved while it is read or written.

    Attributes:
        bytes_each: of memory that a session takes at most, wherever it lies in memory.
        most: how many fit into memory.
        live: those in this process, by their ids.
        n_unsaved: how many could not be saved at the end.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        limit: int,
        store: Store | None,
        worker: str,
        ttl: float | None,
        quota: int | None = None,
        most_open: int | None = None,
        save_every: int = 65_536,
    ) -> None:
        self.bytes_each = most_bytes(engine.format)
        self.most = min(limit // self.bytes_each, most_open or sys.maxsize)
        self.store, self.worker, self.ttl, self.quota = store, worker, ttl, quota
        self.live: dict[str, Session] = {}
        self.n_unsaved = 0
        self._engine, self._metrics, self._save_every = engine, engine.metrics, save_every
        self._adopting, self._writing = asyncio.Lock(), asyncio.Lock()
        self._next_sweep = 0.0

    def find(self, owner: str, name: str) -> Session | None:
        """Return a session that is in this process, if it is the owner's."""
        session = self.live.get(name)
        if session and session.is_gone:
            self.forget(session)
            return None
        return session if session and session.owner == owner else None

    def file_of(self, owner: str, name: str) -> Path | None:
        """Return the file of a session, which may be open, or None if it does not exist or the name is no session's."""
        if self.store is None or not ID.fullmatch(name):
            return None
        path = self.store.path(owner, name)
        return path if path.is_file() else None

    def require_store(self) -> Store:
        """Return the files, and refuse what needs them where there are none."""
        if self.store is None:
            raise RefusalError(400, "this server keeps no files; start it with --sessions DIR", code="no_store")
        return self.store

    def require_quota(self, owner: str) -> None:
        """Refuse an owner another session or saved file if those that there are fill the quota."""
        if self.quota is None:
            return
        files = self.store.files(owner) + self.store.files(owner, saved=True) if self.store else []
        n = len({path.stem for path in files} | {name for name, each in list(self.live.items()) if each.owner == owner})
        if (n + 1) * self.bytes_each > self.quota:
            message = f"{n:,} sessions and saved files of {self.bytes_each:,} bytes fill the quota ({self.quota:,}); delete one"
            raise RefusalError(403, message, code="quota")

    async def in_engine(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two ticks."""
        return await asyncio.wrap_future(self._engine.call(function))

    # they begin

    async def create(
        self,
        owner: str,
        *,
        ttl: float | None = None,
        seed: int | None = None,
        source: str | None = None,
        saved: str | None = None,
    ) -> Session:
        """Begin a session: empty, as a copy of another one (`source`), or from what is saved by a name."""
        self._require_time()
        async with self._adopting:
            await asyncio.to_thread(self.require_quota, owner)
            await self._make_room()
            name = f"{self.worker}-{secrets.token_hex(16)}"
            session = Session(name, owner, time.time(), self.ttl)
            if source is not None or saved is not None:
                await self._copy(session, source, saved)
            if ttl is not None:
                session.ttl = ttl
            if seed is not None:
                session.text.random = seed, seeded_generator(seed)
            if self.store:
                session.lease = self.store.lease(self.store.path(owner, name))
            self.live[name] = session
        return session

    async def _copy(self, session: Session, source: str | None, saved: str | None) -> None:
        """Let a session begin as a copy of another one, or of what is saved."""
        owner, name = session.owner, source or ""
        if other := self.find(owner, name):
            other.used = time.time()
            session.parked, session.text = await self.in_engine(lambda: self._engine.snapshot(other))
        else:
            path = self._saved(owner, saved) if saved is not None else self.file_of(owner, name)
            if path is None:
                raise await self._missing(owner, name)
            if saved is None:
                self.require_store().require_free(path)  # another process may have what the file does not hold yet
            other = await self._read(owner, path)
            session.parked, session.text = other.parked, other.text
        session.ttl = self.ttl if other.ttl is None else other.ttl
        session.n_change = min(1, session.text.n_tokens)

    def _saved(self, owner: str, name: str) -> Path:
        path = self.require_store().path(owner, name, saved=True)
        if not path.is_file():
            raise RefusalError(404, "nothing is saved by that name", code="not_found")
        return path

    async def _read(self, owner: str, path: Path) -> Session:
        with self._metrics.restores.time():
            return await asyncio.to_thread(self.require_store().read, owner, path)

    async def open(self, owner: str, name: str) -> Session:
        """Return a session of an owner, from its file if it is not in memory; one of others is refused as an unknown one is."""
        session = self.find(owner, name)
        if session is None or session.is_leaving:
            async with self._adopting:
                session = self.find(owner, name) or await self._adopt(owner, name)
        session.used = time.time()  # so that others make room before it does
        self._count_user(session)
        return session

    @staticmethod
    def _count_user(session: Session) -> None:
        """Do not leave a session to its file before the request that runs now has ended."""
        request = asyncio.current_task()
        assert request

        def end(_: object) -> None:
            session.n_users -= 1

        session.n_users += 1
        request.add_done_callback(end)

    async def _adopt(self, owner: str, name: str) -> Session:
        """Take a session into memory from its file."""
        store, path = self.store, self.file_of(owner, name)
        if store is None or path is None:
            raise await self._missing(owner, name)
        self._require_time()
        await self._make_room()
        with await asyncio.to_thread(store.lease, path, wait=_LOOK_AGAIN_SECONDS) as lease:
            if not path.is_file():  # deleted by another process before we had the lease
                raise no_session()
            session = self.live[name] = await self._read(owner, path)
            session.lease = lease.pop_all()
        return session

    async def _missing(self, owner: str, name: str) -> RefusalError:
        """Return why there is no such session here: there is none, or another process has it and has never saved it."""
        if self.store and ID.fullmatch(name):
            await asyncio.to_thread(self.store.require_free, self.store.path(owner, name), wait=_LOOK_AGAIN_SECONDS)
        return no_session()

    def _require_time(self) -> None:
        """Refuse what would keep a session from others while the server ends."""
        if self._engine.is_draining:
            raise shutting_down(retry_after=1)

    async def _make_room(self) -> None:
        """Leave sessions to their files, the longest unused first, while memory is full; refuse another one if it stays so."""
        now = time.time()
        old = [each for each in self.live.values() if each.text.n_tokens or now - each.used > _EMPTY_SECONDS]
        for session in sorted(old, key=lambda each: each.used) if self.store else ():
            if len(self.live) < self.most:
                break
            await self._leave_to_file(session)
        if len(self.live) >= self.most:
            message = f"{len(self.live):,} sessions of {self.bytes_each:,} bytes fill --session-memory; delete one"
            raise RefusalError(503, message, code="no_room", retry_after=5)

    # they are saved, left to their files, and end

    async def save(self, session: Session, *, name: str | None = None) -> int:
        """Write a session to its file, or to one by another name, and return how many tokens that holds."""
        store = self.require_store()
        path = store.path(session.owner, name or session.id, saved=name is not None)
        async with self._writing:  # one at a time, or two would write the same file
            if session.is_gone:
                raise no_session()
            if name is not None and not path.exists():
                await asyncio.to_thread(self.require_quota, session.owner)
            state, text, n_change = await self.in_engine(lambda: (*self._engine.snapshot(session), session.n_change))
            if state is None:
                raise RefusalError(409, "the session has read nothing, so there is nothing to save", code="empty")
            note = session.note() | text.note() | ({} if name is None else {"name": name})
            with ExitStack() if name is None else store.lease(path):  # another worker may save by the same name
                await asyncio.to_thread(store.write, path, state, note)
            if name is None:
                session.saved_at, session.n_saved = text.n_tokens, n_change
        return text.n_tokens

    async def _bring_file_up_to_date(self, session: Session) -> None:
        """Let the file of a session hold what it is now; one that has gone back to its beginning has none."""
        if session.text.n_tokens:
            await self.save(session)
            return
        async with self._writing:
            path, n_change = self.file_of(session.owner, session.id), session.n_change
            if session.text.n_tokens:  # it has read on meanwhile
                return
            if path is not None and self.store:
                self.store.remove(path)
            session.saved_at, session.n_saved = None, n_change

    async def _leave_to_file(self, session: Session) -> None:
        """Save a session and let go of it, with its lease, unless it is used or cannot be saved; only with `_adopting`."""
        if not session.is_idle:
            return
        session.is_leaving = True
        try:
            await self._bring_file_up_to_date(session)
            if await self.in_engine(lambda: self._engine.let_go(session)):
                self.forget(session)
                self._metrics.evictions.labels("disk").inc()
        except (RefusalError, OSError):
            return
        finally:
            session.is_leaving = False

    async def _let_go(self, session: Session) -> None:
        async with self._adopting:
            await self._leave_to_file(session)

    def forget(self, session: Session) -> None:
        """Leave a session to its file, or end it if it has none; the engine must have let it go."""
        if self.live.get(session.id) is session:  # it may have come back from its file already
            del self.live[session.id]
        session.lease.close()

    async def delete(self, owner: str, name: str) -> None:
        """End a session, and delete its file."""
        async with self._adopting:  # or somebody might open the file again before it is deleted
            session = self.find(owner, name)
            if session is not None:
                await self._end(session)
            elif (path := self.file_of(owner, name)) is None:
                raise await self._missing(owner, name)
            else:
                with self.require_store().lease(path):
                    await self._delete_file(owner, name)

    def delete_saved(self, owner: str, name: str) -> None:
        """Delete what was saved by a name."""
        self.require_store().remove(self._saved(owner, name))

    async def _end(self, session: Session) -> None:
        """End a session, and delete its file, with its lease until that is gone; only with `_adopting`."""
        lease = session.lease.pop_all()  # so that whoever finds that it is gone does not give it up
        try:
            await self.in_engine(lambda: self._engine.release(session))
        except BaseException:
            session.lease = lease
            raise
        with lease:
            await self._delete_file(session.owner, session.id)
        self.forget(session)

    async def _delete_file(self, owner: str, name: str) -> None:
        """Delete the file of a session, if it has one; only with its lease."""
        async with self._writing:  # what is being written would come after it
            if self.store and (path := self.file_of(owner, name)):
                self.store.remove(path)

    async def rewind(self, session: Session, n: int) -> None:
        """Let a session go back by `n` tokens."""
        self._require_time()
        await self.in_engine(lambda: self._engine.rewind(session, n))

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

    async def _end_expired(self, now: float) -> None:
        """End the sessions whose time is over; one that is used has time."""
        for session in list(self.live.values()):
            if session.is_expired(now):
                async with self._adopting:
                    if session.is_expired(now):  # nobody has come for it while we waited
                        await self._end(session)
                        self._metrics.evictions.labels("gone").inc()

    async def _look(self) -> None:
        now = time.time()
        for session in [each for each in self.live.values() if each.is_gone]:
            self.forget(session)
        await self._end_expired(now)
        if self.store is None:
            return
        if now > self._next_sweep:
            self._next_sweep = now + _SWEEP_SECONDS
            self._metrics.evictions.labels("gone").inc(await asyncio.to_thread(self.store.sweep, now))
        for session in list(self.live.values()):
            unsaved = session.text.n_tokens - (session.saved_at or 0)
            rests = session.is_changed and not session.busy and now - session.used > _SAVE_IDLE_SECONDS
            if rests or (session.busy and unsaved > self._save_every):
                with suppress(RefusalError, OSError):
                    await self._bring_file_up_to_date(session)
            is_guest = session.id.partition("-")[0] != self.worker  # requests for it come here while its worker is away
            if is_guest and session.is_idle and now - session.used > _GUEST_SECONDS:
                await self._let_go(session)

    async def shut_down(self, grace: float) -> None:
        """Refuse new work, let texts end for a while, and save every session; `n_unsaved` could not be."""
        self._engine.drain()
        until, tried = time.monotonic() + grace, set[Session]()
        while not self._engine.is_idle and time.monotonic() < until:
            for session in [each for each in self.live.values() if self.store and each.is_idle]:
                if session not in tried:  # another worker may have it at once
                    tried.add(session)
                    await self._let_go(session)
            await asyncio.sleep(0.05)
        for session in list(self.live.values()):
            if session.busy:
                self._engine.cancel(session.busy, "shutdown")
        while any(session.busy for session in self.live.values()) and time.monotonic() < until + 2:
            await asyncio.sleep(0.02)
        self.n_unsaved = 0
        for session in list(self.live.values()):
            if self.store and session.is_changed and not session.is_gone:
                try:
                    await self._bring_file_up_to_date(session)
                except (RefusalError, OSError):
                    self.n_unsaved += 1
                    continue  # it stays for another try
            session.is_gone = True  # whoever asks now must not change what others may read
            self.forget(session)
