"""Does what examples/serve/haproxy.cfg does, where HAProxy is missing: the same rules, and no more than the tests need."""

import asyncio
import hashlib
import re
import socket
from collections import Counter
from contextlib import closing, suppress

_SESSION = re.compile(rb"^\S+ /v1/sessions/([A-Za-z0-9]+-[0-9a-f]+)|\r\nx-session-id: *([^\r]+)", re.IGNORECASE)
_CONNECTION = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)
_NONE = b"HTTP/1.1 %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class StandIn:
    """A proxy in front of workers, given as ports of this machine by name."""

    def __init__(self, workers: dict[str, int]) -> None:
        self._ports, self._up = workers, set(workers)
        self._busy, self._asked = Counter[str](), Counter[str]()
        self._own = set[asyncio.Task[None]]()

    async def run(self, listening: socket.socket, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        server = await asyncio.start_server(self._begin, sock=listening)
        for name in self._ports:
            self._own.add(asyncio.ensure_future(self._check(name)))
        await stop.wait()
        asyncio.get_running_loop().remove_reader(listening)  # to close the server now would fail for who is being let in
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # who has just been let in begins another
            for task in self._own & others:
                task.cancel()
            await asyncio.wait(others)
        server.close()
        await asyncio.sleep(0)  # in which connections end

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._own.add(task)
        task.add_done_callback(self._own.discard)
        task.add_done_callback(lambda _: writer.close())  # also of a task that was stopped before its first line

    def _order(self, session: str) -> list[str]:
        """Return the workers that live, the best one for a request first."""
        if not session:
            return sorted(self._up, key=lambda name: (self._busy[name], self._asked[name]))
        own = session.partition("-")[0]
        return sorted(self._up, key=lambda name: (name != own, hashlib.sha256(f"{name} {session}".encode()).digest()))

    async def _check(self, name: str) -> None:
        while True:
            answer = b""
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[name])
                    with closing(writer):
                        writer.write(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                        answer = await reader.read()
            (self._up.add if answer.startswith(b"HTTP/1.1 200") else self._up.discard)(name)
            await asyncio.sleep(0.2)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            found = _SESSION.search(head)
            for name in self._order((found[1] or found[2]).decode() if found else ""):
                try:
                    worker = await asyncio.open_connection("127.0.0.1", self._ports[name])
                except ConnectionRefusedError:
                    self._up.discard(name)  # until a check finds it well
                    continue
                self._busy[name], self._asked[name] = self._busy[name] + 1, self._asked[name] + 1
                with closing(worker[1]):
                    await self._pass_on(head, reader, writer, *worker)
                self._busy[name] -= 1
                return
            writer.write(_NONE % b"503 nobody")

    @staticmethod
    async def _pass_on(
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        worker: asyncio.StreamReader,
        to_worker: asyncio.StreamWriter,
    ) -> None:
        to_worker.write(_CONNECTION.sub(b"", head[:-4]) + b"\r\nconnection: close\r\n\r\n")
        asking = asyncio.ensure_future(_copy(reader, to_worker))
        asking.add_done_callback(lambda _: to_worker.close())  # the client has gone, or the answer is whole
        try:
            n_byte = await _copy(worker, writer)
        finally:
            asking.cancel()
        if not n_byte:
            writer.write(_NONE % b"502 died")  # and no other worker is asked: it may have done what it was asked for


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    n_byte = 0
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            n_byte += len(data)
            writer.write(data)
            await writer.drain()
    return n_byte
