"""Routes of sessions: one text each, read and written over many calls."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from transformer_xl.reading.rows import whole_characters
from transformer_xl.server.dependencies import ERRORS, EVENTS, Opened, Owner, Serving
from transformer_xl.server.engine import require_free
from transformer_xl.server.jobs import Job, Progress, RefusalError
from transformer_xl.server.service import Service
from transformer_xl.server.sessions import Session, Store
from transformer_xl.server.streaming import EventStream, decoded, last, unless_gone
from transformer_xl.server.text_routes import (
    CompletionAnswer,
    ScoredToken,
    answer,
    scored_token,
    session_job,
    some_ids,
)
from transformer_xl.server.wire import (
    AppendRequest,
    AskRequest,
    GenerateRequest,
    Listed,
    Reply,
    RewindRequest,
    SaveRequest,
    SessionAnswer,
    SessionRequest,
    SessionSource,
)

router = APIRouter(responses=ERRORS)
_PATH = "/v1/sessions/{session_id}"


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


@router.post("/v1/sessions", status_code=201)
async def create(service: Serving, owner: Owner, body: SessionRequest) -> SessionAnswer:
    """Begin a session."""
    return service.describe(await service.create(owner, ttl=body.ttl, seed=body.seed, source=body.from_))


@router.get("/v1/sessions")
async def list_sessions(service: Serving, owner: Owner) -> Listed[SessionAnswer]:
    """Return all sessions of the key."""
    found = await asyncio.to_thread(service.described_files, owner)
    live = [each for each in service.sessions.live.values() if each.owner == owner and not each.is_gone]
    found |= {each.id: service.describe(each) for each in live}
    return Listed(data=sorted(found.values(), key=lambda each: each.created))


@router.get(_PATH)
async def get_session(service: Serving, owner: Owner, session_id: str) -> SessionAnswer:
    """Return a session; what is only a file is not loaded for this."""
    session, path = service.sessions.find(owner, session_id), service.sessions.file_of(owner, session_id)
    if session is None and path is not None and (note := await asyncio.to_thread(Store.note, path)) is not None:
        return service.described_file(path, note)
    return service.describe(await service.open(owner, session_id))


@router.get(_PATH + "/tail")
async def tail(service: Serving, session: Opened) -> Tail:
    """Return the end of the text: what it was is not kept, but for its last tokens."""
    n_tokens, ids = await service.end_of(session)
    return Tail(n_tokens=n_tokens, tokens=ids, text=whole_characters(service.tokenizer.decode(ids)))


@router.delete(_PATH, status_code=204)
async def delete(service: Serving, owner: Owner, session_id: str) -> None:
    """End a session, and delete its file."""
    await service.delete(owner, session_id)


@router.delete(_PATH + "/run")
async def stop(service: Serving, session: Opened) -> SessionAnswer:
    """Stop the call that reads or writes in a session."""
    if ticket := session.busy:
        service.engine.cancel(ticket, "stopped")
    while ticket and session.busy is ticket:
        await asyncio.sleep(0.005)
    return service.describe(session)


_APPENDED = {"application/json": {"schema": AppendRequest.model_json_schema()}, "text/plain": {"schema": {"type": "string"}}}


@router.post(
    _PATH + "/append",
    response_model=Appended,
    responses=EVENTS,
    openapi_extra={"requestBody": {"required": True, "content": _APPENDED}},
)
async def append(
    request: Request,
    service: Serving,
    session: Opened,
    at: Annotated[int | None, Query(ge=0, description="of a streamed text")] = None,
    score: Annotated[Literal["no", "sum"], Query(description="of a streamed text")] = "no",
) -> Response:
    """Read on: a text or tokens in JSON, or a text of any length as it comes."""
    streams = "text/event-stream" in request.headers.get("accept", "")
    is_text = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/plain"
    if unknown := request.query_params.keys() - ({"at", "score"} if is_text else set()):
        message = "in the address, at and score go with text/plain; give them in the body of JSON"
        raise RefusalError(400, f"{min(unknown)[:40]}: {message}", code="invalid_request")
    if is_text:
        _require_at(session, at)
        is_read = asyncio.Event()
        pieces = _pieces(service, decoded(request.stream(), is_read))
        events = _appended(service, session, pieces, score=score)
        return EventStream(events, is_read=is_read) if streams else JSONResponse(await last(events))
    body = AppendRequest.model_validate_json(await request.body())
    _require_at(session, body.at)
    ids = await some_ids(service, body, "append")

    async def once() -> AsyncGenerator[np.ndarray, None]:
        yield ids

    events = _appended(service, session, once(), score=body.score, total=len(ids), timeout=body.timeout)
    return EventStream(events) if streams else JSONResponse(await unless_gone(request.receive, last(events)))


async def _pieces(service: Service, texts: AsyncGenerator[str, None]) -> AsyncGenerator[np.ndarray, None]:
    """Yield the tokens of a text, as many at a time as the decoder reads together, in whatever parts the text comes."""
    length, left = service.engine.decoder.tgt_len, np.empty(0, np.int64)
    async for text in texts:
        left = np.concatenate([left, await service.encode(text)])
        whole = len(left) // length * length
        if whole:
            yield left[:whole]
            left = left[whole:]
    if len(left):
        yield left


async def _appended(
    service: Service,
    session: Session,
    pieces: AsyncGenerator[np.ndarray, None],
    *,
    score: str,
    total: int | None = None,
    timeout: float = 600.0,
) -> AsyncGenerator[dict[str, Any] | None, None]:
    """Read the pieces of a text one after another, and yield how far it is; at last the session and its score."""
    n_read, nats, n_scored, tokens = 0, 0.0, 0, list[dict[str, Any]]()
    begin, at = asyncio.get_running_loop().time(), session.text.n_tokens
    async for ids in pieces:
        _require_at(session, at + n_read)  # between two pieces, another call may have come
        job = Job(owner=session.owner, prompt=ids, session=session, score=score != "no", timeout=timeout)
        async with aclosing(service.run(job)) as answers:
            async for each in answers:
                if each is None:
                    yield None
                if not isinstance(each, Progress):
                    continue
                n_read += each.n
                known = [chosen.log_probability for chosen in each.scored if chosen.log_probability is not None]
                nats, n_scored = nats - sum(known), n_scored + len(known)
                if score == "tokens":
                    tokens += [scored_token(service.tokenizer, chosen).model_dump() for chosen in each.scored]
                seconds = max(asyncio.get_running_loop().time() - begin, 1e-6)
                event: dict[str, Any] = {"processed": n_read, "tokens_per_second": round(n_read / seconds, 1)}
                event |= {"n_tokens": session.text.n_tokens} | ({} if total is None else {"total": total})
                yield event | ({"nats": nats, "scored": n_scored} if score != "no" else {})
    end: dict[str, Any] = {"session": service.describe(session).model_dump(), "n_read": n_read}
    if score != "no":
        end |= {"nats": nats, "scored": n_scored} | ({"tokens": tokens} if score == "tokens" else {})
    yield end


@router.post(_PATH + "/generate", response_model=CompletionAnswer, responses=EVENTS)
async def generate(request: Request, service: Serving, session: Opened, body: GenerateRequest) -> Response:
    """Write on; the session remembers what it wrote."""
    _require_at(session, body.at)
    return await answer(request, service, body, *session_job(service, session, body, np.empty(0, np.int64)))


@router.post(_PATH + "/ask", response_model=CompletionAnswer, responses=EVENTS)
async def ask(request: Request, service: Serving, session: Opened, body: AskRequest) -> Response:
    """Read and write on copies, which are dropped."""
    prompt = await service.encode(body.text if body.tokens is None else body.tokens)
    return await answer(request, service, body, *session_job(service, session, body, prompt, forks=True, n=body.n))


@router.post(_PATH + "/fork", status_code=201)
async def fork(service: Serving, owner: Owner, session_id: str) -> SessionAnswer:
    """Begin a session as a copy of another one."""
    return service.describe(await service.create(owner, source=SessionSource(session=session_id)))


@router.post(_PATH + "/rewind")
async def rewind(service: Serving, session: Opened, body: RewindRequest) -> SessionAnswer:
    """Go back by some tokens."""
    _require_at(session, body.at)
    await service.rewind(session, body.n)
    return service.describe(session)


@router.post(_PATH + "/save")
async def save(service: Serving, session: Opened, body: SaveRequest | None = None) -> Saved:
    """Write a session to its file, or to one by a name."""
    name = body.name if body else None
    n_tokens = await service.save(session, name=name)
    return Saved(name=name, n_tokens=n_tokens, session=service.describe(session))


@router.get("/v1/saved")
async def list_saved(service: Serving, owner: Owner) -> Listed[SavedName]:
    """Return what is saved by a name."""
    store = service.sessions.store
    notes = await asyncio.to_thread(lambda: list(store.notes(owner, saved=True)) if store else [])
    return Listed(data=[SavedName(name=note.get("name"), n_tokens=int(note.get("tokens", "0"))) for _, note in notes])


@router.delete("/v1/saved/{name}", status_code=204)
async def delete_saved(service: Serving, owner: Owner, name: str) -> None:
    """Delete what was saved by a name."""
    await asyncio.to_thread(service.delete_saved, owner, name)


def _require_at(session: Session, at: int | None) -> None:
    """Refuse a call that was meant for another place of the text, such as one that is repeated."""
    require_free(session)
    if at is not None and at != session.text.n_tokens:
        message = f"the session has {session.text.n_tokens} tokens, not {at} (at); go on from there"
        raise RefusalError(409, message, code="moved", extra={"n_tokens": session.text.n_tokens})
