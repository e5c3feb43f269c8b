"""Sessions: a text and what remains of it, wherever that lies: in a row of the decoder, parked in memory, or on the disk.

A session is in this process (`Sessions.live`) or only a file. While it is here, a lock on a file beside its own, its lease,
keeps other processes with the same directory away. No text of a user is ever a path.
"""

import hashlib
import re
import resource
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from transformer_xl.errors import CheckpointError
from transformer_xl.files import STRAY_SUFFIX, make_directory, sync_directory
from transformer_xl.generation.session import TextState
from transformer_xl.generation.session_file import RowState, SessionFormat, describe_session
from transformer_xl.server.jobs import RefusalError, Ticket
from transformer_xl.tokenizers.base import Tokenizer

ID = re.compile(r"[A-Za-z0-9]{1,16}-[0-9a-f]{32}")

_SUFFIX = ".session"
_OWNER_LETTERS = 16
_OTHER_FILES = 640
"""Connections, and what else is open."""


@dataclass(eq=False)
class Session:
    """A text that is read and written in turns."""

    id: str  # names it in requests
    owner: str  # hash of the key that made it
    created: float  # when, in seconds since 1970
    ttl: float | None  # seconds after its last use when it is deleted; None: never
    text: TextState = field(default_factory=TextState)  # what is known of it besides what its row remembers
    row: int | None = None  # of the decoder, where it lies; None: elsewhere. Only the engine changes this and `parked`
    parked: RowState | None = None  # what its row remembered; None: it is in a row, or has read nothing
    busy: Ticket | None = None  # the job that reads or writes in it
    used: float = field(default_factory=time.time)  # when it was used last, in seconds since 1970
    saved_at: int | None = None  # how many tokens the file holds; None: there is none
    n_rewindable: int = 0  # by how many tokens it can go back now
    is_changed: bool = False  # it is not what its file holds
    is_gone: bool = False  # it was deleted, or left to its file
    is_leaving: bool = False  # it is being left to its file; whoever asks for it must wait
    n_users: int = 0  # requests that go on and have it in hand
    lease: ExitStack = field(default_factory=ExitStack)  # what keeps other processes away

    @property
    def expires_at(self) -> float | None:
        """When it is deleted, in seconds since 1970."""
        return None if self.ttl is None else self.used + self.ttl

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it."""
        return not (self.busy or self.n_users or self.is_gone)

    @property
    def state(self) -> Literal["row", "parked"]:
        """Where it lies."""
        return "row" if self.row is not None else "parked"


class Store:
    """Files of sessions, a directory for each owner.

    Args:
        directory: made if it is missing; its parent must exist.
        format: of the decoder.
        tokenizer: of the model.
        who: names this process in leases.
    """

    def __init__(self, directory: Path, format: SessionFormat, tokenizer: Tokenizer, *, who: str) -> None:
        self.directory, self._format, self._tokenizer, self._who = directory, format, tokenizer, who
        make_directory(directory, mode=0o700)

    def write(self, path: Path, state: RowState, note: dict[str, str]) -> None:
        """Write a file whole, and force it to the disk; what was there before is intact if it cannot be written."""
        make_directory(path.parent, mode=0o700)
        _require_file(path)
        self._format.save(path, [state], note={**note, "tokenizer": self._tokenizer.fingerprint})

    def read(self, path: Path) -> tuple[RowState, dict[str, str]]:
        """Read a file, and check that it is of this model and decoder."""
        _require_file(path)
        try:
            (state, *more), note = self._format.load(path)
        except CheckpointError as error:
            reason = " ".join(str(error).replace(repr(str(path)), "").split())
            message = f"the saved session cannot be used: {reason}"
            raise RefusalError(409, message, code="bad_session") from error
        if more or note.get("tokenizer") != self._tokenizer.fingerprint:
            raise RefusalError(409, "the saved session was read with another tokenizer; use that one", code="bad_session")
        return state, note

    def path(self, owner: str, name: str, *, saved: bool = False) -> Path:
        """Return the file of a session, or of a saved one; a saved name is hashed, so it cannot lead anywhere."""
        own = f"saved-{hashlib.sha256(name.encode()).hexdigest()}" if saved else name
        return self.directory / owner[:_OWNER_LETTERS] / f"{own}{_SUFFIX}"

    @staticmethod
    def note(path: Path) -> dict[str, str] | None:
        """Return the note of a file, which is not verified; None: it is none."""
        try:
            _require_file(path)
            return describe_session(path)["note"]
        except (CheckpointError, OSError, RefusalError):
            return None

    def notes(self, owner: str, *, saved: bool = False) -> Iterator[tuple[Path, dict[str, str]]]:
        """Yield the files of an owner with their notes, which are not verified; files that are none are left out."""
        for path in sorted((self.directory / owner[:_OWNER_LETTERS]).glob(f"*{_SUFFIX}")):
            is_one = path.name.startswith("saved-") == saved and not path.name.startswith(".")
            if is_one and (note := self.note(path)) is not None:
                yield path, note

    def names(self, owner: str) -> list[str]:
        """Return the names of an owner's files, sessions and saved ones."""
        return [path.stem for path in (self.directory / owner[:_OWNER_LETTERS]).glob(f"*{_SUFFIX}")]

    def all_notes(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """Yield the sessions of all owners, not the saved ones."""
        for folder in sorted(path for path in self.directory.iterdir() if path.is_dir()):
            yield from self.notes(folder.name)

    def lease(self, path: Path, *, wait: float = 0.0) -> ExitStack:
        """Keep other processes away from a session; `wait` some seconds for one that may only be looking whether it is free."""
        lock, owner = _lock_of(path), _owner_of(path)
        try:
            make_directory(path.parent, mode=0o700)  # so that only we put files there
            for file in (lock, owner):
                _require_file(file)
            with ExitStack() as held:
                held.enter_context(FileLock(lock, thread_local=False, mode=0o600).acquire(timeout=wait))
                held.callback(lock.unlink, missing_ok=True)  # while it is held; who waits for this file takes a new one
                held.callback(owner.unlink, missing_ok=True)
                owner.touch(0o600)
                owner.write_text(self._who, encoding="ascii")
                return held.pop_all()
        except Timeout:
            who = _read_owner(path)
            message = f"the session is open in another process ({who or 'unknown'}); ask there, or again later"
            raise RefusalError(503, message, code="leased", retry_after=1, extra={"owner": who}) from None

    def is_free(self, path: Path) -> bool:
        """Return whether no process has a session open."""
        try:
            self.require_free(path)
        except RefusalError:
            return False
        return True

    def require_free(self, path: Path, *, wait: float = 0.0) -> None:
        """Refuse a session that is open in another process, and remove a lease that a killed one has left; see `lease`."""
        if _lock_of(path).exists():
            self.lease(path, wait=wait).close()

    def tidy(self) -> None:
        """Delete what killed processes have left: half-written files, and leases that nobody holds."""
        for lock in self.directory.glob("*/*.lock"):
            with suppress(RefusalError):
                self.require_free(lock)
        for stray in self.directory.glob(f"*/.*{_SUFFIX}{STRAY_SUFFIX}"):
            own = stray.name.removeprefix(".").removesuffix(f"{_SUFFIX}{STRAY_SUFFIX}")
            with suppress(RefusalError), self.lease(stray.with_name(own)):  # else it is being written
                stray.unlink(missing_ok=True)

    @staticmethod
    def remove(path: Path) -> None:
        """Delete a file, if it exists."""
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            sync_directory(path.parent)


class Sessions:
    """The sessions of this process, and those that are only files. Used by one thread, that of the event loop.

    Args:
        bytes_each: of memory that a session takes at most, wherever it lies in memory.
        limit: bytes that all sessions in memory may take.
        store: None: sessions end with the process.
        worker: begins the ids of this process's sessions.
        ttl: of sessions that do not say.
        most_open: how many sessions in memory the process can keep a lease of; None: any number.
        quota: bytes that the sessions and saved files of one owner may take, in memory and on the disk; None: no limit.
    """

    def __init__(
        self,
        *,
        bytes_each: int,
        limit: int,
        store: Store | None,
        worker: str,
        ttl: float | None,
        quota: int | None = None,
        most_open: int | None = None,
    ) -> None:
        self.bytes_each, self.limit, self.store, self.worker, self.ttl = bytes_each, limit, store, worker, ttl
        self.quota, self._most_open = quota, most_open
        self.live: dict[str, Session] = {}

    @property
    def most(self) -> int:
        """How many sessions fit into memory."""
        most = self.limit // self.bytes_each
        return most if self._most_open is None else min(most, self._most_open)

    @property
    def is_full(self) -> bool:
        """Whether another session does not fit into memory."""
        return len(self.live) >= self.most

    def create(
        self, owner: str, *, ttl: float | None, text: TextState | None = None, parked: RowState | None = None
    ) -> Session:
        """Begin a session; its memory is accounted for from now on.

        Raises:
            RefusalError: it does not fit into memory, or there is no lease.
        """
        self.require_room()
        name = f"{self.worker}-{secrets.token_hex(16)}"
        session = Session(name, owner, time.time(), self.ttl if ttl is None else ttl, text or TextState(), parked=parked)
        if self.store:
            session.lease = self.store.lease(self.store.path(owner, name))
        self.live[name] = session
        return session

    def require_room(self) -> None:
        """Refuse another session in memory if it does not fit."""
        if self.is_full:
            message = f"{len(self.live):,} sessions of {self.bytes_each:,} bytes fill --session-memory; delete one"
            raise RefusalError(503, message, code="no_room", retry_after=5)

    def require_quota(self, owner: str) -> None:
        """Refuse an owner another session or saved file if those that there are fill the quota."""
        if self.quota is None:
            return
        files = set(self.store.names(owner)) if self.store else set[str]()
        n = len(files | {name for name, each in list(self.live.items()) if each.owner == owner})
        if (n + 1) * self.bytes_each > self.quota:
            message = f"{n:,} sessions and saved files of {self.bytes_each:,} bytes fill the quota ({self.quota:,}); delete one"
            raise RefusalError(403, message, code="quota")

    def find(self, owner: str, name: str) -> Session | None:
        """Return a session that is in this process, if it is the owner's."""
        session = self.live.get(name)
        if session and session.is_gone:
            self.forget(session)
            return None
        return session if session and session.owner == owner else None

    def file_of(self, owner: str, name: str) -> Path | None:
        """Return the file of a session that is not in this process; None: there is none, and so of names that are none."""
        if self.store is None or not ID.fullmatch(name):
            return None
        path = self.store.path(owner, name)
        return path if path.is_file() else None

    def adopt(self, owner: str, name: str, state: RowState, note: dict[str, str], lease: ExitStack, vocab_size: int) -> Session:
        """Take a session into memory that was read from its file."""
        text = TextState.of_note(note, vocab_size=vocab_size)
        created, ttl, used = (number_of(note, key) for key in ("created", "ttl", "used"))
        session = Session(name, owner, created or time.time(), ttl, text, parked=state, lease=lease)
        session.used, session.saved_at = used or time.time(), text.n_tokens
        self.live[name] = session
        return session

    def forget(self, session: Session) -> None:
        """Leave a session to its file, or end it if it has none; the engine must have let it go."""
        if self.live.get(session.id) is session:  # it may have come back from its file already
            del self.live[session.id]
        session.lease.close()

    def is_guest(self, session: Session) -> bool:
        """Whether another worker made a session; requests for it come here only while that worker is away."""
        return session.id.partition("-")[0] != self.worker

    def expired(self, now: float) -> list[Session]:
        """Return the sessions whose time is over; one that is used has time."""
        return [each for each in self.live.values() if each.expires_at is not None and each.expires_at < now and each.is_idle]


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _owner_of(path: Path) -> Path:
    """Return the file that says who has the lock; it lies beside that, because some systems let only its holder read it."""
    return path.with_suffix(".owner")


def _require_file(path: Path) -> None:
    """Refuse a link, which would be followed, and a pipe, which would be waited for: somebody else has put it there."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            message = f"'{path.name}' in the directory of sessions is a link, pipe or directory, no file of ours; remove it"
            raise RefusalError(409, message, code="bad_session")


def _read_owner(path: Path) -> str:
    try:
        _require_file(_owner_of(path))
        return _owner_of(path).read_text(encoding="ascii")[:64]
    except (OSError, UnicodeDecodeError, RefusalError):
        return ""


def note_of(session: Session) -> dict[str, str]:
    """Return what the file of a session says of it, besides its memory."""
    times = {"created": session.created, "used": session.used} | ({} if session.ttl is None else {"ttl": session.ttl})
    return session.text.note() | {name: repr(float(value)) for name, value in times.items()}


def number_of(note: dict[str, str], key: str) -> float | None:
    """Return a number of a note; None: there is none, or it is no time."""
    try:
        value = float(note[key])
    except (KeyError, ValueError):
        return None
    return value if 0 <= value < 1e12 else None


def most_bytes(format: SessionFormat) -> int:
    """Return the bytes of a row's state when its memory is full: what a session takes at most."""
    mem_len: int = format.own.terms["mem_len"]
    return sum(
        x.shape[0] * mem_len * x.shape[2] * x.element_size() if name in format.by_position else x.nbytes
        for name, x in format.own.tensors.items()
    )


def most_leases() -> int:
    """Let this process open as many files as it may, and return how many of them sessions in memory may keep as leases."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = 1 << 20
    with suppress(ValueError, OSError):  # some systems name more than they allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, soft - _OTHER_FILES)
