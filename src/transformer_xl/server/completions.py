"""Routes that write texts in OpenAI's shapes: completions and chats, whole or as they come."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from transformer_xl.generation.draft import Chosen, Read
from transformer_xl.generation.seeds import fresh_seed
from transformer_xl.reading.rows import whole_characters
from transformer_xl.server.jobs import Job, RefusalError, Session
from transformer_xl.server.service import ERRORS, EVENTS, Owner, Service, Serving
from transformer_xl.server.streaming import Events, event_stream, unless_gone
from transformer_xl.server.wire import (
    Body,
    CompletionFields,
    MaxTokens,
    Name,
    Reply,
    SessionId,
    Several,
    Text,
    TokenIds,
    WritingFields,
    token_text,
)
from transformer_xl.tokenizers.base import Tokenizer

router = APIRouter(responses=ERRORS)

CHAT_STOPS = ("\nsystem:", "\ndeveloper:", "\nuser:", "\nassistant:")
"""Where somebody else speaks."""


class CompletionRequest(CompletionFields):
    """`POST /v1/completions`."""

    model: Name | None = None
    prompt: Text | TokenIds | Annotated[list[Text], Field(max_length=128)] | Annotated[list[TokenIds], Field(max_length=128)]
    n: Several = 1
    best_of: int | None = None
    echo: bool = False
    session_id: SessionId | None = None

    @model_validator(mode="after")
    def _fits(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported; leave it out, or give it as n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 scores a prompt, which needs echo")
        if self.max_tokens == 0 and self.n > 1:
            raise ValueError("n above 1 writes several texts, which needs max_tokens above 0")
        if self.session_id is not None and (self.n > 1 or self.echo or not isinstance(self.prompt, str)):
            raise ValueError("session_id goes with a prompt of one text, n 1 and without echo; use /v1/sessions/…/ask for more")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else prompt


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """What somebody says in a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=64)] = ""
    name: SessionId | None = None

    def line(self) -> str:
        """Return it as a line of a text."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return f"{self.role}: {text}\n"


class ChatRequest(WritingFields):
    """`POST /v1/chat/completions`."""

    model: Name | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: MaxTokens = 256
    max_completion_tokens: MaxTokens | None = None
    n: Several = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Logs(Reply):
    """Tokens with their log-probabilities, as in OpenAI's completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Reply):
    """A text that was written, or what is new of it."""

    index: int
    text: str
    logprobs: Logs | None = None
    finish_reason: str | None = None


class SaidMessage(Reply):
    """What the assistant says."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Reply):
    """A message that was written."""

    index: int
    message: SaidMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class PromptDetails(Reply):
    """What of the prompts had been read before."""

    cached_tokens: int


class Usage(Reply):
    """How many tokens were read and written."""

    prompt_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens: int
    total_tokens: int


class _Written(Reply):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class CompletionAnswer(_Written):
    """Texts, as in OpenAI's completions."""

    choices: list[Choice]


class ChatAnswer(_Written):
    """Messages, as in OpenAI's chats."""

    choices: list[ChatChoice]


class Logprobs:
    """Tokens of a text as OpenAI's legacy object: the `n` likeliest of each are listed, and the token itself always is.

    A token has the same number wherever it stands.
    """

    def __init__(self, tokenizer: Tokenizer, n: int) -> None:
        self._tokenizer, self._n, self._offset = tokenizer, n, 0

    def of(self, chosen: Sequence[Chosen], *, written: bool = True) -> Logs:
        """Return the object of some more tokens, which were written, or were read in a prompt."""
        logs = Logs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for each in chosen:
            text = token_text(self._tokenizer, each.token)
            logs.tokens.append(text)
            logs.text_offset.append(self._offset)
            begun = sum((byte & 0xC0) != 0x80 for byte in self._tokenizer.piece(each.token))  # characters that begin in it
            self._offset += len(each.piece) if written else begun
            logs.token_logprobs.append(each.log_probability)
            top = {token_text(self._tokenizer, token): value for token, value in each.likeliest[: self._n]}
            logs.top_logprobs.append(None if each.log_probability is None else top | {text: each.log_probability})
        return logs


