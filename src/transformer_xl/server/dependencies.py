"""What all routes have in common: whose a request is, the session that it names, and what errors and streams look like."""

from typing import Annotated, Any

from fastapi import Depends, Request
from pydantic import BaseModel

from transformer_xl.server.jobs import RefusalError
from transformer_xl.server.service import Service
from transformer_xl.server.sessions import Session
from transformer_xl.server.wire import Reply


class ErrorDetail(BaseModel):
    """What was refused: a line for people, a word for programs, and perhaps numbers."""

    message: str
    type: str
    code: str


class Error(Reply):
    """Any answer of 400 and above."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": Error,
        "description": "400: a field does not fit; 401: a valid key is needed; 403: the origin or the name of the host is not "
        "allowed, or the quota is full; 404: there is no such model, session or name; 408: the body comes too slowly; 409: the "
        "session is elsewhere (`at`), busy, or not what the call needs; 413: the body is too large; 415: it has another "
        "content type; 429: too many requests wait, see Retry-After",
    },
    "5XX": {
        "model": Error,
        "description": "500: a fault of the server; 501: it was started without this; 503: it is starting or ending, has no "
        "room, or another one has the session, see Retry-After; 504: it took longer than `timeout`; 507: the disk is full",
    },
}
"""Answers of every route."""

_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "contentMediaType": "application/json"}},
    "required": ["data"],
}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
"""Answers of routes that send events where they are asked to."""


async def _service(request: Request) -> Service:
    return request.app.state.service


async def _owner(request: Request) -> str:
    return request.scope["state"]["owner"]


Serving = Annotated[Service, Depends(_service)]
Owner = Annotated[str, Depends(_owner)]


async def _opened(service: Serving, owner: Owner, session_id: str) -> Session:
    return await service.open(owner, session_id)


Opened = Annotated[Session, Depends(_opened)]
"""The session in the path, from its file if it is not in memory."""


def require_model(service: Service, name: str | None) -> None:
    """Refuse another model's name."""
    if name not in (None, service.model):
        message = f"the model '{name[:100]}' does not exist; this server has '{service.model}'"
        raise RefusalError(404, message, code="model_not_found")
