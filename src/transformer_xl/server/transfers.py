"""Files of sessions that clients send or fetch."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from transformer_xl.server.jobs import RefusalError
from transformer_xl.server.service import Loaded, Service
from transformer_xl.server.sessions import TRANSFER, Session, note_of

_EXTRA_BYTES = 1 << 16
"""Of a session's file besides its memory: names, the last tokens, random numbers, a hash."""

_CHUNK_BYTES = 1 << 20
_MOST = 4


class Transfers:
    """Takes files and gives them, a few at a time, because no quota counts what lies on the disk meanwhile."""

    def __init__(self, service: Service) -> None:
        self._service, self._n = service, 0

    @property
    def most_bytes(self) -> int:
        """The most bytes that the file of a session has."""
        return self._service.sessions.bytes_each + _EXTRA_BYTES

    async def take(self, owner: str, chunks: AsyncIterator[bytes]) -> Session:
        """Begin a session with a file that a client sends; it is verified as a whole before it is believed.

        Raises:
            RefusalError: it is no file of this model and decoder, there is no room, or the client has gone.
        """
        await asyncio.to_thread(self._service.sessions.require_quota, owner)
        with self._folder() as folder:
            path = folder / "session"
            await _written(path, chunks)
            return await self._service.begin(owner, lambda: self._sound(path))

    async def _sound(self, path: Path) -> Loaded:
        try:
            loaded = await self._service.restored(path)
        except RefusalError as refusal:
            raise RefusalError(400, refusal.message, code=refusal.code) from refusal
        if loaded.state and not all(x.isfinite().all() for x in loaded.state.tensors.values() if x.is_floating_point()):
            raise RefusalError(400, "the file holds numbers that are not finite", code="bad_session")
        return loaded._replace(ttl=None)  # it is for us to say how long we keep it

    async def give(self, session: Session) -> tuple[int, AsyncGenerator[bytes, None]]:
        """Return the size of a session's file, and its bytes.

        Raises:
            RefusalError: it has read nothing, or there is no room for the file.
        """
        service = self._service
        state, text = await service.in_engine(lambda: service.engine.snapshot(session))
        if state is None:
            raise RefusalError(409, "the session has read nothing, so there is nothing to export", code="empty")
        with self._folder() as folder:
            path = folder / "session"
            await asyncio.to_thread(service.files.write, path, state, note_of(session) | text.note())
            file = path.open("rb")
        return os.fstat(file.fileno()).st_size, _read(file)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Make a directory for a file, on the disk that sessions have.

        Raises:
            RefusalError: enough files come and go, or there is no room.
        """
        if self._n >= _MOST:
            raise RefusalError(429, "other files of sessions come or go; ask again later", code="overloaded", retry_after=1)
        store = self._service.sessions.store
        try:
            folder = TemporaryDirectory(prefix=TRANSFER, dir=store.directory if store else None)
        except OSError as error:
            raise _full(error) from error
        self._n += 1
        try:
            with folder:
                yield Path(folder.name)
        finally:
            self._n -= 1


def _full(error: OSError) -> RefusalError:
    return RefusalError(507, f"the file cannot be kept ({error.strerror})", code="not_saved")


async def _written(path: Path, chunks: AsyncIterator[bytes]) -> None:
    """Write what comes to a file."""
    with path.open("wb") as file:
        async for chunk in chunks:
            try:
                await asyncio.to_thread(file.write, chunk)
            except OSError as error:
                raise _full(error) from error


async def _read(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a file, and close it."""
    with file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk
