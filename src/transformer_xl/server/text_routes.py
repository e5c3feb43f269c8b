"""Routes that read or write texts and keep nothing: completions, chats, scores; and what sessions need of them."""

import math
import time
from contextlib import aclosing
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from transformer_xl.generation.draft import Chosen
from transformer_xl.generation.seeds import fresh_seed
from transformer_xl.reading.rows import whole_characters
from transformer_xl.server.completions import Chat, ChatAnswer, Completion, CompletionAnswer
from transformer_xl.server.dependencies import ERRORS, EVENTS, Owner, Serving, require_model
from transformer_xl.server.jobs import Job, Progress, RefusalError
from transformer_xl.server.service import Service
from transformer_xl.server.sessions import Session
from transformer_xl.server.streaming import EventStream, unless_gone
from transformer_xl.server.wire import (
    CHAT_STOPS,
    ChatRequest,
    CompletionRequest,
    Reply,
    ScoreRequest,
    TextFields,
    WritingFields,
    seeds_of,
    token_text,
)
from transformer_xl.tokenizers.base import Tokenizer

router = APIRouter(responses=ERRORS)


class ScoredToken(Reply):
    """A token and its log-probability; null for the first one of a text."""

    id: int
    text: str
    logprob: float | None


class Figures(Reply):
    """How well a text is predicted."""

    nats: float
    tokens: int
    bytes: int
    ppl: float
    bpc: float
    bpb: float
    per_token: list[ScoredToken] | None = None


class ScoreAnswer(Figures):
    """The score of a text."""

    object: Literal["score"] = "score"
    model: str
    n_tokens: int


class ScoresAnswer(Reply):
    """The scores of a text with memory and without."""

    object: Literal["score"] = "score"
    model: str
    n_tokens: int
    on: Figures
    off: Figures


@router.post("/v1/completions", response_model=CompletionAnswer, responses=EVENTS)
async def complete(request: Request, service: Serving, owner: Owner, body: CompletionRequest) -> Response:
    """Write on from prompts, or from what a session has read."""
    require_model(service, body.model)
    if body.session_id is not None:
        session = await service.open(owner, body.session_id)
        prompt = await service.encode(body.prompts()[0])
        return await answer(request, service, body, *session_job(service, session, body, prompt))
    seed = fresh_seed() if body.seed is None else body.seed
    jobs, echoes = [], []
    for place, prompt in enumerate(body.prompts()):
        ids = await service.encode(prompt)
        _, seeds = seeds_of(seed, place, body.n)
        writing = body.writing(seeds) if body.max_tokens else None
        scores = body.echo and body.likeliest is not None
        jobs.append(
            Job(
                owner=owner,
                prompt=ids,
                writing=writing,
                score=scores,
                likeliest=body.likeliest,
                streams=body.stream,
                timeout=body.timeout,
            )
        )
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else whole_characters(service.tokenizer.decode(prompt)))
    return await answer(request, service, body, Completion(service, body, jobs, echoes), seed)


async def _chats(service: Serving) -> None:
    if not service.chats:
        message = "this is a base model without turns; use /v1/completions with the whole text as prompt"
        raise RefusalError(501, f"{message}, or start the server with --chat-template plain", code="not_supported")


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=EVENTS, dependencies=[Depends(_chats)])
async def chat(request: Request, service: Serving, owner: Owner, body: ChatRequest) -> Response:
    """Write on from messages, as lines of a text."""
    require_model(service, body.model)
    seed, seeds = seeds_of(body.seed, 0, body.n)
    writing = body.writing(seeds, stops=CHAT_STOPS)
    prompt = await service.encode(body.prompt())
    job = Job(owner=owner, prompt=prompt, writing=writing, likeliest=body.likeliest, streams=body.stream, timeout=body.timeout)
    return await answer(request, service, body, Chat(service, body, [job]), seed)


