"""Files of sessions, and leases, which keep other processes with the same directory away. No text of a user is ever a path."""

import hashlib
import os
import re
import resource
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from transformer_xl.errors import CheckpointError
from transformer_xl.files import STRAY_SUFFIX, make_directory, sync_directory
from transformer_xl.generation.session_file import RowState, SessionFormat, describe_session
from transformer_xl.server.jobs import RefusalError, Session
from transformer_xl.tokenizers.base import Tokenizer

ID = re.compile(r"[A-Za-z0-9]{1,16}-[0-9a-f]{32}")
_SUFFIX = ".session"
_OWNER_LETTERS = 16
_OTHER_FILES = 640
"""Connections, and what else is open."""


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

    def read(self, owner: str, path: Path) -> Session:
        """Return the session of a file, parked, and check that it is of this model and decoder."""
        _require_file(path)
        try:
            (state, *more), note = self._format.load(path)
        except CheckpointError as error:
            reason = " ".join(str(error).replace(repr(str(path)), "").split())
            message = f"the saved session cannot be used: {reason}"
            raise RefusalError(409, message, code="bad_session") from error
        if more or note.get("tokenizer") != self._tokenizer.fingerprint:
            raise RefusalError(409, "the saved session was read with another tokenizer; use that one", code="bad_session")
        session = self._session(owner, path, note)
        session.parked = state
        return session

    def described(self, owner: str, path: Path) -> Session | None:
        """Return the session that the note of a file describes, without its memory and unverified, or None without one."""
        note = self.note(path)
        return None if note is None else self._session(owner, path, note)

    def _session(self, owner: str, path: Path, note: dict[str, str]) -> Session:
        return Session.of_note(path.stem, owner, note, vocab_size=self._tokenizer.vocab_size)

    def path(self, owner: str, name: str, *, saved: bool = False) -> Path:
        """Return the file of a session, or of a saved one; a saved name is hashed, so it cannot lead anywhere."""
        own = f"saved-{hashlib.sha256(name.encode()).hexdigest()}" if saved else name
        return self.directory / owner[:_OWNER_LETTERS] / f"{own}{_SUFFIX}"

    @staticmethod
    def note(path: Path) -> dict[str, str] | None:
        """Return the note of a file, which is not verified, or None if the file holds no session."""
        try:
            _require_file(path)
            return describe_session(path)["note"]
        except (CheckpointError, OSError, RefusalError):
            return None

    def files(self, owner: str, *, saved: bool = False) -> list[Path]:
        """Return the files of an owner's sessions, or of what is saved by a name."""
        paths = sorted((self.directory / owner[:_OWNER_LETTERS]).glob(f"*{_SUFFIX}"))
        return [path for path in paths if path.name.startswith("saved-") == saved and not path.name.startswith(".")]

    def lease(self, path: Path, *, wait: float = 0.0) -> ExitStack:
        """Return the lease of a session, which keeps other processes away until it is closed; refuse if another one has it.

        `require_free` holds one for a moment, too: wait up to `wait` seconds for it.
        """
        lock = path.with_suffix(".lock")
        owner = path.with_suffix(".owner")  # beside the lock, because some systems let only its holder read that
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
            who = ""
            with suppress(OSError):
                who = owner.read_text(encoding="ascii", errors="ignore")[:64]
            message = f"the session is open in another process ({who or 'unknown'}); ask there, or again later"
            raise RefusalError(503, message, code="leased", retry_after=1, extra={"owner": who}) from None

    def require_free(self, path: Path, *, wait: float = 0.0) -> None:
        """Refuse a session that is open in another process, and remove a lease that a killed one has left; see `lease`."""
        if path.with_suffix(".lock").exists():
            self.lease(path, wait=wait).close()

    def is_free(self, path: Path) -> bool:
        """Return whether no process has a session open."""
        try:
            self.require_free(path)
        except RefusalError:
            return False
        return True

    def sweep(self, now: float) -> int:
        """Delete files of sessions whose time is over and that nobody has open, and return how many.

        What killed processes have left goes, too: half-written files, and leases that nobody holds.
        """
        n = 0
        for folder in sorted(path for path in self.directory.iterdir() if path.is_dir()):
            for path in self.files(folder.name):
                note = self.note(path)
                expires_at = None if note is None else self._session(folder.name, path, note).expires_at
                if expires_at is not None and expires_at < now:
                    with suppress(RefusalError, OSError), self.lease(path):
                        if self.note(path) == note:  # else another worker has used or deleted it meanwhile
                            self.remove(path)
                            n += 1
        for lock in self.directory.glob("*/*.lock"):
            self.is_free(lock)
        for stray in self.directory.glob(f"*/.*{_SUFFIX}{STRAY_SUFFIX}"):
            own = stray.name.removeprefix(".").removesuffix(f"{_SUFFIX}{STRAY_SUFFIX}")
            with suppress(RefusalError), self.lease(stray.with_name(own)):  # else it is being written
                stray.unlink(missing_ok=True)
        return n

    @staticmethod
    def remove(path: Path) -> None:
        """Delete a file, if it exists."""
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            sync_directory(path.parent)


def _require_file(path: Path) -> None:
    """Refuse a link, which would be followed, and a pipe, which would be waited for: somebody else has put it there."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            message = f"'{path.name}' in the directory of sessions is a link, pipe or directory, no file of ours; remove it"
            raise RefusalError(409, message, code="bad_session")


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


def own_name() -> str:
    """Return a name for this process in leases."""
    return f"{os.uname().nodename[:40]}:{os.getpid()}"
