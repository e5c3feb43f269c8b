"""What goes and comes piece by piece: answers as events, long texts as bodies, and clients that leave meanwhile."""

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from transformer_xl.errors import TxlError
from transformer_xl.server.guard import error_body, refused
from transformer_xl.server.jobs import RefusalError, refusal_of

T = TypeVar("T")

_BLOCK = 1 << 14
"""Characters of a streamed text that are encoded together; they end at a space or line end where there is one."""


class EventStream(Response):
    """Server-sent events, ended as soon as the client has gone.

    Args:
        events: what is sent; each is a body of JSON, or None for a sign of life. What is refused becomes an event.
        done: the last line, as OpenAI's streams have it; empty: none.
        is_read: set when the body has been read, by the same channel as word that the client has gone. None: it has been.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any] | None, None],
        *,
        done: str = "",
        is_read: asyncio.Event | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._done, self._is_read = events, done, is_read

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with suppress(_GoneError):
            await unless_gone(receive, self._send(send), self._is_read)

    async def _send(self, send: Any) -> None:
        events = aiter(self._events)
        async with aclosing(self._events):
            try:
                first = await anext(events, None)  # what is refused at once gets its own status
            except (RefusalError, TxlError) as error:
                await refused(refusal_of(error))({"type": "http"}, _never, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(self._chunk(first))
            try:
                async for event in events:
                    await send(self._chunk(event))
            except (RefusalError, TxlError) as error:
                await send(self._chunk(error_body(refusal_of(error))))
            else:
                if self._done:
                    await send(self._body(f"data: {self._done}\n\n"))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunk(self, event: dict[str, Any] | None) -> dict[str, Any]:
        if event is None:
            return self._body(": still here\n\n")
        return self._body(f"data: {json.dumps(event)}\n\n")

    @staticmethod
    def _body(text: str) -> dict[str, Any]:
        return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def _never() -> Any:
    raise AssertionError("an answer that is whole waits for nothing")


async def _gone(receive: Any, is_read: asyncio.Event | None = None) -> None:
    if is_read:
        await is_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass


class _GoneError(RefusalError):
    def __init__(self, more: str = "") -> None:
        super().__init__(499, f"the client has gone{more}", code="gone")


async def unless_gone(receive: Receive, work: Awaitable[T], is_read: asyncio.Event | None = None) -> T:
    """Return what work gives; end it when the client goes. See `EventStream` for `is_read`."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive, is_read))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _GoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def decoded(chunks: AsyncIterator[bytes], is_read: asyncio.Event) -> AsyncGenerator[str, None]:
    """Yield a text in blocks whose borders depend on the text alone."""
    decoder, held, n_byte = codecs.getincrementaldecoder("utf-8")(), "", 0
    try:
        async for chunk in chunks:
            held += decoder.decode(chunk)
            n_byte += len(chunk)
            while len(held) >= _BLOCK:
                border = max(held.rfind("\n", 0, _BLOCK), held.rfind(" ", 0, _BLOCK)) + 1 or _BLOCK
                yield held[:border]
                held = held[border:]
    except UnicodeDecodeError as error:
        place = n_byte + error.start
        raise RefusalError(400, f"byte {place} or near it is not UTF-8; convert the text first", code="not_utf8") from None
    except ClientDisconnect:
        raise _GoneError("; what was read is kept") from None
    is_read.set()
    try:
        held += decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise RefusalError(400, "the text ends inside a character", code="not_utf8") from None
    if held:
        yield held


async def last(events: AsyncGenerator[dict[str, Any] | None, None]) -> dict[str, Any]:
    """Return the last event."""
    found: dict[str, Any] = {}
    async for event in events:
        found = event or found
    return found
