"""The routes: a request becomes jobs on a session or on none, and their answers become JSON or a stream of events."""

import asyncio
import codecs
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from importlib import resources
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from transformer_xl.generation.requests import Chosen, fresh_seed
from transformer_xl.server.engine import require_free
from transformer_xl.server.guard import headers_of
from transformer_xl.server.jobs import End, Job, Piece, Progress, RefusalError
from transformer_xl.server.service import Service
from transformer_xl.server.sessions import Session, Store
from transformer_xl.server.wire import (
    AppendRequest,
    AskRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    Logprobs,
    RewindRequest,
    SaveRequest,
    ScoreRequest,
    SessionRequest,
    Source,
    TokenizeRequest,
    WritingFields,
    error_body,
    ids_of,
    seeds_of,
    token_text,
)

T = TypeVar("T")

_BLOCK = 1 << 14
"""Characters of a streamed text that are encoded together; they end at a space or line end where there is one."""

_SERVER_ERRORS = (408, 409, 413, 415, 429, 500, 503, 504, 507)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": "an error", "content": {"application/json": {}}} for status in (400, 401, 403, 404, *_SERVER_ERRORS)
}

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_PAGE = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
_ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    b'<path d="M2 4h12M2 8h9M2 12h12" stroke="#0b5cad" stroke-width="2"/></svg>'
)


