"""What goes and comes piece by piece: answers as events, long texts as bodies, and clients that leave meanwhile."""

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from transformer_xl.errors import TxlError
from transformer_xl.server.guard import error_body
from transformer_xl.server.jobs import RefusalError, refusal_of

T = TypeVar("T")
Events = AsyncGenerator[dict[str, Any] | None, None]

_BLOCK = 1 << 14
"""Characters of a streamed text that are encoded together; they end at a space or line end where there is one."""


class _Events(StreamingResponse):
    """Server-sent events, which end as soon as the client has gone."""

    media_type = "text/event-stream"
    is_read: asyncio.Event | None = None

    async def listen_for_disconnect(self, receive: Receive) -> None:
        if self.is_read:
            await self.is_read.wait()
        await super().listen_for_disconnect(receive)


async def event_stream(
    request: Request, events: Events, *, done: str = "", is_read: asyncio.Event | None = None
) -> StreamingResponse:
    """Return the answer that sends events; what is refused before the first one gets a status of its own.

    Args:
        request: whose answer it is.
        events: what is sent; each is a body of JSON, or None for a sign of life. What is refused becomes an event.
        done: the last line, as OpenAI's streams have it; empty: none.
        is_read: set when the body has been read, by the same channel as word that the client has gone. None: it has been.
    """
    begin = anext(events, None)
    first = await begin if is_read else await unless_gone(request.receive, begin)

    async def lines() -> AsyncGenerator[str, None]:
        yield _line(first)
        try:
            async for event in events:
                yield _line(event)
        except (RefusalError, TxlError) as error:
            yield _line(error_body(refusal_of(error)))
        else:
            if done:
                yield f"data: {done}\n\n"

    response = _Events(lines(), headers={"cache-control": "no-store", "x-accel-buffering": "no"})
    response.is_read = is_read
    return response


def _line(event: dict[str, Any] | None) -> str:
    return ": still here\n\n" if event is None else f"data: {json.dumps(event)}\n\n"


class _GoneError(RefusalError):
    def __init__(self, more: str = "") -> None:
        super().__init__(499, f"the client has gone{more}", code="gone")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return what work gives; end it when the client goes. The body must have been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
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


async def last(events: Events) -> dict[str, Any]:
    """Return the last event."""
    found: dict[str, Any] = {}
    async for event in events:
        found = event or found
    return found
