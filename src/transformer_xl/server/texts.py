"""Routes that look at a text: its tokens, and how well it is predicted."""

import math
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import model_validator

from transformer_xl.generation.draft import Chosen, Read
from transformer_xl.reading.rows import whole_characters
from transformer_xl.server.jobs import LONGEST_SECONDS, Job, RefusalError
from transformer_xl.server.service import ERRORS, Owner, Service, Serving
from transformer_xl.server.streaming import unless_gone
from transformer_xl.server.wire import Body, Name, Reply, ScoredToken, SessionId, Text, TextFields, Timeout, TokenIds
from transformer_xl.tokenizers.base import Tokenizer

router = APIRouter(responses=ERRORS)


class TokenizeRequest(Body):
    """`POST /tokenize`: the text is `content` for clients of llama.cpp, and `prompt` for those of vLLM."""

    content: Text | None = None
    prompt: Text | None = None
    model: Name | None = None
    add_special_tokens: bool = False
    add_special: bool = False

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.content is None) == (self.prompt is None):
            raise ValueError("give the text as content or as prompt")
        return self


class Tokens(Reply):
    """The tokens of a text."""

    tokens: list[int]
    count: int


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    tokens: TokenIds


class ScoreRequest(TextFields):
    """`POST /v1/score`."""

    session_id: SessionId | None = None
    memory: Literal["on", "off", "both"] = "on"
    per_token: bool = False
    timeout: Timeout = LONGEST_SECONDS


class Figures(Reply):
    """How well a text is predicted."""

    nats: float
    tokens: int
    bytes: int
    ppl: float
    bpc: float | None
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


@router.post("/tokenize", response_model=Tokens)
@router.post("/v1/tokenize", response_model=Tokens)
async def tokenize(service: Serving, body: TokenizeRequest) -> Response:
    """Return the tokens of a text."""
    service.require_model(body.model)
    ids = (await service.encode(body.content or body.prompt or "")).tolist()
    return JSONResponse({"tokens": ids, "count": len(ids)})  # which may be many


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(service: Serving, body: DetokenizeRequest) -> dict[str, str]:
    """Return the text of tokens."""
    text = whole_characters(service.tokenizer.decode((await service.encode(body.tokens)).tolist()))
    return {"content": text, "prompt": text}


@router.get("/tokenizer_info")
async def tokenizer_info(service: Serving) -> dict[str, str | int | None]:
    """Say what the tokenizer is."""
    tokenizer = service.tokenizer
    return {"tokenizer_class": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "eos_token": None, "bos_token": None}


@router.post("/v1/score")
async def score(request: Request, service: Serving, owner: Owner, body: ScoreRequest) -> ScoreAnswer | ScoresAnswer:
    """Say how well a text is predicted, with memory, without it, or both."""
    ids = await service.encode(body.content)
    if not len(ids):
        raise RefusalError(400, "there is nothing to score; give text or tokens", code="invalid_request")
    session = None if body.session_id is None else await service.sessions.open(owner, body.session_id)
    length = service.engine.decoder.tgt_len

    async def figures(way: str) -> Figures:
        jobs = [Job(owner=owner, prompt=ids, session=session, forks=True, score=True, timeout=body.timeout)]
        if way == "off":  # each piece after nothing but the piece before it
            prompts = (ids[max(0, place - length) : place + length] for place in range(0, len(ids), length))
            jobs = [Job(owner=owner, prompt=prompt, score=True, timeout=body.timeout) for prompt in prompts]
        chosen = list[Chosen]()
        for job in jobs:
            chosen += (await _scored(service, job))[length if chosen else 0 :]
        return _figures(service.tokenizer, chosen, per_token=body.per_token)

    about: dict[str, Any] = {"model": service.model.id, "n_tokens": len(ids)}
    if body.memory == "both":
        on, off = [await unless_gone(request.receive, figures(way)) for way in ("on", "off")]
        return ScoresAnswer(**about, on=on, off=off)
    return ScoreAnswer(**about, **dict(await unless_gone(request.receive, figures(body.memory))))


async def _scored(service: Service, job: Job) -> list[Chosen]:
    async with aclosing(service.run(job)) as told:
        events = [each[1] async for each in told if each]
    return [each for event in events if isinstance(event, Read) for each in event.scored]


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
        bpc=None if tokenizer.counts == "word" else nats / math.log(2) / max(1, len(text)),
        bpb=nats / math.log(2) / n_byte,
        per_token=[ScoredToken.of(tokenizer, each) for each in chosen] if per_token else None,
    )