class EventStream(Response):
    """Server-sent events, ended as soon as the client has gone.

    Args:
        events: what is sent; each is a body of JSON, or None for a sign of life. A `RefusalError` becomes an event.
        done: the last line, as OpenAI's streams have it; empty: none.
        is_read: set when the body has been read, by the same channel as word that the client has gone. None: it has been.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[dict[str, Any] | None, None], *, done: str = "", is_read: asyncio.Event | None = None
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._done, self._is_read = events, done, is_read

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive, self._is_read))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled() and (error := sending.exception()):
            raise error

    async def _send(self, send: Any) -> None:
        events = aiter(self._events)
        async with aclosing(self._events):
            try:
                first = await anext(events, None)  # what is refused at once gets its own status
            except RefusalError as refusal:
                await JSONResponse(error_body(refusal), refusal.status, headers_of(refusal))({}, None, send)  # pyright: ignore
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(self._chunk(first))
            try:
                async for event in events:
                    await send(self._chunk(event))
            except RefusalError as refusal:
                await send(self._chunk(error_body(refusal)))
            else:
                if self._done:
                    await send(self._body(f"data: {self._done}\n\n"))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunk(self, event: dict[str, Any] | None) -> dict[str, Any]:
        return self._body(": still here\n\n" if event is None else f"data: {json.dumps(event)}\n\n")

    @staticmethod
    def _body(text: str) -> dict[str, Any]:
        return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def _gone(receive: Any, is_read: asyncio.Event | None = None) -> None:
    if is_read:
        await is_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what work gives; end it when the client goes.

    Raises:
        RefusalError: the client has gone.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RefusalError(499, "the client has gone", code="gone")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def make_routes(service: Service) -> APIRouter:
    """Return the routes of a service."""
    router = APIRouter(responses=_ERRORS)
    tokenizer, sessions = service.tokenizer, service.sessions

    def owner_of(request: Request) -> str:
        return request.scope["state"]["owner"]

    async def encode(text: str | list[int] | None) -> np.ndarray:
        return await asyncio.to_thread(ids_of, tokenizer, text or "")

    def require_model(name: str | None) -> None:
        if name not in (None, service.model):
            message = f"the model '{name[:100]}' does not exist; this server has '{service.model}'"
            raise RefusalError(404, message, code="model_not_found")

    # about

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        ready = service.engine.is_healthy and not service.engine.is_draining
        return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        require_model(name)
        return model()

    def model() -> dict[str, Any]:
        own = {"id": service.model, "object": "model", "created": service.began, "owned_by": "transformer_xl"}
        return own | {"meta": service.details}

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        ids = (await encode(body.content if body.prompt is None else body.prompt)).tolist()
        if not body.with_pieces:
            return {"tokens": ids, "count": len(ids)}
        return {"tokens": [{"id": token, "piece": _piece(tokenizer.piece(token))} for token in ids], "count": len(ids)}

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        text = tokenizer.decode((await encode(body.tokens)).tolist())
        return {"content": _printable(text), "prompt": _printable(text)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return {"tokenizer_class": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "eos_token": None, "bos_token": None}

    @router.post("/v1/chat/completions")
    async def chat() -> Response:
        message = "this is a base model without turns; use /v1/completions with the whole text as prompt"
        refusal = RefusalError(501, message, code="not_supported")
        return JSONResponse(error_body(refusal), refusal.status)

    # completions

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        require_model(body.model)
        owner = owner_of(request)
        if body.session_id is not None:
            session = await service.open(owner, body.session_id)
            job, seed = session_job(owner, session, body, await encode(body.prompts()[0]))  # type: ignore[arg-type]
            return await answer(request, body, [job], seed)
        seed = fresh_seed() if body.seed is None else body.seed
        jobs, echoes = [], []
        for place, prompt in enumerate(body.prompts()):
            ids = await encode(prompt)
            if not len(ids):
                raise RefusalError(400, "the prompt is empty; give at least one token", code="invalid_request")
            _, seeds = seeds_of(seed, place, body.n)
            writing = body.writing(seeds, vocab_size=tokenizer.vocab_size) if body.max_tokens else None
            scores = body.echo and body.logprobs is not None
            jobs.append(
                Job(owner=owner, prompt=ids, writing=writing, score=scores, likeliest=body.logprobs, timeout=body.timeout)
            )
            if body.echo:
                echoes.append(prompt if isinstance(prompt, str) else _printable(tokenizer.decode(prompt)))
        return await answer(request, body, jobs, seed, echoes)

    def session_job(
        owner: str, session: Session, body: WritingFields, prompt: np.ndarray, *, forks: bool = False, n: int = 1
    ) -> tuple[Job, int]:
        """Return the job of writing after what a session has read, and its seed."""
        if not (len(prompt) or session.text.n_tokens):
            raise RefusalError(400, "the session has read nothing; append a text, or give one", code="empty")
        if body.max_tokens == 0:
            raise RefusalError(400, "max_tokens (0) must be at least 1; append reads without writing", code="invalid_request")
        keeps = body.seed is None and not forks
        seed, seeds = seeds_of(body.seed, 0, n)
        if keeps and session.text.random is not None:
            seed = session.text.random[0]
        writing = body.writing(seeds, vocab_size=tokenizer.vocab_size, keeps_drawing=keeps)
        job = Job(
            owner=owner,
            prompt=prompt,
            writing=writing,
            session=session,
            forks=forks,
            likeliest=body.logprobs,
            timeout=body.timeout,
        )
        return job, seed

    async def answer(
        request: Request, body: WritingFields, jobs: list[Job], seed: int, echoes: list[str] | None = None
    ) -> Response:
        """Answer with the texts of jobs, whole or as they come."""
        about = {
            "id": f"cmpl-{fresh_seed():08x}{fresh_seed():08x}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
            "system_fingerprint": service.fingerprint(seed),
        }
        made = _Completion(service, body, jobs, echoes)
        if body.stream:
            return EventStream(made.chunks(about), done="[DONE]")
        return JSONResponse(about | await unless_gone(request, made.whole()))

    # sessions

    @router.post("/v1/sessions", status_code=201)
    async def create(request: Request, body: SessionRequest) -> dict[str, Any]:
        return service.describe(await service.create(owner_of(request), ttl=body.ttl, seed=body.seed, source=body.from_))

    @router.get("/v1/sessions")
    async def list_all(request: Request) -> dict[str, Any]:
        owner = owner_of(request)
        found = {each.id: service.describe(each) for each in sessions.live.values() if each.owner == owner and not each.is_gone}
        if sessions.store:
            for one in await asyncio.to_thread(service.described_files, owner):
                found.setdefault(one["id"], one)
        return {"object": "list", "data": sorted(found.values(), key=lambda each: each["created"])}

    @router.get("/v1/sessions/{session_id}")
    async def get(request: Request, session_id: str) -> dict[str, Any]:
        owner = owner_of(request)
        session, path = sessions.find(owner, session_id), sessions.file_of(owner, session_id)
        if session is None and path is not None and (note := await asyncio.to_thread(Store.note, path)) is not None:
            return service.described_file(path, note)
        return service.describe(await service.open(owner, session_id))

    @router.get("/v1/sessions/{session_id}/tail")
    async def tail(request: Request, session_id: str) -> dict[str, Any]:
        """Return the end of the text: what it was is not kept, but for its last tokens."""
        session = await service.open(owner_of(request), session_id)
        ids = list(session.text.tail)
        return {"n_tokens": session.text.n_tokens, "tokens": ids, "text": _printable(tokenizer.decode(ids))}

    @router.delete("/v1/sessions/{session_id}", status_code=204)
    async def delete(request: Request, session_id: str) -> Response:
        await service.delete(owner_of(request), session_id)
        return Response(status_code=204)

    @router.delete("/v1/sessions/{session_id}/run")
    async def stop(request: Request, session_id: str) -> dict[str, Any]:
        session = await service.open(owner_of(request), session_id)
        if ticket := session.busy:
            service.engine.cancel(ticket, "stopped")
        while ticket and session.busy is ticket:
            await asyncio.sleep(0.005)
        return service.describe(session)

    @router.post("/v1/sessions/{session_id}/append")
    async def append(request: Request, session_id: str) -> Response:
        session = await service.open(owner_of(request), session_id)
        streams = "text/event-stream" in request.headers.get("accept", "")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/plain":
            at, score = request.query_params.get("at"), request.query_params.get("score", "no")
            if score not in ("no", "sum") or not (at is None or (at.isdecimal() and len(at) < 19)):
                raise RefusalError(400, "at must be a number, and score of a streamed text no or sum", code="invalid_request")
            _require_at(session, None if at is None else int(at))
            is_read = asyncio.Event()
            events = appended(session, _decoded(request.stream(), is_read), score=score)
            if streams:
                return EventStream(events, is_read=is_read)
            return JSONResponse(await _last(events))
        body = AppendRequest.model_validate_json(await request.body())
        _require_at(session, body.at)
        ids = await encode(body.text if body.tokens is None else body.tokens)
        if not len(ids):
            raise RefusalError(400, "there is nothing to append; give text or tokens", code="invalid_request")

        async def once() -> AsyncGenerator[np.ndarray, None]:
            yield ids

        events = appended(session, once(), score=body.score, total=len(ids), timeout=body.timeout)
        return EventStream(events) if streams else JSONResponse(await unless_gone(request, _last(events)))

    async def appended(
        session: Session,
        parts: AsyncGenerator[np.ndarray | str, None],
        *,
        score: str,
        total: int | None = None,
        timeout: float = 600.0,
    ) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Read the parts of a text one after another, and yield how far it is; at last the session and its score.

        Ids are read in pieces that are counted from the beginning, in whatever parts the text comes.
        """
        left, n_read, nats, n_scored, tokens = np.empty(0, np.int64), 0, 0.0, 0, list[dict[str, Any]]()
        length, begin = service.engine.decoder.tgt_len, asyncio.get_running_loop().time()

        async def blocks() -> AsyncGenerator[np.ndarray, None]:
            nonlocal left
            async for part in parts:
                left = np.concatenate([left, await encode(part) if isinstance(part, str) else part])
                whole = len(left) // length * length
                if isinstance(part, str) and whole:
                    yield left[:whole]
                    left = left[whole:]
            if len(left):
                yield left

        at = session.text.n_tokens
        async for ids in blocks():
            _require_at(session, at + n_read)  # between two blocks, another call may have come
            job = Job(owner=session.owner, prompt=ids, session=session, score=score != "no", likeliest=None, timeout=timeout)
            async with aclosing(service.run(job)) as answers:
                async for each in answers:
                    if each is None:
                        yield None
                    if not isinstance(each, Progress):
                        continue
                    n_read += each.n
                    for chosen in each.scored:
                        if chosen.log_probability is not None:
                            nats, n_scored = nats - chosen.log_probability, n_scored + 1
                        if score == "tokens":
                            value = chosen.log_probability
                            tokens.append({"id": chosen.token, "text": token_text(tokenizer, chosen.token), "logprob": value})
                    seconds = max(asyncio.get_running_loop().time() - begin, 1e-6)
                    event: dict[str, Any] = {"processed": n_read, "tokens_per_second": round(n_read / seconds, 1)}
                    event |= {"n_tokens": session.text.n_tokens} | ({} if total is None else {"total": total})
                    yield event | ({"nats": nats, "scored": n_scored} if score != "no" else {})
        end: dict[str, Any] = {"session": service.describe(session), "n_read": n_read}
        if score != "no":
            end |= {"nats": nats, "scored": n_scored} | ({"tokens": tokens} if score == "tokens" else {})
        yield end

    @router.post("/v1/sessions/{session_id}/generate")
    async def generate(request: Request, session_id: str, body: GenerateRequest) -> Response:
        owner = owner_of(request)
        session = await service.open(owner, session_id)
        _require_at(session, body.at)
        job, seed = session_job(owner, session, body, np.empty(0, np.int64))
        return await answer(request, body, [job], seed)

    @router.post("/v1/sessions/{session_id}/ask")
    async def ask(request: Request, session_id: str, body: AskRequest) -> Response:
        owner = owner_of(request)
        session = await service.open(owner, session_id)
        prompt = await encode(body.text if body.tokens is None else body.tokens)
        job, seed = session_job(owner, session, body, prompt, forks=True, n=body.n)
        return await answer(request, body, [job], seed)

    @router.post("/v1/sessions/{session_id}/fork", status_code=201)
    async def fork(request: Request, session_id: str) -> dict[str, Any]:
        owner = owner_of(request)
        other = await service.open(owner, session_id)
        made = await service.create(owner, ttl=other.ttl, seed=None, source=Source(session=session_id))
        return service.describe(made)

    @router.post("/v1/sessions/{session_id}/rewind")
    async def rewind(request: Request, session_id: str, body: RewindRequest) -> dict[str, Any]:
        session = await service.open(owner_of(request), session_id)
        _require_at(session, body.at)
        await service.rewind(session, body.n)
        return service.describe(session)

    @router.post("/v1/sessions/{session_id}/save")
    async def save(request: Request, session_id: str, body: SaveRequest) -> dict[str, Any]:
        session = await service.open(owner_of(request), session_id)
        n_tokens = await service.save(session, name=body.name)
        return {"object": "saved", "name": body.name, "n_tokens": n_tokens, "session": service.describe(session)}

    @router.get("/v1/saved")
    async def saved(request: Request) -> dict[str, Any]:
        owner, store = owner_of(request), sessions.store
        notes = await asyncio.to_thread(lambda: list(store.notes(owner, saved=True)) if store else [])
        data = [{"object": "saved", "name": note.get("name"), "n_tokens": int(note.get("tokens", "0"))} for _, note in notes]
        return {"object": "list", "data": data}

    @router.delete("/v1/saved/{name}", status_code=204)
    async def delete_saved(request: Request, name: str) -> Response:
        await asyncio.to_thread(service.delete_saved, owner_of(request), name)
        return Response(status_code=204)

    # scores

    @router.post("/v1/score")
    async def score(request: Request, body: ScoreRequest) -> Response:
        owner = owner_of(request)
        ids = await encode(body.text if body.tokens is None else body.tokens)
        if not len(ids):
            raise RefusalError(400, "there is nothing to score; give text or tokens", code="invalid_request")
        session = None if body.session_id is None else await service.open(owner, body.session_id)
        return JSONResponse(await unless_gone(request, scores(owner, ids, session, body)))

    async def scores(owner: str, ids: np.ndarray, session: Session | None, body: ScoreRequest) -> dict[str, Any]:
        found: dict[str, Any] = {"object": "score", "model": service.model, "n_tokens": len(ids)}
        for way in ("on", "off") if body.memory == "both" else (body.memory,):
            chosen = await (
                with_memory(owner, ids, session, body.timeout) if way == "on" else without(owner, ids, body.timeout)
            )
            found[way] = _figures(tokenizer, chosen, per_token=body.per_token)
        return found if body.memory == "both" else found | found.pop(body.memory)

    async def scored(job: Job) -> list[Chosen]:
        found: list[Chosen] = []
        async with aclosing(service.run(job)) as answers:
            async for each in answers:
                if isinstance(each, Progress):
                    found += each.scored
        return found

    async def with_memory(owner: str, ids: np.ndarray, session: Session | None, timeout: float) -> list[Chosen]:
        return await scored(Job(owner=owner, prompt=ids, session=session, forks=True, score=True, timeout=timeout))

    async def without(owner: str, ids: np.ndarray, timeout: float) -> list[Chosen]:
        """Score each piece after nothing but the piece before it."""
        length, found = service.engine.decoder.tgt_len, list[Chosen]()
        for begin in range(0, len(ids), length):
            before = max(0, begin - length)
            own = await scored(Job(owner=owner, prompt=ids[before : begin + length], score=True, timeout=timeout))
            found += own[begin - before :]
        return found

    # the page

    for path, (file, kind) in _PAGE.items():
        content = (resources.files("transformer_xl.server") / "page" / file).read_bytes()
        router.add_api_route(path, _static(content, kind), include_in_schema=False)
    router.add_api_route("/icon.svg", _static(_ICON, "image/svg+xml"), include_in_schema=False)
    return router


