"""The server put together, and run until a signal ends it."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from transformer_xl.console import say
from transformer_xl.errors import TxlError, message_of, one_line
from transformer_xl.server import about, completions, session_routes, texts
from transformer_xl.server.guard import Guard, refused
from transformer_xl.server.jobs import RefusalError, refusal_of
from transformer_xl.server.service import Service
from transformer_xl.version import __version__

ROUTERS = (about.router, texts.router, completions.router, session_routes.router)
_HEADER_BYTES = 16_384
_HEADER_SECONDS = 5.0
_MOST_CONNECTIONS = 500
_MOST_REQUESTS = 512
_KNOCK_SECONDS = 0.1
_MOST_PROBLEMS = 3
_LONGEST_VALUE = 60


def make_app(
    service: Service,
    *,
    keys: Collection[str] = (),
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
) -> Any:
    """Return the ASGI application of a service, whose engine has been started, guarded; see `Guard`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        looking_after = asyncio.ensure_future(service.sessions.look_after())
        try:
            yield
        finally:
            looking_after.cancel()
            await asyncio.gather(looking_after, return_exceptions=True)

    app = FastAPI(title="txl serve", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    for kind in (RefusalError, TxlError, OSError, Exception):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)  # pyright: ignore[reportArgumentType]
    app.add_exception_handler(HTTPException, _unknown)  # pyright: ignore[reportArgumentType]
    guarded = Guard(app, keys=keys, origins=origins, metrics=service.metrics, hosts=hosts)
    headers = ["authorization", "content-type", "x-api-key", "x-session-id"]
    return CORSMiddleware(guarded, allow_origins=origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=headers)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, OSError):
        say(f"txl serve: {message_of(error)}")
    return refused(refusal_of(error))


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    problems: list[str] = []
    for each in error.errors()[:_MOST_PROBLEMS]:
        parts = (str(part) for part in each["loc"] if part != "body")
        place = one_line(".".join(part for part in parts if not part.startswith(("function", "list[")))[:_LONGEST_VALUE])
        said = one_line(each["msg"].removeprefix("Value error, "))
        if each["type"] == "json_invalid":
            said, place = f"the body is no JSON (at character {place})", ""
        if each["type"] == "extra_forbidden":
            said = "this field is unknown or not supported; leave it out"
        problems.append(f"{place}: {said}" if place else said)
    return refused(RefusalError(400, "; ".join(dict.fromkeys(problems)), code="invalid_request"))


async def _unknown(request: Request, error: HTTPException) -> JSONResponse:
    if isinstance(error.__cause__, RefusalError):  # of the body, while it was read
        return refused(error.__cause__)
    code = HTTPStatus(error.status_code).name.lower()
    response = refused(RefusalError(error.status_code, str(error.detail), code=code))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["allow"] = ", ".join(_methods(request))
    return response


def _methods(request: Request) -> list[str]:
    """Return the methods of a path: a route that is written out goes before those that match it by a parameter."""
    routes = [each for router in ROUTERS for each in router.routes if isinstance(each, APIRoute)]
    matching = [each for each in routes if each.matches(request.scope)[0] != Match.NONE]
    exact = [each for each in matching if each.path == request.url.path]
    return sorted({method for each in exact or matching for method in each.methods or ()}) or ["GET"]


class _Protocol(H11Protocol):
    """HTTP whose headers must be whole after a few seconds, and whose requests have one answer each."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > _MOST_CONNECTIONS:  # one that is silent makes room for one that may have something to say
            silent = (each for each in self.connections if isinstance(each, _Protocol) and each is not self and each.is_silent)
            if oldest := next(silent, None):
                oldest.transport.close()

    @property
    def is_silent(self) -> bool:
        """Whether no request is read or answered."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  # it lets the transport close itself
        """Keep a connection whose client has asked and says no more: it may read. One that has left takes nothing."""
        waits = self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)
        if waits:
            self.cycle.keep_alive = False
            self.loop.call_later(_KNOCK_SECONDS, self._knock, self.cycle, 2)
        return waits

    def _knock(self, cycle: RequestResponseCycle, n: int) -> None:
        """Write what says nothing to a client that may have left: the system refuses the first, and the second one tells us."""
        if n and not (cycle.response_started or self.transport.is_closing()) and self.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self.loop.call_later(_KNOCK_SECONDS, self._knock, cycle, n - 1)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
            if self.cycle is not None:  # nothing comes after this answer
                self.cycle.disconnected = True
        else:  # an answer has begun already: a body broke off after it
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late:
            self._late.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Begin to wait for whole headers, or cease to: a connection that rests between two requests has its own limit."""
        waits = self.conn.their_state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))
        if waits and self._late is None:
            self._late = self.loop.call_later(_HEADER_SECONDS, self.transport.close)
        elif not waits and self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """A server that drains when it is told to end: texts have `grace` seconds to end, and it answers 503 meanwhile."""

    def __init__(self, service: Service, app: Any, *, host: str, port: int, grace: float) -> None:
        self._service, self._grace, self._ending = service, grace, False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.socket = _listen(host, port)
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            limit_concurrency=_MOST_REQUESTS,  # beyond them the answer is 503
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)

    @property
    def address(self) -> str:
        """Where it listens, as a URL."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run_until_ended(self) -> None:
        """Serve until SIGINT or SIGTERM, save everything, and return; a second signal ends at once."""
        asyncio.run(self._until_ended())

    async def _until_ended(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._service.engine.start()
        try:
            await self.serve(sockets=[self.socket])
        finally:
            await self._service.sessions.shut_down(0.0 if self.force_exit else self._grace)
            self._service.engine.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._ending:
            self.should_exit = self.force_exit = True
            logging.getLogger("uvicorn.error").disabled = True  # what is cut off now is no fault
            return
        self._ending = True
        assert self._loop
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        await self._service.sessions.shut_down(self._grace)
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends at once (no delay) if it says TCP
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(512)
    except OSError as error:
        sock.close()
        error.filename = f"{host}:{port}"
        raise
    sock.setblocking(False)
    return sock