def session_job(
    service: Service, session: Session, body: WritingFields, prompt: np.ndarray, *, forks: bool = False, n: int = 1
) -> tuple[Completion, int]:
    """Return what writes after what a session has read, and its seed."""
    keeps = body.seed is None and not forks
    seed, seeds = seeds_of(body.seed, 0, n)
    if keeps and session.text.random is not None:
        seed = session.text.random[0]
    job = Job(
        owner=session.owner,
        prompt=prompt,
        writing=body.writing(seeds, keeps_drawing=keeps),
        session=session,
        forks=forks,
        likeliest=body.likeliest,
        streams=body.stream,
        timeout=body.timeout,
    )
    return Completion(service, body, [job]), seed


async def answer(request: Request, service: Service, body: WritingFields, made: Completion, seed: int) -> Response:
    """Answer with the texts of jobs, whole or as they come."""
    about = {
        "id": f"{made.prefix}-{fresh_seed():08x}{fresh_seed():08x}",
        "created": int(time.time()),
        "model": service.model,
        "system_fingerprint": service.fingerprint(seed) + ("-chat-plain" if isinstance(made, Chat) else ""),
    }
    if body.stream:
        return EventStream(made.chunks(about), done="[DONE]")
    return JSONResponse(about | await unless_gone(request.receive, made.whole()))


@router.post("/v1/score")
async def score(request: Request, service: Serving, owner: Owner, body: ScoreRequest) -> ScoreAnswer | ScoresAnswer:
    """Say how well a text is predicted, with memory, without it, or both."""
    ids = await some_ids(service, body, "score")
    session = None if body.session_id is None else await service.open(owner, body.session_id)

    async def figures(*, memory: bool) -> Figures:
        length = service.engine.decoder.tgt_len
        jobs = [Job(owner=owner, prompt=ids, session=session, forks=True, score=True, timeout=body.timeout)]
        if not memory:  # each piece after nothing but the piece before it
            places = range(0, len(ids), length)
            prompts = (ids[max(0, place - length) : place + length] for place in places)
            jobs = [Job(owner=owner, prompt=prompt, score=True, timeout=body.timeout) for prompt in prompts]
        chosen = list[Chosen]()
        for job in jobs:
            chosen += (await _scored(service, job))[length if chosen else 0 :]
        return _figures(service.tokenizer, chosen, per_token=body.per_token)

    about: dict[str, Any] = {"model": service.model, "n_tokens": len(ids)}
    ways = ("on", "off") if body.memory == "both" else (body.memory,)
    found = {way: await unless_gone(request.receive, figures(memory=way == "on")) for way in ways}
    if body.memory == "both":
        return ScoresAnswer(**about, on=found["on"], off=found["off"])
    return ScoreAnswer(**about, **dict(found[body.memory]))


async def some_ids(service: Service, body: TextFields, what: str) -> np.ndarray:
    """Return the tokens of a body, and refuse one without any."""
    ids = await service.encode(body.text if body.tokens is None else body.tokens)
    if not len(ids):
        raise RefusalError(400, f"there is nothing to {what}; give text or tokens", code="invalid_request")
    return ids


async def _scored(service: Service, job: Job) -> list[Chosen]:
    scored: list[Chosen] = []
    async with aclosing(service.run(job)) as answers:
        async for each in answers:
            if isinstance(each, Progress):
                scored += each.scored
    return scored


def _figures(tokenizer: Tokenizer, chosen: list[Chosen], *, per_token: bool) -> Figures:
    """Return the score of tokens; what comes first of all has none."""
    known = [each for each in chosen if each.log_probability is not None]
    nats = -math.fsum(each.log_probability or 0.0 for each in known)
    text = tokenizer.decode([each.token for each in known])
    n_byte = max(1, len(text.encode("utf-8", "surrogatepass")))
    return Figures(
        nats=nats,
        tokens=len(known),
        bytes=n_byte,
        ppl=math.exp(min(nats / max(1, len(known)), 700.0)),
        bpc=nats / math.log(2) / max(1, len(text)),
        bpb=nats / math.log(2) / n_byte,
        per_token=[scored_token(tokenizer, each) for each in chosen] if per_token else None,
    )


def scored_token(tokenizer: Tokenizer, chosen: Chosen) -> ScoredToken:
    """Return a token that was scored, as clients see it."""
    return ScoredToken(id=chosen.token, text=token_text(tokenizer, chosen.token), logprob=chosen.log_probability)
