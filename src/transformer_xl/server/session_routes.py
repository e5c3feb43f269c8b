"""Routes of sessions: one text each, read and written over many calls."""

import asyncio
import time
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from transformer_xl.errors import counted
from transformer_xl.generation.draft import Read
from transformer_xl.generation.session import TextState
from transformer_xl.reading.rows import whole_characters
from transformer_xl.server.completions import CompletionAnswer, session_texts
from transformer_xl.server.jobs import LONGEST_SECONDS, Job, RefusalError, Session
from transformer_xl.server.service import ERRORS, EVENTS, OpenedSession, Owner, Service, Serving
from transformer_xl.server.streaming import Events, event_stream, last, unless_gone
from transformer_xl.server.wire import (
    Body,
    CompletionFields,
    Listed,
    MaxTokens,
    Place,
    Reply,
    ScoredToken,
    Seed,
    SessionId,
    Several,
    TextFields,
    Timeout,
)

router = APIRouter(responses=ERRORS)
_PATH = "/v1/sessions/{session_id}"
Where = Literal["row", "parked", "disk", "elsewhere"]


class SessionAnswer(Reply):
    """A session: what it has read, where it lies, and what it costs."""

    id: str
    object: Literal["session"] = "session"
    created: int
    expires_at: int | None
    model: str
    n_tokens: int
    mem_len: int
    n_remembered: int
    bytes: int
    state: Where
    busy: bool
    saved_at: int | None
    n_rewindable: int


class SessionSource(Body):
    """What a session begins with."""

    session: SessionId | None = None
    saved: SessionId | None = None

    @model_validator(mode="after")
    def _one(self) -> "SessionSource":
        if (self.session is None) == (self.saved is None):
            raise ValueError("from needs either a session or a saved name")
        return self


class SessionRequest(Body):
    """`POST /v1/sessions`."""

    ttl: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None
    seed: Seed | None = None
    from_: SessionSource | None = Field(default=None, alias="from")


class AppendRequest(TextFields):
    """`POST /v1/sessions/{id}/append`."""

    at: Place | None = None
    score: Literal["no", "sum", "tokens"] = "no"
    timeout: Timeout = LONGEST_SECONDS


class GenerateRequest(CompletionFields):
    """`POST /v1/sessions/{id}/generate`."""

    max_tokens: MaxTokens = 16
    at: Place | None = None


class AskRequest(TextFields, CompletionFields):
    """`POST /v1/sessions/{id}/ask`."""

    max_tokens: MaxTokens = 16
    n: Several = 1


class RewindRequest(Body):
    """`POST /v1/sessions/{id}/rewind`."""

    n: Annotated[int, Field(ge=1, strict=True)]
    at: Place | None = None


class SaveRequest(Body):
    """`POST /v1/sessions/{id}/save`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None


class Tail(Reply):
    """The last tokens of a session."""

    n_tokens: int
    tokens: list[int]
    text: str


class Appended(Reply):
    """What was read; what is scored is told only where it was asked for."""

    session: SessionAnswer
    n_read: int
    nats: float | None = None
    scored: int | None = None
    tokens: list[ScoredToken] | None = None


class SavedName(Reply):
    """A text saved by a name."""

    object: Literal["saved"] = "saved"
    name: str | None
    n_tokens: int


class Saved(SavedName):
    """A session that was saved, by a name or by none."""

    session: SessionAnswer


def _described(service: Service, session: Session, state: Where | None = None) -> SessionAnswer:
    """Return what clients are told of a session; `state` of one that is only a file."""
    n_tokens, mem_len = session.text.n_tokens, service.engine.decoder.mem_len
    return SessionAnswer(
        id=session.id,
        created=int(session.created),
        expires_at=None if session.expires_at is None else int(session.expires_at),
        model=service.model.id,
        n_tokens=n_tokens,
        mem_len=mem_len,
        n_remembered=min(n_tokens, mem_len),
        bytes=service.sessions.bytes_each,
        state=state or session.state,
        busy=session.busy is not None,
        saved_at=session.saved_at,
        n_rewindable=session.n_rewindable,
    )


def _described_files(service: Service, owner: str, name: str | None = None) -> list[SessionAnswer]:
    """Return the same of an owner's sessions that are only files, or of the one with that name."""
    sessions, store = service.sessions, service.sessions.store
    if store is None:
        return []
    paths = store.files(owner) if name is None else filter(None, [sessions.file_of(owner, name)])
    found = [(path, store.described(owner, path)) for path in paths if path.stem not in sessions.live]
    return [_described(service, each, "disk" if store.is_free(path) else "elsewhere") for path, each in found if each]


@router.post("/v1/sessions", status_code=201)
async def create(service: Serving, owner: Owner, body: SessionRequest) -> SessionAnswer:
    """Begin a session."""
    source, saved = (body.from_.session, body.from_.saved) if body.from_ else (None, None)
    return _described(service, await service.sessions.create(owner, ttl=body.ttl, seed=body.seed, source=source, saved=saved))


@router.get("/v1/sessions")
async def list_sessions(service: Serving, owner: Owner) -> Listed[SessionAnswer]:
    """Return all sessions of the key."""
    files = await asyncio.to_thread(_described_files, service, owner)
    live = [_described(service, each) for each in service.sessions.live.values() if each.owner == owner and not each.is_gone]
    found = {each.id: each for each in (*files, *live)}  # one may have been opened meanwhile
    return Listed(data=sorted(found.values(), key=lambda each: each.created))


@router.get(_PATH)
async def get_session(service: Serving, owner: Owner, session_id: str) -> SessionAnswer:
    """Return a session; what is only a file is not loaded for this."""
    if service.sessions.find(owner, session_id) is None:
        for told in await asyncio.to_thread(_described_files, service, owner, session_id):
            return told
    return _described(service, await service.sessions.open(owner, session_id))