class Completion:
    """The texts of some jobs, as they come or whole.

    Args:
        service: runs them.
        body: how they are written.
        jobs: what is read and written.
        seed: from which those of the texts follow.
        echoes: what each text begins with, for each job; empty: with what is written.
    """

    prefix, object, object_of_chunks, suffix = "cmpl", "text_completion", "text_completion", ""

    def __init__(
        self, service: Service, body: WritingFields, jobs: list[Job], *, seed: int, echoes: Sequence[str] = ()
    ) -> None:
        self._service, self._body, self._jobs = service, body, jobs
        self._echoes = dict(zip(jobs, echoes, strict=False))
        self._n_read = self._n_written = 0
        self._about = {
            "id": f"{self.prefix}-{fresh_seed():08x}{fresh_seed():08x}",
            "created": int(time.time()),
            "model": service.model.id,
            "system_fingerprint": service.fingerprint(seed) + self.suffix,
        }

    async def answer(self, request: Request) -> Response:
        """Return the texts, whole or as they come."""
        if self._body.stream:
            return await event_stream(request, self._chunks(), done="[DONE]")
        return JSONResponse(await unless_gone(request.receive, self._whole()))

    async def _whole(self) -> dict[str, Any]:
        parts: dict[int, list[Choice]] = {}
        async with aclosing(self._choices()) as new:
            async for choice in new:
                if choice is not None:
                    parts.setdefault(choice.index, []).append(choice)
        choices = [self._shown(_joined(parts[index])) for index in sorted(parts)]
        return self._about | {"object": self.object, "choices": choices, "usage": self._usage()}

    async def _chunks(self) -> Events:
        about = self._about | {"object": self.object_of_chunks}
        async with aclosing(self._choices()) as new:
            async for choice in new:
                yield None if choice is None else about | {"choices": [self._new(choice)]}
        if self._body.stream_options.include_usage:
            yield about | {"choices": [], "usage": self._usage()}

    def _shown(self, choice: Choice) -> dict[str, Any]:
        """Return a choice as it is shown in an answer that is whole."""
        return choice.model_dump()

    def _new(self, choice: Choice) -> dict[str, Any]:
        """Return what is new of a choice as it is shown in a stream."""
        return choice.model_dump()

    def _usage(self) -> dict[str, Any]:
        n_prompt, n = sum(len(job.prompt) for job in self._jobs), self._n_written
        details = PromptDetails(cached_tokens=n_prompt - self._n_read)
        usage = Usage(prompt_tokens=n_prompt, prompt_tokens_details=details, completion_tokens=n, total_tokens=n_prompt + n)
        return usage.model_dump()

    async def _choices(self) -> AsyncGenerator[Choice | None, None]:
        """Yield what is new of any text; None where nothing has come for a while."""
        first = dict(zip(self._jobs, accumulate((job.n_text for job in self._jobs), initial=0), strict=False))
        scored, n = {job: list[Chosen]() for job in self._jobs}, self._body.likeliest
        logs = [None if n is None else Logprobs(self._service.tokenizer, n) for job in self._jobs for _ in range(job.n_text)]
        async with aclosing(self._service.run(*self._jobs)) as told:
            async for each in told:
                if each is None:
                    yield None
                    continue
                job, event = each
                index = first[job] + event.draft.label
                if isinstance(event, Read):
                    self._n_read += event.n
                    scored[job] += event.scored
                    continue
                if (echo := self._echoes.pop(job, None)) is not None:
                    for i in range(first[job], first[job] + job.n_text):
                        log = logs[i] if job.score else None
                        yield Choice(index=i, text=echo, logprobs=log and log.of(scored[job], written=False))
                if isinstance(event, Chosen):
                    self._n_written += 1
                    log = logs[index]
                    yield Choice(index=index, text=whole_characters(event.piece), logprobs=log and log.of([event]))
                else:
                    reason = "stop" if event.draft.reason == "stop" else "length"
                    yield Choice(index=index, text=whole_characters(event.rest), finish_reason=reason)


