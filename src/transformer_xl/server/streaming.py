"""What goes and comes piece by piece: answers as events, and clients that leave meanwhile."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from transformer_xl.errors import TxlError
from transformer_xl.server.guard import error_body
from transformer_xl.server.jobs import RefusalError, refusal_of

T = TypeVar("T")
Events = AsyncGenerator[dict[str, Any] | None, None]


async def event_stream(request: Request, events: Events, *, done: str = "") -> StreamingResponse:
    """Return the answer that sends events; what is refused before the first one gets a status of its own.

    Args:
        request: whose answer it is.
        events: what is sent; each is a body of JSON, or None for a sign of life. What is refused becomes an event.
        done: the last line, as OpenAI's streams have it; empty: none.
    """
    first = await unless_gone(request.receive, anext(events, None))

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

    return _EventStream(lines(), events)


class _EventStream(StreamingResponse):
    """Lines of events; where no more of them can be sent, it ends what makes them at once."""

    def __init__(self, lines: AsyncGenerator[str, None], events: Events) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._lines, self._events = lines, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events), aclosing(self._lines):
            await super().__call__(scope, receive, send)


def _line(event: dict[str, Any] | None) -> str:
    return ": still here\n\n" if event is None else f"data: {json.dumps(event)}\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return what work gives; end it when the client goes. The body must have been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RefusalError(499, "the client has gone", code="gone")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def last(events: Events) -> dict[str, Any]:
    """Return the last event."""
    found: dict[str, Any] = {}
    async with aclosing(events):
        async for event in events:
            found = event or found
    return found