def _static(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def page() -> Response:
        headers = {"content-security-policy": _CSP, "cache-control": "no-cache"}
        return Response(content, media_type=kind, headers=headers)

    return page


class _Completion:
    """The texts of some jobs, as they come or whole."""

    def __init__(self, service: Service, body: WritingFields, jobs: list[Job], echoes: list[str] | None) -> None:
        self._service, self._body, self._jobs, self._echoes = service, body, jobs, echoes or []
        self._n = [len(job.writing.seeds) if job.writing else 1 for job in jobs]
        self._first = [sum(self._n[:i]) for i in range(len(jobs))]
        self._n_read = self._n_written = 0

    async def whole(self) -> dict[str, Any]:
        """Return the choices and the usage."""
        texts: dict[int, list[str]] = {}
        logs: dict[int, list[dict[str, Any]]] = {}
        reasons: dict[int, str] = {}
        async for choice in self._choices():
            if choice is None:
                continue
            index = choice["index"]
            texts.setdefault(index, []).append(choice["text"])
            if choice["logprobs"]:
                logs.setdefault(index, []).append(choice["logprobs"])
            reasons[index] = choice["finish_reason"] or ""
        choices = [
            {
                "index": index,
                "text": "".join(texts[index]),
                "logprobs": _joined(logs[index]) if index in logs else None,
                "finish_reason": reasons[index],
            }
            for index in sorted(texts)
        ]
        return {"choices": choices, "usage": self._usage()}

    async def chunks(self, about: dict[str, Any]) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yield the bodies of a stream."""
        async for choice in self._choices():
            yield None if choice is None else about | {"choices": [choice]}
        options = self._body.stream_options
        if options and options.include_usage:
            yield about | {"choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        read, written = self._n_read, self._n_written
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    async def _choices(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yield what is new of any text, of as many jobs side by side as there are rows."""
        queue: asyncio.Queue[Any] = asyncio.Queue(64)
        side_by_side = asyncio.Semaphore(self._service.engine.decoder.batch_size)

        async def one(place: int) -> None:
            async with side_by_side, aclosing(self._of_job(place)) as choices:
                async for choice in choices:
                    await queue.put(choice)

        tasks = [asyncio.ensure_future(one(place)) for place in range(len(self._jobs))]
        everything = asyncio.gather(*tasks)
        getting = None
        try:
            while not (everything.done() and queue.empty()):
                getting = asyncio.ensure_future(queue.get())
                await asyncio.wait({getting, everything}, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    yield getting.result()
                    continue
                getting.cancel()
                if not queue.empty():
                    continue
                everything.result()  # raises what went wrong
            everything.result()
        finally:
            for task in (*tasks, *([getting] if getting else [])):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(BaseException):
                everything.exception()

    async def _of_job(self, place: int) -> AsyncGenerator[dict[str, Any] | None, None]:
        job, first = self._jobs[place], self._first[place]
        n = self._body.logprobs
        logs = [None if n is None else Logprobs(self._service.tokenizer, n) for _ in range(self._n[place])]
        scored: list[Chosen] = []
        echoed = not self._echoes

        def echo() -> list[dict[str, Any]]:
            return [
                _choice(first + i, self._echoes[place], log.of(scored) if log and job.score else None)
                for i, log in enumerate(logs)
            ]

        async with aclosing(self._service.run(job)) as answers:
            async for each in answers:
                if each is None:
                    yield None
                elif isinstance(each, Progress):
                    scored += each.scored
                elif isinstance(each, (Piece, End)) and not echoed:
                    echoed = True
                    for choice in echo():
                        yield choice
                if isinstance(each, Piece):
                    log = logs[each.index]
                    yield _choice(first + each.index, _printable(each.text), log.of([each.token], [each.text]) if log else None)
                elif isinstance(each, End):
                    self._n_read += each.n_read
                    self._n_written += each.n_written
                    reason = "stop" if each.reason == "stop" else "length"
                    yield _choice(first + each.index, _printable(each.rest), None, reason)


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _joined(logs: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: [value for log in logs for value in log[name]] for name in logs[0]}


def _figures(tokenizer: Any, chosen: list[Chosen], *, per_token: bool) -> dict[str, Any]:
    """Return the score of tokens; what comes first of all has none."""
    known = [each for each in chosen if each.log_probability is not None]
    nats = -math.fsum(each.log_probability or 0.0 for each in known)
    text = tokenizer.decode([each.token for each in known])
    n_char, n_byte = max(1, len(text)), max(1, len(text.encode("utf-8", "surrogatepass")))
    mean = nats / max(1, len(known))
    figures: dict[str, Any] = {
        "nats": nats,
        "tokens": len(known),
        "bytes": n_byte,
        "ppl": math.exp(min(mean, 700.0)),
        "bpc": nats / math.log(2) / n_char,
        "bpb": nats / math.log(2) / n_byte,
    }
    if per_token:
        figures["per_token"] = [
            {"id": each.token, "text": token_text(tokenizer, each.token), "logprob": each.log_probability} for each in chosen
        ]
    return figures


def _require_at(session: Session, at: int | None) -> None:
    """Refuse a call that was meant for another place of the text, such as one that is repeated."""
    require_free(session)
    if at is not None and at != session.text.n_tokens:
        message = f"the session has {session.text.n_tokens} tokens, not {at} (at); go on from there"
        raise RefusalError(409, message, code="moved", extra={"n_tokens": session.text.n_tokens})


async def _decoded(chunks: AsyncIterator[bytes], is_read: asyncio.Event) -> AsyncGenerator[str, None]:
    """Yield a text in blocks whose borders depend on the text alone.

    Raises:
        RefusalError: it is not UTF-8, or the client has gone.
    """
    decoder, held, n_byte = codecs.getincrementaldecoder("utf-8")(), "", 0
    async for chunk in _until_gone(chunks):
        try:
            held += decoder.decode(chunk)
        except UnicodeDecodeError as error:
            place = n_byte + error.start
            raise RefusalError(400, f"byte {place} or near it is not UTF-8; convert the text first", code="not_utf8") from None
        n_byte += len(chunk)
        while len(held) >= _BLOCK:
            border = max(held.rfind("\n", 0, _BLOCK), held.rfind(" ", 0, _BLOCK)) + 1 or _BLOCK
            yield held[:border]
            held = held[border:]
    is_read.set()
    try:
        held += decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise RefusalError(400, "the text ends inside a character", code="not_utf8") from None
    if held:
        yield held


async def _until_gone(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            yield chunk
    except ClientDisconnect:
        raise RefusalError(499, "the client has gone; what was read is kept", code="gone") from None


async def _last(events: AsyncGenerator[dict[str, Any] | None, None]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    async for event in events:
        last = event or last
    return last


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _printable(text: str) -> str:
    """Return a text that JSON in UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()