class Chat(Completion):
    """The same as messages of an assistant."""

    prefix, object, object_of_chunks, suffix = "chatcmpl", "chat.completion", "chat.completion.chunk", "-chat-plain"

    def __init__(self, service: Service, body: WritingFields, jobs: list[Job], *, seed: int) -> None:
        super().__init__(service, body, jobs, seed=seed)
        self._named, self._begun = set[int](), set[int]()  # which choices have a role, and which have text

    def _shown(self, choice: Choice) -> dict[str, Any]:
        return _as_chat(choice) | {"message": SaidMessage(content=choice.text.lstrip()).model_dump()}

    def _new(self, choice: Choice) -> dict[str, Any]:
        index, text = choice.index, choice.text
        if index not in self._begun:  # the model writes a space after "assistant:"
            text = text.lstrip()
        if text:
            self._begun.add(index)
        delta = {"content": text} if index in self._named else {"role": "assistant", "content": text}
        self._named.add(index)
        return _as_chat(choice) | {"delta": delta}


def _as_chat(choice: Choice) -> dict[str, Any]:
    """Return what a choice has besides its text, in the shape of chats."""
    logs = choice.logprobs
    columns = logs and zip(logs.tokens, logs.token_logprobs, logs.top_logprobs, strict=True)
    logprobs = columns and {"content": [_token(*each) for each in columns]}
    return {"index": choice.index, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _token(text: str, value: float | None, top: dict[str, float] | None = None) -> dict[str, Any]:
    """Return a token with its log-probability in the shape of chats."""
    raw = bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")) if text.startswith("bytes:\\x") else text.encode()
    token = {"token": text, "logprob": value, "bytes": list(raw)}
    return token if top is None else token | {"top_logprobs": [_token(*each) for each in top.items()]}


def _joined(parts: list[Choice]) -> Choice:
    """Return a text as a whole; its last part says why it ended."""
    logs = [part.logprobs for part in parts if part.logprobs]
    columns = {name: [value for log in logs for value in getattr(log, name)] for name in Logs.model_fields}
    text = "".join(part.text for part in parts)
    return parts[-1].model_copy(update={"text": text, "logprobs": Logs(**columns) if logs else None})


@router.post("/v1/completions", response_model=CompletionAnswer, responses=EVENTS)
async def complete(request: Request, service: Serving, owner: Owner, body: CompletionRequest) -> Response:
    """Write on from prompts, or from what a session has read."""
    service.require_model(body.model)
    if body.session_id is not None:
        session = await service.sessions.open(owner, body.session_id)
        return await session_texts(service, session, body, await service.encode(body.prompts[0])).answer(request)
    seed = fresh_seed() if body.seed is None else body.seed
    jobs, echoes = list[Job](), list[str]()
    for place, prompt in enumerate(body.prompts):
        ids = await service.encode(prompt)
        scores = body.echo and body.likeliest is not None
        jobs.append(body.job(owner, ids, seed, place=place, n=body.n, score=scores))
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else whole_characters(service.tokenizer.decode(prompt)))
    return await Completion(service, body, jobs, seed=seed, echoes=echoes).answer(request)


def session_texts(
    service: Service, session: Session, body: WritingFields, prompt: np.ndarray, *, forks: bool = False, n: int = 1
) -> Completion:
    """Return what writes after what a session has read."""
    seed = body.seed
    if seed is None:
        seed = fresh_seed() if forks or session.text.random is None else session.text.random[0]
    job = body.job(session.owner, prompt, seed, n=n, session=session, forks=forks)
    return Completion(service, body, [job], seed=seed)


async def _chats(service: Serving) -> None:
    if not service.chats:
        message = "this is a base model without turns; use /v1/completions with the whole text as prompt"
        raise RefusalError(501, f"{message}, or start the server with --chat-template plain", code="not_supported")


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=EVENTS, dependencies=[Depends(_chats)])
async def chat(request: Request, service: Serving, owner: Owner, body: ChatRequest) -> Response:
    """Write on from messages, as lines of a text."""
    service.require_model(body.model)
    seed = fresh_seed() if body.seed is None else body.seed
    prompt = await service.encode("".join(message.line() for message in body.messages) + "assistant:")
    job = body.job(owner, prompt, seed, n=body.n, stops=CHAT_STOPS)
    return await Chat(service, body, [job], seed=seed).answer(request)