@router.get(_PATH + "/tail")
async def tail(service: Serving, session: OpenedSession) -> Tail:
    """Return the end of the text: what it was is not kept, but for its last tokens."""
    text = await service.sessions.in_engine(lambda: session.text.copy())  # of one moment
    ids = list(text.tail)
    return Tail(n_tokens=text.n_tokens, tokens=ids, text=whole_characters(service.tokenizer.decode(ids)))


@router.delete(_PATH, status_code=204)
async def delete(service: Serving, owner: Owner, session_id: str) -> None:
    """End a session, and delete its file."""
    await service.sessions.delete(owner, session_id)


@router.delete(_PATH + "/run")
async def stop(service: Serving, session: OpenedSession) -> SessionAnswer:
    """Stop the call that reads or writes in a session."""
    if ticket := session.busy:
        service.engine.cancel(ticket, "stopped")
    while ticket and session.busy is ticket:
        await asyncio.sleep(0.005)
    return _described(service, session)


@router.post(_PATH + "/append", response_model=Appended, responses=EVENTS)
async def append(request: Request, service: Serving, session: OpenedSession, body: AppendRequest) -> Response:
    """Read on; with `Accept: text/event-stream`, say meanwhile how far it is."""
    ids = await service.encode(body.content)
    if not len(ids):
        raise RefusalError(400, "there is nothing to append; give text or tokens", code="invalid_request")
    events = _appended(service, session, body, ids)
    if "text/event-stream" in request.headers.get("accept", ""):
        return await event_stream(request, events)
    return JSONResponse(await unless_gone(request.receive, last(events)))


async def _appended(service: Service, session: Session, body: AppendRequest, ids: np.ndarray) -> Events:
    """Read on, and yield how far it is; at last the session and its score."""
    _require_at(session, body.at)
    n_read, figures, tokens = 0, {"nats": 0.0, "scored": 0} if body.score != "no" else {}, list[ScoredToken]()
    begin = time.monotonic()
    job = Job(owner=session.owner, prompt=ids, session=session, score=body.score != "no", timeout=body.timeout)
    async with aclosing(service.run(job)) as told:
        async for each in told:
            if each is None:
                yield None
            elif isinstance(event := each[1], Read):
                n_read += event.n
                known = [chosen.log_probability for chosen in event.scored if chosen.log_probability is not None]
                if figures:
                    figures = {"nats": figures["nats"] - sum(known), "scored": figures["scored"] + len(known)}
                if body.score == "tokens":
                    tokens += [ScoredToken.of(service.tokenizer, chosen) for chosen in event.scored]
                speed = round(n_read / max(time.monotonic() - begin, 1e-6), 1)
                progress = {"processed": n_read, "tokens_per_second": speed, "n_tokens": session.text.n_tokens}
                yield progress | {"total": len(ids)} | figures
    end: dict[str, Any] = {"session": _described(service, session).model_dump(), "n_read": n_read} | figures
    yield end | ({"tokens": [each.model_dump() for each in tokens]} if body.score == "tokens" else {})


@router.post(_PATH + "/generate", response_model=CompletionAnswer, responses=EVENTS)
async def generate(request: Request, service: Serving, session: OpenedSession, body: GenerateRequest) -> Response:
    """Write on; the session remembers what it wrote."""
    _require_at(session, body.at)
    return await session_texts(service, session, body, np.empty(0, np.int64)).answer(request)


@router.post(_PATH + "/ask", response_model=CompletionAnswer, responses=EVENTS)
async def ask(request: Request, service: Serving, session: OpenedSession, body: AskRequest) -> Response:
    """Read and write on copies, which are dropped."""
    prompt = await service.encode(body.content)
    return await session_texts(service, session, body, prompt, forks=True, n=body.n).answer(request)


@router.post(_PATH + "/fork", status_code=201)
async def fork(service: Serving, owner: Owner, session_id: str) -> SessionAnswer:
    """Begin a session as a copy of another one."""
    return _described(service, await service.sessions.create(owner, source=session_id))


@router.post(_PATH + "/rewind")
async def rewind(service: Serving, session: OpenedSession, body: RewindRequest) -> SessionAnswer:
    """Go back by some tokens."""
    _require_at(session, body.at)
    await service.sessions.rewind(session, body.n)
    return _described(service, session)


@router.post(_PATH + "/save")
async def save(service: Serving, session: OpenedSession, body: SaveRequest | None = None) -> Saved:
    """Write a session to its file, or to one by a name."""
    name = body.name if body else None
    n_tokens = await service.sessions.save(session, name=name)
    return Saved(name=name, n_tokens=n_tokens, session=_described(service, session))


@router.get("/v1/saved")
async def list_saved(service: Serving, owner: Owner) -> Listed[SavedName]:
    """Return what is saved by a name."""
    store = service.sessions.store
    notes = await asyncio.to_thread(lambda: list(map(store.note, store.files(owner, saved=True))) if store else [])
    return Listed(data=[SavedName(name=note.get("name"), n_tokens=TextState.of_note(note).n_tokens) for note in notes if note])


@router.delete("/v1/saved/{name}", status_code=204)
async def delete_saved(service: Serving, owner: Owner, name: str) -> None:
    """Delete what was saved by a name."""
    await asyncio.to_thread(service.sessions.delete_saved, owner, name)


def _require_at(session: Session, at: int | None) -> None:
    """Refuse a call that was meant for another place of the text, such as one that is repeated."""
    session.require_free()
    if at is not None and at != session.text.n_tokens:
        message = f"the session has {counted(session.text.n_tokens, 'token')}, not {at} (at); go on from there"
        raise RefusalError(409, message, code="moved", extra={"n_tokens": session.text.n_tokens})
