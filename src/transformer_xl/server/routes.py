"""The routes: a request becomes jobs on a session or on none, and their answers become JSON or a stream of events."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from importlib import resources
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from transformer_xl.generation.requests import Chosen, fresh_seed
from transformer_xl.server.completions import Chat, Completion
from transformer_xl.server.engine import require_free
from transformer_xl.server.jobs import Job, Progress, RefusalError
from transformer_xl.server.service import Service
from transformer_xl.server.sessions import Session, Store
from transformer_xl.server.streaming import EventStream, decoded, last, unless_gone
from transformer_xl.server.wire import (
    CHAT_STOPS,
    AppendRequest,
    AskRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    RewindRequest,
    SaveRequest,
    ScoreRequest,
    SessionRequest,
    Source,
    TokenizeRequest,
    WritingFields,
    ids_of,
    seeds_of,
    token_text,
)
from transformer_xl.surprisal import whole_characters

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_PAGE = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
_ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    b'<path d="M2 4h12M2 8h9M2 12h12" stroke="#0b5cad" stroke-width="2"/></svg>'
)


def make_routes(service: Service) -> APIRouter:
    """Return the routes of a service."""
    router = APIRouter()
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
        require_model(body.model)
        ids = (await encode(body.content if body.prompt is None else body.prompt)).tolist()
        if not body.with_pieces:
            return {"tokens": ids, "count": len(ids)}
        return {"tokens": [{"id": token, "piece": _piece(tokenizer.piece(token))} for token in ids], "count": len(ids)}

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        text = tokenizer.decode((await encode(body.tokens)).tolist())
        return {"content": whole_characters(text), "prompt": whole_characters(text)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return {"tokenizer_class": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "eos_token": None, "bos_token": None}

    # completions

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        require_model(body.model)
        owner = owner_of(request)
        if body.session_id is not None:
            session = await service.open(owner, body.session_id)
            job, seed = session_job(owner, session, body, await encode(body.prompts()[0]))
            return await answer(request, body, Completion(service, body, [job]), seed)
        seed = fresh_seed() if body.seed is None else body.seed
        jobs, echoes = [], []
        for place, prompt in enumerate(body.prompts()):
            ids = await encode(prompt)
            if not len(ids):
                raise RefusalError(400, "the prompt is empty; give at least one token", code="invalid_request")
            _, seeds = seeds_of(seed, place, body.n)
            writing = body.writing(seeds, vocab_size=tokenizer.vocab_size) if body.max_tokens else None
            scores = body.echo and body.likeliest is not None
            jobs.append(
                Job(owner=owner, prompt=ids, writing=writing, score=scores, likeliest=body.likeliest, timeout=body.timeout)
            )
            if body.echo:
                echoes.append(prompt if isinstance(prompt, str) else whole_characters(tokenizer.decode(prompt)))
        return await answer(request, body, Completion(service, body, jobs, echoes), seed)

    async def chat(request: Request, body: ChatRequest) -> Response:
        require_model(body.model)
        seed, seeds = seeds_of(body.seed, 0, body.n)
        writing = body.writing(seeds, vocab_size=tokenizer.vocab_size, stops=CHAT_STOPS)
        prompt = await encode(body.prompt())
        job = Job(owner=owner_of(request), prompt=prompt, writing=writing, likeliest=body.likeliest, timeout=body.timeout)
        return await answer(request, body, Chat(service, body, [job]), seed)

    async def no_chat() -> Response:
        message = "this is a base model without turns; use /v1/completions with the whole text as prompt"
        raise RefusalError(501, f"{message}, or start the server with --chat-template plain", code="not_supported")

    router.add_api_route("/v1/chat/completions", chat if service.chats else no_chat, methods=["POST"])

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
            likeliest=body.likeliest,
            timeout=body.timeout,
        )
        return job, seed

    async def answer(request: Request, body: WritingFields, made: Completion, seed: int) -> Response:
        """Answer with the texts of jobs, whole or as they come."""
        about = {
            "id": f"{made.prefix}-{fresh_seed():08x}{fresh_seed():08x}",
            "created": int(time.time()),
            "model": service.model,
            "system_fingerprint": service.fingerprint(seed) + ("-chat-plain" if isinstance(made, Chat) else ""),
        }
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
        n_tokens, ids = await service.end_of(session)
        return {"n_tokens": n_tokens, "tokens": ids, "text": whole_characters(tokenizer.decode(ids))}

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
        if unknown := request.query_params.keys() - ({"at", "score"} if kind == "text/plain" else set()):
            message = "in the address, at and score go with text/plain; give them in the body of JSON"
            raise RefusalError(400, f"{min(unknown)[:40]}: {message}", code="invalid_request")
        if kind == "text/plain":
            at, score = request.query_params.get("at"), request.query_params.get("score", "no")
            if score not in ("no", "sum") or not (at is None or (at.isdecimal() and len(at) < 19)):
                raise RefusalError(400, "at must be a number, and score of a streamed text no or sum", code="invalid_request")
            _require_at(session, None if at is None else int(at))
            is_read = asyncio.Event()
            events = appended(session, decoded(request.stream(), is_read), score=score)
            if streams:
                return EventStream(events, is_read=is_read)
            return JSONResponse(await last(events))
        body = AppendRequest.model_validate_json(await request.body())
        _require_at(session, body.at)
        ids = await encode(body.text if body.tokens is None else body.tokens)
        if not len(ids):
            raise RefusalError(400, "there is nothing to append; give text or tokens", code="invalid_request")

        async def once() -> AsyncGenerator[np.ndarray, None]:
            yield ids

        events = appended(session, once(), score=body.score, total=len(ids), timeout=body.timeout)
        return EventStream(events) if streams else JSONResponse(await unless_gone(request, last(events)))

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
        return await answer(request, body, Completion(service, body, [job]), seed)

    @router.post("/v1/sessions/{session_id}/ask")
    async def ask(request: Request, session_id: str, body: AskRequest) -> Response:
        owner = owner_of(request)
        session = await service.open(owner, session_id)
        prompt = await encode(body.text if body.tokens is None else body.tokens)
        job, seed = session_job(owner, session, body, prompt, forks=True, n=body.n)
        return await answer(request, body, Completion(service, body, [job]), seed)

    @router.post("/v1/sessions/{session_id}/fork", status_code=201)
    async def fork(request: Request, session_id: str) -> dict[str, Any]:
        return service.describe(await service.create(owner_of(request), source=Source(session=session_id)))

    @router.post("/v1/sessions/{session_id}/rewind")
    async def rewind(request: Request, session_id: str, body: RewindRequest) -> dict[str, Any]:
        session = await service.open(owner_of(request), session_id)
        _require_at(session, body.at)
        await service.rewind(session, body.n)
        return service.describe(session)

    @router.post("/v1/sessions/{session_id}/save")
    async def save(request: Request, session_id: str, body: SaveRequest | None = None) -> dict[str, Any]:
        session, name = await service.open(owner_of(request), session_id), body.name if body else None
        n_tokens = await service.save(session, name=name)
        return {"object": "saved", "name": name, "n_tokens": n_tokens, "session": service.describe(session)}

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


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
