"""What every request passes before any route sees it: host, origin, key, type and size and speed of its body."""

import asyncio
import hashlib
import hmac
import stat
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse

from transformer_xl.errors import ConfigError, one_line
from transformer_xl.server.jobs import RefusalError
from transformer_xl.server.metrics import Metrics
from transformer_xl.server.wire import MOST_BODY_BYTES

OPEN = frozenset({"/healthz", "/readyz", "/", "/page.css", "/page.js", "/icon.svg"})
"""Paths that need no key: they hold no data."""

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})

LOCAL_OWNER = hashlib.sha256(b"").hexdigest()
"""Who owns sessions where no keys are asked for."""

_TOO_LARGE = f"a body has at most {MOST_BODY_BYTES:,} bytes; append longer texts in parts"
_BODY_SECONDS = 30.0
_LEAST_KEY = 16


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the SHA-256 of each key of a file, a line each; lines that begin with # are remarks."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"--api-key-file '{path}' can be read by others; chmod 600 '{path}'")
    text = path.read_text(encoding="utf-8-sig", errors="replace")  # some editors begin a file with a mark
    keys = [key for line in text.splitlines() if (key := line.strip()) and not key.startswith("#")]
    if not keys or any(len(key) < _LEAST_KEY for key in keys):
        what = f"a key of fewer than {_LEAST_KEY} characters" if keys else "no key"
        raise ConfigError(f"--api-key-file '{path}' holds {what}; write a long random one on each line")
    return tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)


class Guard:
    """An ASGI application around another one.

    Args:
        app: what is guarded.
        keys: SHA-256 of each key; empty: none is asked for, and only names of this machine are served.
        origins: foreign web pages that may send requests.
        metrics: counts requests.
        hosts: names besides those of this machine by which it may be called where no key is asked for.
    """

    def __init__(
        self,
        app: Any,
        *,
        keys: Collection[str],
        origins: Collection[str],
        metrics: Metrics,
        hosts: Collection[str] = (),
    ) -> None:
        self._app, self._keys, self._origins, self._metrics = app, tuple(keys), frozenset(origins), metrics
        self._hosts = LOOPBACK | set(hosts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":  # the server begins or ends
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 0
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        scope.setdefault("state", {})
        try:
            scope["state"]["owner"] = self._owner(scope, headers)
            await self._app(scope, self._limited(scope, headers, receive), answer)
        except RefusalError as refusal:
            if status == 0:
                await refused(refusal)(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            owner = scope["state"].get("owner", "")[:8]
            self._metrics.answered(route, status, time.perf_counter() - begin, owner=owner)

    def _owner(self, scope: Any, headers: dict[str, str]) -> str:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._keys:
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
            if name.lower() not in self._hosts:
                raise RefusalError(403, "this server answers to names of its own machine only", code="bad_host")
        is_foreign = origin not in (None, f"http://{host}", f"https://{host}", *self._origins)
        if is_foreign and scope["method"] not in ("GET", "HEAD"):
            raise RefusalError(403, "requests from foreign web pages are refused; --cors-origin allows some", code="bad_origin")
        if scope["path"] in OPEN or not self._keys:
            return LOCAL_OWNER
        kind, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(key.encode("latin-1", "replace")).hexdigest()
        matches = [hmac.compare_digest(digest, each) for each in self._keys]  # all of them, whichever it is
        if not any(matches):
            raise RefusalError(401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        return digest

    def _limited(self, scope: Any, headers: dict[str, str], receive: Any) -> Any:
        """Return a `receive` that refuses bodies of another type, too large, or too slow."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        length = headers.get("content-length", "0" if "transfer-encoding" not in headers else "1")
        has_body = length != "0" and scope["method"] == "POST"
        if has_body and kind != "application/json":
            shown = kind[:40] or "none"
            raise RefusalError(415, f"content type '{shown}' must be application/json", code="bad_type")
        if length.isdecimal() and int(length[:20]) > MOST_BODY_BYTES:
            raise RefusalError(413, _TOO_LARGE, code="too_large")

        waited, n_byte, is_over = 0.0, 0, False  # seconds: only those that the client takes

        async def limited() -> Any:
            nonlocal waited, n_byte, is_over
            if is_over:
                return await receive()
            begin = time.monotonic()
            try:
                async with asyncio.timeout(max(_BODY_SECONDS - waited, 0.001)):
                    message = await receive()
            except TimeoutError:
                raise RefusalError(408, "the body comes too slowly; send it again", code="too_slow") from None
            waited += time.monotonic() - begin
            n_byte += len(message.get("body", b""))
            is_over = message["type"] != "http.request" or not message.get("more_body", False)
            if n_byte > MOST_BODY_BYTES:
                raise RefusalError(413, _TOO_LARGE, code="too_large")
            return message

        return limited


def error_body(refusal: RefusalError) -> dict[str, Any]:
    """Return the body of an error, as OpenAI's clients read it."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": one_line(refusal), "type": kind, "code": refusal.code, **refusal.extra}}


def refused(refusal: RefusalError) -> JSONResponse:
    """Return the answer of an error."""
    headers = {}
    if refusal.retry_after is not None:
        headers["retry-after"] = str(refusal.retry_after)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refusal.status in (409, 501, 504):  # the same call would be refused again, or take as long again
        headers["x-should-retry"] = "false"
    if owner := refusal.extra.get("owner"):
        headers["x-txl-owner"] = str(owner)
    if refusal.status in (408, 413):
        headers["connection"] = "close"
    return JSONResponse(error_body(refusal), refusal.status, headers)


def check_address(host: str, keys: Collection[str]) -> None:
    """Refuse to listen for other machines without keys."""
    if host not in ("127.0.0.1", "localhost", "::1") and not keys:
        raise ConfigError(f"--host {host} lets other machines in; give --api-key-file FILE, or leave --host out")
